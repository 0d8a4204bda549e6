"""Laws of the bytes that a program moves: operands and results, each time that it
is executed.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from course_lib.measure import hardware, hlo, traffic, virtual
from course_lib.measure.traffic import KINDS, moves
from course_lib.models import attention

NO_VIRTUAL = virtual.why_unavailable()
NO_KERNEL = attention.stand_in("flash", hardware.get("a5000"))
NEEDS_VIRTUAL = pytest.mark.skipif(NO_VIRTUAL is not None, reason=str(NO_VIRTUAL))
DEVICES = pytest.mark.parametrize(
    "device", ["here", pytest.param("a5000", marks=NEEDS_VIRTUAL)]
)
FLOAT32 = 4
SMALL = 1024  # loop counters, indices, partial sums


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def measured(fn, *args, device, donate=()):
    args = args if device == "here" else virtual.abstract(args, virtual.devices(device)[0])
    return traffic(virtual.compile(jax.jit(fn, donate_argnums=donate).lower(*args)))


@DEVICES
def test_a_chain_of_elementwise_operations_reads_once_and_writes_once(device):
    n = 2**20
    found = measured(
        lambda x, y: jnp.sin(jnp.exp(x) + y) * 2, array(n), array(n), device=device
    )
    assert found.bytes == 3 * n * FLOAT32
    assert found.by_kind() == {"elementwise": found.bytes}


@DEVICES
def test_a_product_reads_two_matrices_and_writes_one(device):
    m, k, n = 1024, 256, 2048  # large enough that no GPU splits k
    found = measured(jnp.matmul, array(m, k), array(k, n), device=device)
    product = [move for move in found.moves if move.kind == "matmul"]
    assert sum(move.bytes for move in product) == (m * k + k * n + m * n) * FLOAT32
    assert "dot_general" in product[0].scope


@DEVICES
def test_a_slice_reads_the_slice_and_not_the_whole_operand(device):
    rows, width = 128, 256
    found = measured(lambda x: x[:rows] * 2, array(4096, width), device=device)
    assert found.bytes == 2 * rows * width * FLOAT32


@DEVICES
def test_a_sum_reads_all_and_writes_little(device):
    n = 2**20
    found = measured(lambda x: jnp.sum(x), array(n), device=device)
    assert n * FLOAT32 <= found.by_kind()["reduce"] <= 1.1 * n * FLOAT32


@DEVICES
def test_a_scan_that_keeps_every_iteration_writes_slices_not_the_whole_array_each_time(device):
    n, length = 2**16, 8
    keep = functools.partial(jax.lax.scan, lambda x, _: (jnp.cos(x), x), length=length)
    found = measured(keep, array(n), device=device)
    (update,) = [move for move in found.moves if move.kind == "dynamic-update-slice"]
    assert update.executions == length
    # a slice read, a slice written
    assert abs(update.bytes - 2 * length * n * FLOAT32) <= SMALL * length


@DEVICES
def test_a_scan_reads_its_inputs_slice_by_slice(device):
    n, length = 2**16, 8
    total = functools.partial(jax.lax.scan, lambda x, y: (jnp.cos(x + y), None))
    found = measured(total, array(n), array(length, n), device=device)
    once_each = 3 * length * n * FLOAT32  # the carry and one slice read, the carry written
    # XLA may also copy the slice first, or the carry
    assert once_each <= found.bytes <= 2 * once_each


@DEVICES
def test_an_embedding_reads_the_rows_that_it_needs(device):
    vocabulary, width, tokens = 50_000, 64, 128
    args = array(vocabulary, width), array(tokens, dtype=jnp.int32)
    found = measured(lambda table, ids: table[ids], *args, device=device)
    assert 2 * tokens * width * FLOAT32 <= found.bytes <= 3 * tokens * width * FLOAT32


@DEVICES
def test_an_update_in_place_leaves_the_rest_where_it_is(device):
    rows, width = 10_000, 64

    def write(cache, row, i):
        return jax.lax.dynamic_update_slice(cache, row, (i, 0))

    args = (array(rows, width), array(1, width), array(dtype=jnp.int32))
    assert measured(write, *args, device=device, donate=0).bytes <= 2 * width * FLOAT32 + SMALL
    # not donated: copied first
    assert measured(write, *args, device=device).bytes >= 2 * rows * width * FLOAT32


@DEVICES
def test_of_a_conditional_the_most_expensive_branch_counts(device):
    n = 512

    def dear(x):
        return x @ x @ x

    def either(flag, x):
        return jax.lax.cond(flag, lambda x: x + 1, dear, x)

    found = measured(either, array(dtype=bool), array(n, n), device=device)
    assert (
        found.by_kind()["matmul"]
        == measured(dear, array(n, n), device=device).by_kind()["matmul"]
    )
    assert all("add" not in move.scope for move in found.moves)


@NEEDS_VIRTUAL
def test_remat_takes_most_of_what_a_scan_writes_for_its_backward_pass():
    layers, batch, width, hidden = 4, 1024, 64, 512

    def block(x, w):
        up, down = w
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(x @ up) @ down, None

    def stacked(weights, x, remat):
        layer = jax.checkpoint(block, prevent_cse=False) if remat else block
        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    args = ((array(layers, width, hidden), array(layers, hidden, width)), array(batch, width))
    kept, rematted = (
        measured(jax.grad(functools.partial(stacked, remat=remat)), *args, device="a5000")
        for remat in (False, True)
    )
    written = [found.by_kind()["dynamic-update-slice"] for found in (kept, rematted)]
    # read and written
    carry, hidden_layer = (2 * FLOAT32 * layers * batch * size for size in (width, hidden))
    assert written[0] > 3 * hidden_layer  # gelu alone keeps as many
    # what is left: each layer's input, and the gradients of the weights
    assert carry <= written[1] < 0.1 * written[0]
    assert rematted.bytes < kept.bytes
    sources = {move.scope for move in kept.moves if move.kind == "dynamic-update-slice"}
    assert any("mlp" in scope for scope in sources), sources


@NEEDS_VIRTUAL
def test_a_sum_over_devices_is_a_collective():
    devices = virtual.devices("a5000", 2)
    mesh = jax.sharding.Mesh(devices, ("data",))
    batch = virtual.abstract(
        array(1024, 64), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    )
    found = traffic(jax.jit(lambda x: jnp.sum(x, axis=0)).lower(batch).compile())
    assert found.by_kind()["collective"] == 2 * 64 * FLOAT32


def test_kinds_are_those_listed_and_moves_add_up():
    found = measured(lambda x: jnp.sort(x @ x.T, axis=0), array(64, 64), device="here")
    assert {move.kind for move in found.moves} <= set(KINDS)
    assert (
        sum(found.by_kind().values()) == sum(move.bytes for move in found.moves) == found.bytes
    )


def test_a_library_s_scratch_memory_does_not_count():
    text = """HloModule m

ENTRY %main (a: f32[4,8], b: f32[8,4]) -> f32[4,4] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %gemm = (f32[4,4]{1,0}, s8[4194304]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm"
  ROOT %out = f32[4,4]{1,0} get-tuple-element(%gemm), index=0
}
"""
    (move,) = moves(hlo.parse(text))
    assert (move.kind, move.bytes) == ("matmul", (32 + 32 + 16) * FLOAT32)


FUSION = """HloModule m

%fused (p: f32[1024], q: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  %q = f32[1024]{0} parameter(1)
  ROOT %sum = f32[1024]{0} add(%p, %q)
}

ENTRY %main (a: f32[1024], b: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %b = f32[1024]{0} parameter(1)
  ROOT %out = f32[1024]{0} fusion(%a, SECOND), kind=kLoop, calls=%fused
}
"""


@pytest.mark.parametrize(("second", "arrays"), [("%b", 3), ("%a", 2)])
def test_an_array_that_is_two_operands_of_a_fusion_is_read_once(second, arrays):
    (move,) = moves(hlo.parse(FUSION.replace("SECOND", second)))
    assert move.bytes == arrays * 1024 * FLOAT32


@NEEDS_VIRTUAL
@pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))
def test_a_flash_attention_kernel_reads_queries_keys_and_values_and_writes_its_result():
    attend = functools.partial(attention.attend, implementation="flash")
    x = array(2, 256, 4, 64, dtype=jnp.bfloat16)
    found = measured(attend, x, x, x, device="a5000")
    assert found.by_kind() == {"kernel": found.bytes}
    # no L x L weights; sums of each position at most
    assert 4 * x.size * 2 <= found.bytes <= 4.1 * x.size * 2


def test_a_transfer_to_the_host_counts_on_the_device_s_side_only():
    text = """HloModule m

ENTRY %main (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %start = (f32[1024]{0:S(5)}, f32[1024]{0}, u32[]) copy-start(%a)
  ROOT %done = f32[1024]{0:S(5)} copy-done(%start)
}
"""
    (move,) = moves(hlo.parse(text))
    assert (move.kind, move.bytes) == ("offload", 1024 * FLOAT32)


@DEVICES
def test_of_a_slice_only_the_rows_are_read_that_it_takes(device):
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    args = (x,) if device == "here" else virtual.abstract((x,), virtual.devices(device)[0])
    counted = traffic(jax.jit(lambda x: x[:128] * 2).lower(*args))
    assert counted.bytes == 2 * 128 * 64 * 4  # read, and written
