"""The gradient that all strategies agree on is the slope of the loss."""

import jax
import numpy as np
import one_device
import pytest
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib import training
from course_lib.one_device import gradient_accumulation

NORMED = {"model.num_heads": 4, "model.head_dim": 4, "model.num_kv_heads": 2}
NORMED |= {"model.qk_norm": True, "model.parallel_block": True}
EXPERTS = {"model.num_experts": 4, "model.experts_per_token": 4, "model.capacity_factor": 4.0}
STEP = 5e-3  # a loss near 4 is rounded to 2e-7, so a slope to 4e-5


@pytest.mark.parametrize("changes", [{}, slow(NORMED), slow(EXPERTS)], ids=len)
def test_the_loss_rises_along_a_leaf_of_the_gradient_by_its_norm(changes):
    """One device's, with which other tests compare every strategy."""
    whole, draw = one_device.small(**changes), np.random.default_rng(0)
    batch, loss_fn = one_device.batch(whole), training.build(whole).loss_fn
    params, _, _ = one_device.reference(FrozenConfigDict(whole))
    # small first embeddings would bend the loss within a step
    params = jax.tree.map(
        lambda x: x + 0.5 * draw.normal(size=x.shape).astype(np.float32), params
    )
    leaves, tree = jax.tree.flatten(params)
    loss = one_device.jit(lambda batch, *x: loss_fn(tree.unflatten(x), batch, None)[0])
    with jax.default_matmul_precision("highest"):
        grads, _ = one_device.jit(gradient_accumulation.gradient(loss_fn))(params, batch, None)
        for number, (path, gradient) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
            norm = np.linalg.norm(gradient)
            along = STEP * np.asarray(gradient) / (norm + 1e-12)
            up, down = (
                float(
                    loss(batch, *leaves[:number], leaves[number] + move, *leaves[number + 1 :])
                )
                for move in (along, -along)
            )
            slope = (up - down) / (2 * STEP)
            assert abs(slope - norm) <= 1e-3 * norm + 1e-4, jax.tree_util.keystr(path)
