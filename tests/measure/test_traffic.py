"""Laws of the bytes that a program moves: operands and results, each time that it
is executed.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from hlo_text import program
from shapes import DEVICES, array, needs_virtual, place

from course_lib.measure import hardware, traffic, virtual
from course_lib.measure.traffic import KINDS
from course_lib.models import attention

NO_KERNEL = attention.stand_in("flash", hardware.get("a5000"))
FLOAT32 = 4
SMALL = 1024  # loop counters, indices, partial sums


def measured(fn, *args, device, donate=()):
    lowered = jax.jit(fn, donate_argnums=donate).lower(*place(args, device))
    return traffic(virtual.compile(lowered))


# One program for the laws of single instructions: they share no array, so that XLA joins none.
N = 2**20
M, K, L = 1024, 256, 2048  # of a product, large enough that no GPU splits K
ROWS, WIDTH = 128, 256  # of a slice
VOCABULARY, TOKENS = 50_000, 128
STEPS, CARRY = 8, 2**16  # of two scans


def instructions(chain, product, table, total, kept, slices):
    with jax.named_scope("chain"):
        chained = jnp.sin(jnp.exp(chain[0]) + chain[1]) * 2
    with jax.named_scope("product"):
        multiplied = product[0] @ product[1]
    with jax.named_scope("slice"):
        sliced = table[:ROWS] * 2
    with jax.named_scope("sum"):
        summed = jnp.sum(total)
    with jax.named_scope("keeps"):
        scanned = jax.lax.scan(lambda x, _: (jnp.cos(x), x), kept, length=STEPS)
    with jax.named_scope("reads"):
        read = jax.lax.scan(lambda x, y: (jnp.cos(x + y), None), *slices)[0]
    return chained, multiplied, sliced, summed, scanned, read


@functools.cache
def found(device, scope):
    """Returns what is moved under a scope, by kind, and the moves."""
    moves = [move for move in every(device).moves if f"/{scope}" in move.scope]
    kinds = {move.kind for move in moves}
    by_kind = {k: sum(move.bytes for move in moves if move.kind == k) for k in kinds}
    return by_kind, sum(by_kind.values()), moves


@functools.cache
def every(device):
    arguments = (
        (array(N), array(N)),
        (array(M, K), array(K, L)),
        array(4096, WIDTH),
        array(N + 1),
        array(CARRY),
        (array(CARRY + 1), array(STEPS, CARRY + 1)),
    )
    return measured(instructions, *arguments, device=device)


@DEVICES
def test_a_chain_of_elementwise_operations_reads_once_and_writes_once(device):
    by_kind, bytes, _ = found(device, "chain")
    assert bytes == 3 * N * FLOAT32 and by_kind == {"elementwise": bytes}


@DEVICES
def test_a_product_reads_two_matrices_and_writes_one(device):
    by_kind, _, _ = found(device, "product")
    assert by_kind["matmul"] == (M * K + K * L + M * L) * FLOAT32


@DEVICES
def test_a_slice_reads_the_slice_and_not_the_whole_operand(device):
    assert found(device, "slice")[1] == 2 * ROWS * WIDTH * FLOAT32


@DEVICES
def test_a_sum_reads_all_and_writes_little(device):
    # of the whole program, where nothing else is summed: XLA:CPU of JAX 0.7.2 sums in two
    # steps, and the first has no scope
    reduced = every(device).by_kind()["reduce"]
    assert N * FLOAT32 <= reduced <= 1.1 * N * FLOAT32


@DEVICES
def test_a_scan_that_keeps_every_iteration_writes_slices_not_the_whole_array_each_time(device):
    moves = found(device, "keeps")[2]
    (update,) = [move for move in moves if move.kind == "dynamic-update-slice"]
    assert update.executions == STEPS
    # a slice read, a slice written
    assert abs(update.bytes - 2 * STEPS * CARRY * FLOAT32) <= SMALL * STEPS


@DEVICES
def test_a_scan_reads_its_inputs_slice_by_slice(device):
    once_each = 3 * STEPS * CARRY * FLOAT32  # the carry and one slice read, the carry written
    # XLA may also copy the slice first, or the carry
    assert once_each <= found(device, "reads")[1] <= 2 * once_each + STEPS * SMALL


@DEVICES
def test_an_update_in_place_leaves_the_rest_where_it_is(device):
    rows, width = 10_000, 64

    def write(cache, row, i):
        return jax.lax.dynamic_update_slice(cache, row, (i, 0))

    args = (array(rows, width), array(1, width), array(dtype=jnp.int32))
    assert measured(write, *args, device=device, donate=0).bytes <= 2 * width * FLOAT32 + SMALL
    # not donated: copied first
    assert measured(write, *args, device=device).bytes >= 2 * rows * width * FLOAT32


ROWS_OF = {
    "table[ids]": lambda table, ids, rows: table[ids],
    "jnp.take": lambda table, ids, rows: jnp.take(table, ids, axis=0),
    "scaled": lambda table, ids, rows: table[ids] * 2 + rows,
}


@pytest.mark.parametrize("function", ROWS_OF.values(), ids=ROWS_OF)
@DEVICES
def test_a_gather_reads_the_rows_that_it_needs(device, function):
    arguments = array(VOCABULARY, 64), array(TOKENS, dtype=jnp.int32), array(TOKENS, 64)
    by_kind = measured(function, *arguments, device=device).by_kind()
    rows = TOKENS * 64 * FLOAT32
    assert (
        2 * rows <= by_kind["gather/scatter"] <= sum(by_kind.values()) <= 3 * rows + 4 * SMALL
    )


@pytest.mark.parametrize(("way", "arrays"), [("set", 2), ("add", 3), ("max", 3)])
@DEVICES
def test_a_set_reads_nothing_of_what_it_overwrites(device, way, arrays):
    def write(x, ids, rows):
        return getattr(x.at[ids], way)(rows, unique_indices=True)

    arguments = array(VOCABULARY, 64), array(TOKENS, dtype=jnp.int32), array(TOKENS, 64)
    moved = measured(write, *arguments, device=device, donate=0)
    assert moved.bytes == pytest.approx(arrays * TOKENS * 64 * FLOAT32, abs=4 * SMALL)


@DEVICES
def test_of_a_conditional_the_most_expensive_branch_counts(device):
    n = 512

    def dear(x):
        return x @ x @ x

    def either(flag, x):
        return jax.lax.cond(flag, lambda x: x + 1, dear, x)

    both = measured(either, array(dtype=bool), array(n, n), device=device)
    alone = measured(dear, array(n, n), device=device)
    assert both.by_kind()["matmul"] == alone.by_kind()["matmul"]
    assert all("add" not in move.scope for move in both.moves)


@needs_virtual
def test_a_sum_over_devices_is_a_collective():
    devices = virtual.devices("a5000", 2)
    mesh = jax.sharding.Mesh(devices, ("data",))
    batch = virtual.abstract(
        array(1024, 64), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    )
    summed = traffic(jax.jit(lambda x: jnp.sum(x, axis=0)).lower(batch).compile())
    assert summed.by_kind()["collective"] == 2 * 64 * FLOAT32


def test_kinds_are_those_listed_and_moves_add_up():
    all_moves = every("here")
    assert {move.kind for move in all_moves.moves} <= set(KINDS)
    assert sum(all_moves.by_kind().values()) == all_moves.bytes


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
    (move,) = traffic(program(text)).moves
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
    (move,) = traffic(program(FUSION.replace("SECOND", second))).moves
    assert move.bytes == arrays * 1024 * FLOAT32


@needs_virtual
@pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))
def test_a_flash_attention_kernel_reads_queries_keys_and_values_and_writes_its_result():
    attend = functools.partial(attention.attend, implementation="flash")
    x = array(2, 256, 4, 64, dtype=jnp.bfloat16)
    moved = measured(attend, x, x, x, device="a5000")
    assert moved.by_kind() == {"kernel": moved.bytes}
    # no L x L weights; sums of each position at most
    assert 4 * x.size * 2 <= moved.bytes <= 4.1 * x.size * 2


def test_a_transfer_to_the_host_counts_on_the_device_s_side_only():
    text = """HloModule m

ENTRY %main (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  %start = (f32[1024]{0:S(5)}, f32[1024]{0}, u32[]) copy-start(%a)
  ROOT %done = f32[1024]{0:S(5)} copy-done(%start)
}
"""
    (move,) = traffic(program(text)).moves
    assert (move.kind, move.bytes) == ("offload", 1024 * FLOAT32)
