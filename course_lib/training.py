"""Training: the state, the losses, and the one train step, in which the techniques of this
course meet.

    loss_fn(params, batch, rng) -> (loss, metrics)     loss: the weighted mean;
                                                       metrics: name -> (sum, count)
    grad_fn(params, batch, rng) -> (grads, metrics)    the gradient of that mean
    step(state, batch) -> (state, metrics)             rng, scale, gradients, unscale, clip,
                                                       update

A model is a plain function, `apply_fn(params, inputs, rng) -> logits`, where `rng=None` means
evaluation, without dropout; `as_function` makes one from a Flax model. Training and evaluation
use the same loss function.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import arguments, measure, optimizers
from course_lib.configs import check, published_155m
from course_lib.measure import virtual
from course_lib.models import losses, parameters, transformer
from course_lib.models.hooks import Hooks
from course_lib.models.losses import ApplyFn
from course_lib.models.losses import as_function as as_function  # these belong to training
from course_lib.models.losses import classification_loss as classification_loss
from course_lib.models.losses import cross_entropy as cross_entropy
from course_lib.models.losses import next_token_loss as next_token_loss
from course_lib.one_device import gradient_accumulation, mixed_precision
from course_lib.one_device.gradient_accumulation import GradFn, LossFn, Metrics, PyTree
from course_lib.one_device.gradient_accumulation import check_loss as check_loss
from course_lib.text.batches import Batch


@struct.dataclass
class TrainState:
    """Everything that one step hands to the next: a pytree of arrays, which can be donated,
    placed and stored.
    """

    step: Any  # int32, the number of batches so far, skipped updates included
    params: PyTree
    opt_state: PyTree
    rng: Any  # typed random key, split at every step
    loss_scale: Any  # one of `mixed_precision`


def init_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    rng: Key[Array, ""],
    loss_scale: mixed_precision.LossScale | None = None,
) -> TrainState:
    """Returns the state before the first step.

    It holds `params` and `rng` themselves, not copies: a step that donates its state consumes
    them. `rng` is a typed random key, for dropout. What the optimizer's state shares with them
    is copied, such as the first parameters in `optax.contrib.prodigy`: an array can be donated
    once.
    """
    arguments.optimizer(optimizer)
    scale = mixed_precision.NoLossScale() if loss_scale is None else loss_scale
    mixed_precision.check_value(scale)
    once = {id(leaf) for leaf in jax.tree.leaves((params, rng))}

    def own(leaf: Any) -> Any:
        shared = id(leaf) in once
        once.add(id(leaf))
        return jnp.copy(leaf) if shared and isinstance(leaf, jax.Array) else leaf

    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=jax.tree.map(own, optimizer.init(params)),
        rng=rng,
        loss_scale=jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), scale),
    )


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    num_minibatches: int = 1,
    method: str = "scan",
    accumulator_dtype: Any = jnp.float32,
    policy: mixed_precision.Policy | None = None,
    donate: bool = True,
    gradient_fn: Callable[[LossFn], GradFn] | None = None,
    skip_not_finite: bool = False,
    gradient_norm: bool = False,
    out_shardings: Any = None,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """Builds the train step, `step(state, batch) -> (state, metrics)`, compiled at its first
    call.

    If the state holds a loss scale, a step with gradients that are not all finite changes
    neither parameters nor optimizer state, and `metrics["skipped"]` counts it. Without a loss
    scale and without `skip_not_finite`, the program has none of these checks.

    A compiled step cannot raise an error. A label outside of the vocabulary makes the loss NaN
    unless its weight is 0; a token that is too large does, and a negative one counts from the
    end of the vocabulary. Batches of `text.data` and `text.loading` hold no such tokens; check
    others with `data.check_tokens` first.

    Args:
      loss_fn: `loss_fn(params, batch, rng) -> (loss, metrics)`; `check_loss` tries it.
      optimizer: any of optax. It sees unscaled gradients, so clipping to a norm is part of it.
      num_minibatches: M, into how many the batch is cut.
      method: "scan" or "loop" over the minibatches.
      accumulator_dtype: dtype that their gradients are summed in.
      policy: dtypes to compute in; None: the model's own.
      donate: whether the new state overwrites the old one.
      gradient_fn: takes a loss function and returns its gradient function, for the full batch.
        None: that of one device, with the three options of minibatches.
      skip_not_finite: skips an update also if the loss, the new parameters or the optimizer's
        new state are not finite. It adds nothing to the train state, so a run can switch it on
        when it resumes.
      gradient_norm: whether the metrics have the norm of the unscaled gradient, before the
        optimizer clips it.
      out_shardings: where the new state and the metrics are placed, as `jax.jit` takes it.
    """
    parts = dict(
        num_minibatches=num_minibatches, method=method, accumulator_dtype=accumulator_dtype
    )
    gradient_accumulation.check_options(**parts)
    arguments.functions(loss_fn=loss_fn)
    arguments.optimizer(optimizer)
    asked = num_minibatches, method, jnp.dtype(accumulator_dtype)
    if gradient_fn and asked != (1, "scan", jnp.float32):
        raise ValueError(
            f"num_minibatches={num_minibatches}, method={method!r},"
            f" accumulator_dtype={accumulator_dtype!r} must not come with gradient_fn, which"
            " cuts the batch itself: they would do nothing"
        )
    gradient_fn = gradient_fn or functools.partial(gradient_accumulation.of_loss, **parts)
    loss_fn = loss_fn if policy is None else policy.wrap(loss_fn)

    def train_step(state, batch):
        mixed_precision.check_loss_scale(policy, state.loss_scale)
        rng, step_rng = jax.random.split(state.rng)

        def scaled_loss_fn(params, batch, rng):
            loss, metrics = loss_fn(params, batch, rng)
            return state.loss_scale.scale(loss), metrics

        is_scaled = not isinstance(state.loss_scale, mixed_precision.NoLossScale)
        grad_fn = gradient_fn(scaled_loss_fn if is_scaled else loss_fn)
        grads, metrics = grad_fn(state.params, batch, step_rng)
        with jax.named_scope("optimizer"):
            grads = state.loss_scale.unscale(grads)
            if gradient_norm:
                metrics |= {"gradient_norm": (optax.tree.norm(grads), jnp.float32(1))}
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            new = dataclasses.replace(
                state, step=state.step + 1, params=params, opt_state=opt_state, rng=rng
            )
        finite = []
        if is_scaled:
            finite.append(mixed_precision.all_finite(grads))
            new = dataclasses.replace(new, loss_scale=state.loss_scale.update(finite[0]))
        if skip_not_finite:
            finite.append(
                mixed_precision.all_finite((new.params, new.opt_state, metrics["loss"]))
            )
        if finite:
            new, metrics = skip_nonfinite_update(
                functools.reduce(jnp.logical_and, finite), state, new, metrics
            )
        return new, metrics

    return jax.jit(train_step, donate_argnums=0 if donate else (), out_shardings=out_shardings)


def skip_nonfinite_update(finite, old, new, metrics):
    """Keeps old parameters and optimizer state unless `finite`, and counts skipped steps."""
    # A sum that once took in a NaN stays NaN.
    metrics = jax.tree.map(lambda metric: jnp.where(finite, metric, 0), metrics)
    skipped = 1 - finite.astype(jnp.float32)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (new.params, new.opt_state),
        (old.params, old.opt_state),
    )
    new = dataclasses.replace(new, params=params, opt_state=opt_state)
    return new, metrics | {"skipped": (skipped, jnp.ones_like(skipped))}


def add_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Adds sums to sums and counts to counts."""
    return jax.tree.map(jnp.add, first, second)


def mean_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Divides each sum by its count, once, at the end; NaN where nothing was counted."""
    metrics = jax.device_get(metrics)
    return {
        name: float(total / count) if count else float("nan")
        for name, (total, count) in metrics.items()
    }


def evaluate(loss_fn: LossFn, params: PyTree, batches: Iterable[Any]) -> dict[str, float]:
    """Returns the mean metrics over all labels of all batches, without dropout.

    Args:
      loss_fn: the loss function of the training, called with `rng=None`. Pass the same
        object every time: it compiles once.
      params: pytree of parameters.
      batches: at least one batch; an iterator makes each when it is needed.
    """
    if isinstance(batches, Batch | Mapping | jax.Array | np.ndarray):
        raise ValueError(
            f"batches={type(batches).__name__} must be several batches, or a list of one:"
            " [batch]"
        )
    each = (_metrics(loss_fn, params, batch) for batch in batches)
    if (late := next(each, None)) is None:
        raise ValueError(
            "batches must hold at least one batch: a mean over nothing is undefined"
        )
    total: dict[str, list[float]] = {}
    # The next batch is computed while the metrics of the last one are read.
    for following in itertools.chain(each, [None]):
        # A float32 sum over many batches would round away what one batch adds.
        for name, pair in jax.device_get(late).items():
            total[name] = [
                old + float(new)
                for old, new in zip(total.get(name, [0.0, 0.0]), pair, strict=True)
            ]
        late = following
    return mean_metrics(total)


@functools.partial(jax.jit, static_argnums=0)
def _metrics(loss_fn, params, batch):
    return loss_fn(params, batch, None)[1]


ONE_DEVICE = AbstractMesh((1,), ("data",))
"""The mesh of a run on the device where its arguments lie, whichever that is."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run, built from one configuration."""

    config: ConfigDict  # a frozen copy of the configuration
    apply_fn: ApplyFn  # the Transformer as a function of its parameters
    loss_fn: LossFn  # its next-token loss
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    init: Callable[[Key[Array, ""]], TrainState]  # the state before the first step
    mesh: Mesh | AbstractMesh = ONE_DEVICE
    specs: Any = None  # a `TrainState` of PartitionSpecs; None if no device is named
    flops: Callable[[], measure.Flops] | None = None  # of a step; None: the Transformer's

    def abstract(self) -> tuple[TrainState, Batch]:
        """Returns the shapes of the state and of a batch, to lower the step with. They are
        placed on the mesh, if it names devices; nothing is computed or allocated.
        """
        state = virtual.shapes(self.init, jax.random.key(0))  # moments may be on the host
        size = self.config.data.batch_size, self.config.data.seq_len
        tokens, weights = (
            jax.ShapeDtypeStruct(size, kind) for kind in (jnp.int32, jnp.float32)
        )
        batch = Batch(tokens, tokens, weights)
        if self.mesh is ONE_DEVICE:
            return state, batch
        place = functools.partial(NamedSharding, self.mesh)
        placed = jax.tree.map(
            lambda spec, part: virtual.abstract(part, place(spec)),
            self.specs,
            state,
            is_leaf=lambda leaf: isinstance(leaf, P),
        )
        return placed, virtual.abstract(batch, place(P("data")))


@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    """A frozen, checked configuration as functions of the Transformer's parameters."""

    config: ConfigDict
    hooks: Hooks  # of one device's share of the model
    score: losses.Score  # of its logits, or of their factors

    @functools.cached_property
    def loss_fn(self) -> LossFn:
        """The loss, with the load-balancing loss if the model has experts."""
        model = self.config.model
        apply_fn = transformer.function(model, self.hooks, balance=model.num_experts > 0)
        if model.num_experts:
            return losses.balanced_loss(apply_fn, model.balance_weight, self.score)
        return next_token_loss(apply_fn, self.score)

    def init(self, rng: Key[Array, ""]) -> TrainState:
        """Returns the state before the first step."""
        param_rng, state_rng = jax.random.split(rng)
        params = parameters.init(param_rng, self.config.model)
        params = optimizers.cast_params(self.config.optimizer, params)
        optimizer = optimizers.from_config(self.config.optimizer)
        scale = mixed_precision.loss_scale(self.config.training.loss_scale)
        return init_state(params, optimizer, state_rng, scale)

    def in_minibatches(
        self, grad_fn: GradFn, cut: Callable[..., Any] = gradient_accumulation.accumulate
    ) -> GradFn:
        """Returns the gradient function of a batch, from that of a minibatch."""
        asked = self.config.training
        return functools.partial(
            cut,
            grad_fn,
            num_minibatches=asked.num_minibatches,
            method=asked.accumulation,
            accumulator_dtype=asked.accumulator_dtype,
        )

    def gradient(self, loss_fn: LossFn) -> GradFn:
        """Returns the gradient function of a loss on one device; in place only of `loss_fn`."""
        if self.config.training.backward == "autodiff":
            return self.in_minibatches(gradient_accumulation.gradient(loss_fn))
        if loss_fn is not self.loss_fn:
            raise ValueError(
                "training.backward='in_place' must be 'autodiff' for another loss than the"
                " configuration's, and with a policy or a loss scale: the backward pass by hand"
                " would ignore them"
            )
        from course_lib.smaller_and_faster import smallest_step

        # A layer is rematerialized as `remat_policy` says, whatever `remat` holds.
        again = FrozenConfigDict(self.config.model.to_dict() | {"remat": ("Block",)})
        parts = transformer.parts(again, self.hooks)

        def loss(rest: PyTree, x: Array, batch: Batch) -> tuple[Array, Metrics]:
            of_head = next_token_loss(lambda *_: parts.head(rest, x), self.score)
            return of_head(rest, batch, None)

        add = smallest_step.gradient_in_place(
            lambda rest, batch: parts.embed(rest, batch.inputs), parts.layer, loss
        )
        return self.in_minibatches(add, gradient_accumulation.accumulate_in_place)


def functions(
    config: ConfigDict, hooks: Hooks = Hooks(), score: losses.Score | None = None
) -> Functions:
    """Returns the functions of one device. `score`: None for the configuration's own."""
    if score is None:
        score = cross_entropy
        if config.model.loss_chunks > 1:
            from course_lib.smaller_and_faster.large_vocabulary import Factors

            hooks = dataclasses.replace(hooks, output=Factors)
            score = losses.chunked_cross_entropy(config.model)
    return Functions(config, hooks, score)


def build(config: ConfigDict) -> Run:
    """Builds a training run of the Transformer on the device where its arguments lie. Nothing
    is computed yet.

    `strategies.build` names one or more devices; on a mesh of one it compiles to the same
    program. Raises a ValueError if the configuration cannot work.
    """
    check(config)
    config = FrozenConfigDict(config)  # later changes of the argument do not reach this run
    own = functions(config)
    optimizer, donate = optimizers.from_config(config.optimizer), config.training.donate
    step = make_train_step(own.loss_fn, optimizer, donate=donate, gradient_fn=own.gradient)
    apply_fn = transformer.function(config.model)
    return Run(config, apply_fn, own.loss_fn, step, jax.jit(own.init))


def step_flops(config: ConfigDict) -> measure.Flops:
    """Counts the FLOPs of the model's matrix products in one step, with attention and logits
    written out: kernels cannot be looked into, and all kinds of attention count alike. Products
    of the optimizer do not count, nor does it matter how loss and backward pass are computed.
    """
    written_out = ConfigDict(config.to_dict())  # a copy: the caller's stays as it is
    written_out.model.update(attention="reference", loss_chunks=1)
    written_out.optimizer = published_155m().optimizer  # not the caller's
    written_out.optimizer.name = "sgd"
    # By hand, the last product of each block is traced twice; XLA removes the unused one.
    written_out.training.backward = "autodiff"
    run = build(written_out)
    return measure.flops(run.train_step, *run.abstract())
