"""The gradient that all strategies agree on is the slope of the loss, written out once more in NumPy's float64."""

import jax
import numpy as np
import one_device
import pytest
from ml_collections import FrozenConfigDict

from course_lib.parallel import strategy
from course_lib.parallel.options import Strategy

STEP = 1e-5  # the error of a central difference falls with its square, rounding grows as 1e-16 / STEP


def loss(params, batch):
    """Returns the weighted mean cross entropy of the Transformer."""
    tokens, labels, weights = (np.asarray(x) for x in (batch.inputs, batch.labels, batch.weights))
    length = tokens.shape[1]
    x = params["embed"]["embedding"][tokens] + params["pos_emb"]["embedding"][:length]
    for n in range(params["block"]["mlp"]["input_layer"]["kernel"].shape[0]):
        mlp, attn = (jax.tree.map(lambda leaf, n=n: leaf[n], params["block"][part]) for part in ("mlp", "attn"))
        x = x + dense(gelu(dense(norm(x, mlp["pre_norm"]), mlp["input_layer"])), mlp["output_layer"])
        x = x + attention(norm(x, attn["pre_norm"]), attn)
    logits = dense(norm(x, params["post_norm"]), params["output_layer"])
    entropy = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (entropy * weights).sum() / weights.sum()


def dense(x, layer):
    return x @ layer["kernel"] + layer["bias"]


def norm(x, layer):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * layer["scale"] + layer["bias"]


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(x, layer):
    length, width = x.shape[1], layer["qkv"]["kernel"].shape[-1] // 3
    qkv = np.einsum("bld,dhk->bhlk", x, layer["qkv"]["kernel"]) + layer["qkv"]["bias"][:, None]
    query, key, value = np.split(qkv, 3, axis=-1)
    scores = np.where(np.tri(length, dtype=bool), query @ key.swapaxes(-1, -2) / np.sqrt(width), -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    return np.einsum("bhlk,hkd->bld", weights @ value, layer["output_layer"]["kernel"]) + layer["output_layer"]["bias"]


CASES = {
    "one device": None,
    "data x tensor": (dict(data=2, tensor=2), Strategy(zero=3, sequence=True)),
    "data x pipe x tensor": (dict(data=2, pipe=2, tensor=2), Strategy(zero=1, microbatches=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_along_a_direction_is_the_slope_of_the_loss(case):
    whole = one_device.small()
    batch = one_device.batch(whole)
    params, grads, metrics = one_device.reference(FrozenConfigDict(whole))
    if CASES[case]:
        axes, chosen = CASES[case]
        grad_fn = jax.jit(strategy.gradient(whole, one_device.grid(**axes), chosen))
        with jax.default_matmul_precision("highest"):
            grads, metrics = grad_fn(params, batch, jax.random.key(2))
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    assert loss(params, batch) == pytest.approx(float(metrics["loss"][0] / metrics["loss"][1]), rel=1e-5)
    random = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(params)
    for number, (path, gradient) in enumerate(jax.tree_util.tree_leaves_with_path(jax.device_get(grads))):
        direction = random.normal(size=gradient.shape) / np.sqrt(gradient.size)
        ahead, behind = (
            loss(tree.unflatten([leaf + s * direction if i == number else leaf for i, leaf in enumerate(leaves)]), batch)
            for s in (STEP, -STEP)
        )
        slope, norm_of_leaf = (ahead - behind) / (2 * STEP), np.linalg.norm(gradient) / np.sqrt(gradient.size)
        assert abs(slope - (gradient * direction).sum()) <= one_device.CLOSE * norm_of_leaf + 1e-8, jax.tree_util.keystr(path)
