"""The gradient that all strategies agree on is the slope of the loss, written out once more in
NumPy's float64.
"""

import jax
import numpy as np
import one_device
import pytest
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib import training

# the error of a central difference falls with its square, rounding grows as 1e-16 / STEP
STEP = 1e-5


def loss(params, batch, model):
    """Returns the weighted mean cross entropy of the Transformer, and with experts of their
    balance.

    Which options a model has shows in its parameters; `model`, the part of a configuration,
    says how full experts may be.
    """
    tokens, labels, weights = (
        np.asarray(x) for x in (batch.inputs, batch.labels, batch.weights)
    )
    x = params["embed"]["embedding"][tokens] + params["pos_emb"]["embedding"][: tokens.shape[1]]
    uneven = np.zeros(len(tokens))
    for n in range(model.num_layers):
        layer = jax.tree.map(lambda leaf, n=n: leaf[n], params["block"])
        mlp, attn = layer["mlp"], layer["attn"]
        if "router" in mlp:
            change, balance = experts(norm(x, mlp["pre_norm"]), mlp, model)
            x, uneven = x + change, uneven + balance / model.num_layers
            x = x + attention(norm(x, attn["pre_norm"]), attn)
        elif "pre_norm" in layer:  # a parallel block
            y = norm(x, layer["pre_norm"])
            # the norms of heads are the block's
            x = x + feed_forward(y, mlp) + attention(y, layer | attn)
        else:
            x = x + feed_forward(norm(x, mlp["pre_norm"]), mlp)
            x = x + attention(norm(x, attn["pre_norm"]), attn)
    logits = dense(norm(x, params["post_norm"]), params["output_layer"])
    entropy = (
        np.log(np.exp(logits).sum(-1))
        - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    )
    return ((entropy + model.balance_weight * uneven[:, None]) * weights).sum() / weights.sum()


def dense(x, layer):
    return x @ layer["kernel"] + layer["bias"]


def norm(x, layer):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * layer[
        "scale"
    ] + layer.get("bias", 0)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def feed_forward(x, layer):
    return dense(gelu(dense(x, layer["input_layer"])), layer["output_layer"])


def attention(x, layer):
    length = x.shape[1]
    if "qkv" in layer:
        query, key, value = np.split(heads(x, layer["qkv"]), 3, axis=-1)
    else:
        query, (key, value) = heads(x, layer["q"]), np.split(heads(x, layer["kv"]), 2, axis=-1)
        key, value = (
            np.repeat(part, query.shape[1] // key.shape[1], axis=1) for part in (key, value)
        )
    if "query_norm" in layer:
        query, key = norm(query, layer["query_norm"]), norm(key, layer["key_norm"])
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weights = softmax(np.where(np.tri(length, dtype=bool), scores, -np.inf))
    return (
        np.einsum("bhlk,hkd->bld", weights @ value, layer["output_layer"]["kernel"])
        + layer["output_layer"]["bias"]
    )


def heads(x, layer):
    return np.einsum("bld,dhk->bhlk", x, layer["kernel"]) + layer["bias"][:, None]


def experts(x, layer, model):
    """Every expert computes every token here; where it was not chosen, or has no room, its
    weight is 0.
    """
    batch, length, _ = x.shape
    probabilities, count = softmax(x @ layer["router"]), model.num_experts
    chosen = np.argsort(-probabilities)[..., : model.experts_per_token]
    # each token's choices, token after token
    in_line = np.eye(count)[chosen].reshape(batch, -1, count)
    room = np.ceil(model.capacity_factor * in_line.shape[1] / count)
    taken = (
        (in_line * (in_line.cumsum(axis=1) <= room))
        .reshape(batch, length, -1, count)
        .sum(axis=2)
    )
    first, second = layer["expert_in"], layer["expert_out"]
    hidden = gelu(np.einsum("bld,edf->blef", x, first["kernel"]) + first["bias"])
    outputs = np.einsum("blef,efd->bled", hidden, second["kernel"]) + second["bias"]
    balance = count * (in_line.mean(axis=1) * probabilities.mean(axis=1)).sum(axis=-1)
    return np.einsum("ble,bled->bld", taken * probabilities, outputs), balance


NORMED = {"model.num_heads": 4, "model.head_dim": 4, "model.num_kv_heads": 2}
NORMED |= {"model.qk_norm": True, "model.parallel_block": True}
EXPERTS = {"model.num_experts": 4, "model.experts_per_token": 2, "model.capacity_factor": 1.0}


@pytest.mark.parametrize("changes", [{}, slow(NORMED), slow(EXPERTS)], ids=len)
def test_the_gradient_along_a_direction_is_the_slope_of_the_loss(changes):
    """One device's, with which other tests compare every strategy."""
    whole = one_device.small(**changes)
    batch = one_device.batch(whole)
    params, grads, metrics = one_device.reference(FrozenConfigDict(whole))
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    mean = training.mean_metrics(metrics)["loss"]
    assert loss(params, batch, whole.model) == pytest.approx(mean, rel=1e-5)
    random = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(params)
    for number, (path, gradient) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
        direction = random.normal(size=gradient.shape) / np.sqrt(gradient.size)
        sides = []
        for step in (STEP, -STEP):
            moved = leaves.copy()
            moved[number] = leaves[number] + step * direction
            sides.append(loss(tree.unflatten(moved), batch, whole.model))
        slope = (sides[0] - sides[1]) / (2 * STEP)
        bound = one_device.CLOSE * np.linalg.norm(gradient) / np.sqrt(gradient.size) + 1e-8
        assert abs(slope - (gradient * direction).sum()) <= bound, jax.tree_util.keystr(path)
