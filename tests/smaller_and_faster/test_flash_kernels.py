"""Laws of flash attention's kernels, compiled for GPUs that are not there.

`test_flash_attention` compares their numbers with the reference, in Pallas' interpreter.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from slow_cases import slow

from course_lib import measure
from course_lib.measure import hardware, virtual
from course_lib.models import attention
from course_lib.smaller_and_faster import flash_attention

NEEDS_VIRTUAL = pytest.mark.skipif(
    virtual.why_unavailable() is not None, reason=str(virtual.why_unavailable())
)
NEEDS_TRITON = pytest.mark.skipif(
    flash_attention.why_no_kernel(hardware.get("a5000")) is not None,
    reason=str(flash_attention.why_no_kernel(hardware.get("a5000"))),
)


def temporaries(attend, length, device, dtype=jnp.bfloat16, heads=(8, 4), width=64):
    query, key = (jax.ShapeDtypeStruct((2, length, h, width), dtype) for h in heads)
    qkv = virtual.abstract((query, key, key), device)

    def loss(qkv):
        return attend(*qkv).astype(jnp.float32).sum()

    compiled = virtual.compile(jax.jit(jax.grad(loss)).lower(qkv))
    return measure.memory(compiled).temporaries, compiled


@NEEDS_VIRTUAL
@NEEDS_TRITON
@pytest.mark.parametrize("name", ["a5000", slow("a100-80"), slow("h100")])
def test_a_gradient_s_temporaries_grow_linearly_with_the_kernel_and_squared_without(name):
    device = virtual.devices(name)[0]

    def grow(attend):
        short, long = (temporaries(attend, length, device)[0] for length in (1024, 2048))
        return long / short

    assert grow(flash_attention.attend) == pytest.approx(2, rel=0.05)
    assert grow(attention.attend) > 3.5


@NEEDS_VIRTUAL
def test_tiles_in_jax_grow_linearly_on_a_gpu_too():
    device, tiles = (
        virtual.devices("a5000")[0],
        functools.partial(flash_attention.attend, by="tiles"),
    )
    short, long = (temporaries(tiles, length, device)[0] for length in (1024, 2048))
    assert long / short == pytest.approx(2, rel=0.05)


@NEEDS_VIRTUAL
@NEEDS_TRITON
def test_the_program_for_a_gpu_has_three_kernels_and_that_for_a_cpu_none():
    compiled = temporaries(flash_attention.attend, 256, virtual.devices("a5000")[0])[1]
    assert compiled.as_text().count("__gpu$xla.gpu.triton") == 3
    x = jax.device_put(jnp.zeros((2, 64, 4, 16)), jax.devices("cpu")[0])
    on_cpu = jax.jit(flash_attention.attend).lower(x, x, x)
    assert "triton" not in on_cpu.compile().as_text()


@pytest.fixture
def default_optimizations():
    """Compiles as a learner's session does; the other tests leave most optimizations out."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


def with_limit(name, limit):
    """Returns a virtual GPU whose blocks may take `limit` bytes of shared memory."""
    row = hardware.get(name)
    target = dataclasses.replace(row.target, shared_memory_per_block=limit)
    text = target.text(row.device_kinds[0], row.memory_bytes, row.memory_bandwidth)
    virtual.devices(name)
    described = topologies.get_topology_desc(
        platform="cuda", target_config=text, topology="1x1x1"
    )
    return described.devices[0]


def asked(result, name, dtype, tile, width):
    """Reads the bytes that a kernel asks for from the error about a limit that is too low.

    Args:
      result: "out", or "d_query" or "d_key", the results of the two kernels for gradients. JAX
        drops a kernel whose result is not used.
    """
    from course_lib.smaller_and_faster import flash_kernels

    device = with_limit(name, 1024)
    options = {"tiling": flash_attention.Tiling(tile, width**-0.5)}
    query, key = (jax.ShapeDtypeStruct((1, 4 * tile, h, width), dtype) for h in (2, 1))
    numbers = jax.ShapeDtypeStruct((1, 2, 4 * tile), jnp.float32)
    forward = functools.partial(flash_kernels.forward, **options)
    backward = functools.partial(flash_kernels.backward, **options)
    function, *arrays = {
        "out": (forward, query, key, key),
        "d_query": (lambda *x: backward(*x)[0], query, key, key, None, numbers, numbers, query),
        "d_key": (lambda *x: backward(*x)[1], query, key, key, None, numbers, numbers, query),
    }[result]
    lowered = jax.jit(function).lower(*virtual.abstract(tuple(arrays), device))
    with pytest.raises(jax.errors.JaxRuntimeError, match="[Ss]hared memory") as refused:
        lowered.compile()
    return max(int(n) for n in re.findall(r"[Rr]equested:? ?(\d+)", str(refused.value)))


@NEEDS_VIRTUAL
@NEEDS_TRITON
@pytest.mark.usefixtures("default_optimizations")
@pytest.mark.parametrize(
    ("name", "dtype", "precision", "tile", "width", "exact"),
    [
        ("a5000", jnp.bfloat16, "default", 64, 64, True),
        ("a5000", jnp.float32, "default", 32, 64, False),
        ("h100", jnp.float32, "default", 64, 64, False),
        ("b200", jnp.bfloat16, "default", 64, 64, True),
        slow("a5000", jnp.float32, "highest", 32, 64, True),
        slow("a5000", jnp.float32, "default", 64, 16, False),
        slow("a5000", jnp.float16, "default", 32, 64, True),
        slow("a5000", jnp.float32, "default", 128, 64, False),
        slow("a100-80", jnp.bfloat16, "highest", 128, 128, True),
        slow("h100", jnp.bfloat16, "default", 16, 32, True),
        slow("h100", jnp.float32, "highest", 64, 64, False),
        slow("b200", jnp.bfloat16, "default", 64, 256, True),
        slow("b200", jnp.float32, "highest", 128, 32, False),
    ],
)
def test_shared_memory_is_at_most_what_the_formula_says(
    name, dtype, precision, tile, width, exact
):
    with jax.default_matmul_precision(precision):
        *others, largest = (
            asked(result, name, dtype, tile, width) for result in ("out", "d_query", "d_key")
        )
    needed = flash_attention.shared_memory(tile, width, dtype, hardware.get(name))
    assert max(others) <= largest
    assert largest == needed if exact else largest < needed < 2 * largest
