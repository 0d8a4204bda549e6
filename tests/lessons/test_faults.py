"""Every fault of the zoo is found by what proves the strategies, which passes without it."""

import functools

import jax
import numpy as np
import one_device
import pytest
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib import measure, training
from course_lib.lessons import bug_zoo
from course_lib.many_devices import strategies
from course_lib.many_devices.strategies import Strategy

KEY = jax.random.key(3)


def same_gradient(axes, chosen, **changes):
    """Compares gradients with one device's, as tests/many_devices/test_strategies.py does."""
    whole = one_device.small(**changes)
    params, expected, _ = one_device.reference(FrozenConfigDict(whole))
    with jax.default_matmul_precision("highest"):
        grad_fn = one_device.jit(strategies.gradient(whole, one_device.grid(**axes), chosen))
        grads, _ = grad_fn(params, one_device.batch(whole), KEY)
    return not one_device.different_leaves(grads, expected)


def same_update():
    """Compares parameters after a step whose gradient is clipped with one device's."""
    whole = one_device.small(**{"optimizer.clip_norm": 0.1, "training.donate": False})
    params, grads, _ = one_device.reference(FrozenConfigDict(one_device.small()))
    norm = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(grads)))
    expected = jax.tree.map(lambda p, g: p - 0.1 * g * min(1.0, 0.1 / norm), params, grads)
    run = strategies.build(whole, one_device.grid(data=2), Strategy(zero=1))
    with jax.default_matmul_precision("highest"):
        found, _ = one_device.call(
            run.train_step,
            one_device.call(run.init, jax.random.key(0)),
            one_device.batch(whole),
        )
    pairs = zip(
        jax.tree.leaves(jax.device_get(found.params)), jax.tree.leaves(expected), strict=True
    )
    return all(np.allclose(a, b, atol=3e-7) for a, b in pairs)


def same_bytes():
    """Compares what ZeRO-3 gathers with the bytes of parameters that are cut, and of kernels
    once more.
    """
    whole, grid, chosen = one_device.small(), one_device.grid(data=2), Strategy(zero=3)
    state, batch = strategies.build(whole, grid, chosen).abstract()
    lowered = one_device.jit(strategies.gradient(whole, grid, chosen)).lower(
        state.params, batch, KEY
    )
    found = measure.ledger(lowered.compile(), grid)
    params, held = state.params, strategies.layout(whole, grid, chosen)[0].params
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(held), strict=True
    )
    cut = [(path, leaf) for (path, leaf), spec in leaves if "data" in tuple(spec)]
    again = [leaf for path, leaf in cut if path[0].key == "block" and path[-1].key == "kernel"]
    return found.payload("all-gather") == 4 * sum(
        leaf.size for leaf in [leaf for _, leaf in cut] + again
    )


def own_masks():
    """Compares a loss with dropout with that of two devices, each with its half of the batch
    and its own key.
    """
    whole = one_device.small(**{"model.dropout_rate": 0.5})
    params, _, _ = one_device.reference(FrozenConfigDict(one_device.small()))
    batch, single = one_device.batch(whole), one_device.jit(training.build(whole).loss_fn)
    halves = [
        jax.tree.map(lambda x, half=half: x[4 * half : 4 * half + 4], batch) for half in (0, 1)
    ]
    metrics = [single(params, halves[d], jax.random.fold_in(KEY, d))[1] for d in (0, 1)]
    total, count = training.add_metrics(*metrics)["loss"]
    found = one_device.jit(strategies.build(whole, one_device.grid(data=2)).loss_fn)(
        params, batch, KEY
    )[0]
    return np.allclose(found, total / count, rtol=1e-5)


def two_steps():
    """Takes two steps that donate their state."""
    whole = one_device.small()
    run = strategies.build(whole, one_device.grid(data=2))
    state, batch = one_device.call(run.init, jax.random.key(0)), one_device.batch(whole)
    try:
        for _ in range(2):
            state, _ = run.train_step(state, batch)
    except RuntimeError as error:
        assert "deleted" in str(error)
        return False
    return True


DATA = functools.partial(same_gradient, dict(data=2), Strategy())
CUT = functools.partial(same_gradient, dict(data=2), Strategy(zero=2))
GATHERED = functools.partial(same_gradient, dict(data=2), Strategy(zero=3))
TENSOR = functools.partial(same_gradient, dict(data=1, tensor=2), Strategy())
NORMS = {
    "model.qk_norm": True,
    "model.hidden_size": 32,
    "model.num_heads": 4,
    "model.head_dim": 8,
}
NORMED = functools.partial(same_gradient, dict(data=1, tensor=2), Strategy(), **NORMS)
SEQUENCE = functools.partial(same_gradient, dict(data=1, tensor=2), Strategy(sequence=True))
RING = functools.partial(
    same_gradient, dict(data=1, tensor=2), Strategy(sequence=True, overlap="one-way")
)
PIPELINE = functools.partial(
    same_gradient, dict(data=1, pipe=2), Strategy(schedule="1f1b", microbatches=4)
)
CONTEXT = functools.partial(same_gradient, dict(data=1, context=2), Strategy())
EXPERTS = functools.partial(
    same_gradient, dict(data=1, expert=2), Strategy(), **{"model.num_experts": 4}
)

FOUND_BY = {
    "mean_of_means": DATA,
    "summed_twice": DATA,
    "mean_for_sum": DATA,
    "wrong_slice": CUT,
    "shared_key": own_masks,
    "gathered_twice": same_bytes,
    "one_layer_late": GATHERED,
    "norm_of_a_slice": same_update,
    "loss_on_every_shard": TENSOR,
    "neighbours_logits": TENSOR,
    "bias_on_every_shard": TENSOR,
    "same_positions": SEQUENCE,
    "gradient_of_one_shard": TENSOR,
    "norm_of_own_heads": NORMED,
    "scale_of_one_shard": NORMED,
    "order_of_arrival": RING,
    "other_part": CONTEXT,
    "balance_on_every_shard": EXPERTS,
    "next_microbatch": PIPELINE,
    "small_stash": PIPELINE,
    "reads_what_it_gave_away": two_steps,
}


@functools.cache
def passes_without_fault(proof):
    return proof()


# One proof of each kind: of gradients along "data", "tensor" and "pipe", of ZeRO, of dropout.
QUICK = (DATA, CUT, TENSOR, PIPELINE, own_masks)


@pytest.mark.parametrize(
    "name", [name if FOUND_BY[name] in QUICK else slow(name) for name in bug_zoo.FAULTS]
)
def test_a_fault_is_found_and_only_a_fault(name):
    proof = FOUND_BY[name]
    assert passes_without_fault(proof)
    with bug_zoo.release(name):
        assert not proof()
