"""Loss functions and their metrics, `loss_fn(params, batch, rng) -> (loss, metrics)`, of models
as plain functions: see `course_lib.training`. A model whose loss is computed in chunks returns
the factors of its logits (`large_vocabulary.Factors`).
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key
from ml_collections import ConfigDict

from course_lib.one_device.gradient_accumulation import LossFn, nonzero

ApplyFn = Callable[..., Any]
Score = Callable[..., tuple[Array, Array]]


def as_function(model: Any) -> ApplyFn:
    """Returns a Flax model as a plain function `apply_fn(params, inputs, rng=None) -> logits`.

    A Linen module's call takes `train`, and draws its dropout from `rngs["dropout"]`. The
    parameters of an NNX module are `nnx.state(model, nnx.Param)`; besides them it may hold
    streams of random numbers (`nnx.RngState`).
    """
    if not isinstance(model, nn.Module):
        return _nnx_as_function(model)

    def apply_fn(params, inputs, rng=None):
        mode = dict(train=False) if rng is None else dict(train=True, rngs={"dropout": rng})
        return model.apply({"params": params}, inputs, **mode)

    return apply_fn


def _nnx_as_function(model: Any) -> ApplyFn:
    from flax import nnx  # slow to import, and most models are no NNX modules

    if not isinstance(model, nnx.Module):
        raise ValueError(
            f"model={type(model).__name__} must be a Linen or an NNX module; of an Equinox one,"
            " `params, rest = eqx.partition(model, eqx.is_inexact_array)` are the parameters,"
            " `lambda params, x, rng: jax.vmap(eqx.combine(params, rest))(x)` the function"
        )
    parts: Any = nnx.split(model, nnx.Param, nnx.RngState, ...)
    graph, _, streams, rest = parts
    if others := jax.tree_util.tree_leaves_with_path(rest):
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in others]
        raise ValueError(
            f"model={type(model).__name__} must hold parameters and random streams only, not"
            f" {', '.join(names)}: use nnx.LayerNorm in place of nnx.BatchNorm, make constants"
            " nnx.Params or Python numbers, and train without caches"
        )

    def apply_fn(params, inputs, rng=None):
        if rng is None:
            # A copy: else `merge` would advance the random streams of the caller's model.
            module = nnx.merge(graph, params, jax.tree.map(lambda leaf: leaf, streams))
            module.eval()
        else:
            module = nnx.merge(graph, params, _seeded(streams, rng))
            module.train()
        return module(inputs)

    return apply_fn


def _seeded(streams: Any, rng: Key[Array, ""]) -> Any:
    """Gives each stream of random numbers its own key, also within a stack of streams."""
    leaves, tree = jax.tree.flatten(streams)
    for index, leaf in enumerate(leaves):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key = jax.random.fold_in(rng, index)
            leaves[index] = jax.random.split(key, leaf.shape) if leaf.shape else key
    return jax.tree.unflatten(tree, leaves)


def cross_entropy(
    logits: Float[Array, "... V"], labels: Int[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns the cross entropy of each label in nats, and 1.0 where the label has the largest
    logit, else 0.0. A label that is too large gives NaN, a negative one counts from the end.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels {labels.shape} must be one per row of logits {logits.shape}")
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return loss, (logits.argmax(axis=-1) == labels).astype(jnp.float32)


def z_loss(weight: float) -> Score:
    """Returns `cross_entropy` with `weight * logsumexp(logits) ** 2` added to the loss, which
    keeps logits small (Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311, section 5).
    """

    def score(logits: Array, labels: Array) -> tuple[Array, Array]:
        loss, correct = cross_entropy(logits, labels)
        return loss + weight * jax.nn.logsumexp(logits, axis=-1) ** 2, correct

    return score


def chunked_cross_entropy(config: ConfigDict) -> Score:
    """Returns a cross entropy of the factors of the logits (`large_vocabulary.Factors`)."""
    from course_lib.smaller_and_faster import large_vocabulary

    options = dict(chunks=config.loss_chunks, along=config.loss_along, z_loss=config.z_loss)

    def score(logits: Any, labels: Array) -> tuple[Array, Array]:
        factors = logits.x, logits.head, labels, logits.bias
        return large_vocabulary.linear_cross_entropy(*factors, **options)

    return score


def classification_loss(apply_fn: ApplyFn, score: Score = cross_entropy) -> LossFn:
    """Returns the loss function of a classifier: inputs [B, ...], labels [B] and their weights
    [B]. A label of weight 0 may be any number, such as -100, but its logits must be finite. Any
    other label that is no class makes the loss NaN, and so does a negative weight: a compiled
    function cannot raise an error.

    `score` gives loss and correctness of each label, as `cross_entropy` does, from what the
    model returns: logits, or their factors.
    """

    def loss_fn(params, batch, rng):
        logits = apply_fn(params, batch.inputs, rng)
        labels, weights = batch.labels, jnp.asarray(batch.weights, jnp.float32)
        if not logits.shape[:-1] == labels.shape == weights.shape:
            raise ValueError(
                f"labels {labels.shape} and weights {weights.shape} must have the first axes of"
                f" logits {logits.shape}: each label belongs to one row of logits"
            )
        labels = jnp.where(weights == 0, 0, labels)
        # A negative label would count from the end. NaN in the losses would take more memory.
        weights = jnp.where((weights < 0) | (labels < 0), jnp.nan, weights)
        with jax.named_scope("loss"):  # `measure.tape` reads this name
            if isinstance(logits, jax.Array):
                logits = logits.astype(jnp.float32)
            loss, correct = score(logits, labels)
        count = weights.sum()
        metrics = {
            "loss": ((loss * weights).sum(), count),
            "accuracy": ((correct * weights).sum(), count),
        }
        return metrics["loss"][0] / nonzero(count), metrics

    return loss_fn


next_token_loss = classification_loss
"""The loss of a language model, in nats per token: inputs, labels and weights are [B, L]. Each
position is an example, and the vocabulary holds the classes.
"""


def balanced_loss(apply_fn: ApplyFn, weight: float, score: Score = cross_entropy) -> LossFn:
    """Returns the loss of a language model with experts.

    It adds `weight` times the load-balancing loss of a sequence to the loss of each of its
    labels. The result is therefore still a weighted mean over labels, which minibatches and
    devices can add up. `metrics["balance"]` reports the load-balancing loss alone. `apply_fn`
    gives `(logits, balance)`, as `transformer.function(config, balance=True)` does.
    """

    def loss_fn(params, batch, rng):
        logits, balance = apply_fn(params, batch.inputs, rng)
        _, metrics = next_token_loss(lambda *_: logits, score)(params, batch, rng)
        total, count = metrics["loss"]
        uneven = (balance[:, None] * batch.weights.astype(jnp.float32)).sum()
        total = total + weight * uneven
        return total / nonzero(count), metrics | {
            "loss": (total, count),
            "balance": (uneven, count),
        }

    return loss_fn
