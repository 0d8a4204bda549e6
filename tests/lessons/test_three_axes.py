"""The course's own answer to the exercise that joins three axes."""

import functools
import inspect

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from slow_cases import slow

from course_lib import measure
from course_lib.lessons import compare, three_axes, tiny_transformer
from course_lib.many_devices import meshes

N, D, H, V, L, B = 6, 12, 6, 20, 8, 12


@functools.cache
def compiled(data, pipe, tensor, microbatches):
    """Returns the mesh, the program, one device's loss and gradients, and the program's."""
    sizes = {"data": data, "pipe": pipe, "tensor": tensor}
    init = functools.partial(tiny_transformer.init, N=N, D=D, H=H, V=V, L=L)
    params = jax.jit(init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, V, (2, B, L)).astype(np.int32)
    mesh = meshes.make(sizes, meshes.devices(int(np.prod(list(sizes.values())))))
    specs, gradient = three_axes.make_gradient(mesh, microbatches)
    placed = jax.device_put(params, {name: NamedSharding(mesh, specs[name]) for name in params})
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.value_and_grad(tiny_transformer.mean_loss))(params, *tokens)
        program = jax.jit(gradient).lower(placed, *tokens).compile(compare.QUICK)
        return mesh, program, expected, program(placed, *tokens)


@pytest.mark.parametrize(
    ("data", "pipe", "tensor", "microbatches"),
    [
        (2, 2, 2, 3),
        slow(1, 2, 3, 1),  # an odd degree; fewer microbatches than stages
        slow(1, 2, 3, 12),
        slow(2, 3, 1, 1),
    ],
)
def test_the_gradient_is_one_devices_and_lies_where_the_parameters_lie(
    data, pipe, tensor, microbatches
):
    mesh, _, (loss, grads), (its_loss, its_grads) = compiled(data, pipe, tensor, microbatches)
    np.testing.assert_allclose(its_loss, loss, rtol=1e-6)
    for name, grad in grads.items():
        off = np.linalg.norm(jax.device_get(its_grads[name]) - np.asarray(grad))
        assert off < 2e-6 * np.linalg.norm(grad), name
        like = NamedSharding(mesh, three_axes.SPECS[name])
        assert its_grads[name].sharding.is_equivalent_to(like, grad.ndim), name


def test_each_axis_sends_what_its_strategy_sends():
    M = 3
    mesh, program, _, _ = compiled(2, 2, 2, M)
    ledger = measure.ledger(program, mesh)
    ticks, layers, activation = M + 1, N // 2, 4 * (B // 2 // M) * L * D
    # twice forward and twice backward; to rematerialize a layer it adds up the heads again
    assert ledger.sent(axis="tensor") == 5 * ticks * layers * activation
    assert ledger.sent(axis="pipe") == 2 * ticks * activation  # forward and backward
    matrices = (3 * D * D + D * D + 8 * D * D) // 2  # per layer and device
    assert ledger.sent(axis="data") == 4 * layers * (matrices + 2 * D)
    ends = 4 * (2 * V * D + L * D + D) + 4  # gradients of the ends, and the loss
    assert ledger.sent(axis=("data", "pipe")) == ends * 2 * 3 // 4


def test_it_keeps_the_promise_of_the_exercise():
    assert len(inspect.getsource(three_axes).splitlines()) <= 250
