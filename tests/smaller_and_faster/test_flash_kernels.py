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


@NEEDS_TRITON
def test_what_may_become_a_kernel_counts_as_the_kernel():
    given = [jax.ShapeDtypeStruct((2, 64, heads, 16), jnp.float32) for heads in (4, 2, 2)]
    counts = [
        measure.flops(functools.partial(flash_attention.attend, by=by), *given)
        for by in ("either", "kernel")
    ]
    assert counts[0] == counts[1]


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


@NEEDS_VIRTUAL
@NEEDS_TRITON
@pytest.mark.parametrize(
    ("name", "dtype", "tile"),
    [
        ("a5000", jnp.bfloat16, 64),
        ("a5000", jnp.float32, 32),
        ("h100", jnp.bfloat16, 64),
        ("h100", jnp.float32, 64),
    ],
)
def test_shared_memory_is_what_the_compiler_asks_for(name, dtype, tile):
    """With a limit one byte below the formula's figure, the A5000's compiler refuses. On
    Hopper the formula is an upper bound.
    """
    row, width = hardware.get(name), 64
    needed = flash_attention.shared_memory(tile, width, dtype, row)

    def compile_with(limit):
        target = dataclasses.replace(row.target, shared_memory_per_block=limit)
        text = target.text(row.device_kinds[0], row.memory_bytes, row.memory_bandwidth)
        virtual.devices(name)
        place = topologies.get_topology_desc(
            platform="cuda", target_config=text, topology="1x1x1"
        ).devices[0]
        attend = functools.partial(flash_attention.attend, tile=tile, by="kernel")
        temporaries(attend, 256, place, dtype, width=width)

    compile_with(needed)
    with pytest.raises(jax.errors.JaxRuntimeError, match="[Ss]hared memory") as refused:
        compile_with(1024 if name == "h100" else needed - 1)
    asked = max(int(n) for n in re.findall(r"[Rr]equested:? ?(\d+)", str(refused.value)))
    assert asked <= needed
