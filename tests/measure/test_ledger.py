"""Laws of the ledger: every byte that devices send each other, by kind, axis and
dtype.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_text import program
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shapes import needs_virtual
from slow_cases import slow

from course_lib.many_devices import meshes
from course_lib.measure import ledger, schedule_around, virtual
from course_lib.measure.ledger import KINDS, Collective, Ledger

FLOAT32, BFLOAT16 = 4, 2
SIZES = {"data": 2, "tensor": 4}
ROWS, COLUMNS = 8, 64  # of the array on each device
BLOCK = ROWS * COLUMNS * FLOAT32  # its bytes


def make_mesh(devices, **sizes):
    grid = np.array(devices[: np.prod(tuple(sizes.values()))]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def here():
    return make_mesh(meshes.devices(8), **SIZES)


def array(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def by_hand(fn, axes, mesh=None, dtype=jnp.float32, out=None):
    """The ledger of a function of one (ROWS, COLUMNS) block a device, cut along `axes`."""
    mesh = here() if mesh is None else mesh
    rows = np.prod([mesh.shape[axis] for axis in axes]) * ROWS
    out = P(axes) if out is None else out
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(axes), out_specs=out)
    return ledger(jax.jit(mapped).lower(array(mesh, (rows, COLUMNS), axes, dtype=dtype)), mesh)


def shift(x, axis, n):
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def scatter(x, axes, n):
    return jax.lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True)


def gather(x, axes, n):
    return jax.lax.all_gather(x, axes, tiled=True)


def exchange(x, axes, n):
    return jax.lax.all_to_all(x, axes, 1, 0, tiled=True)


# name: (the function of a block x along axes of n devices, its kind, payload / BLOCK, how many
# times (n - 1) / n of the payload is sent)
COLLECTIVES = {
    "psum": (lambda x, axes, n: jax.lax.psum(x, axes), "all-reduce", lambda n: 1, 2),
    "all_gather": (gather, "all-gather", lambda n: n, 1),
    "psum_scatter": (scatter, "reduce-scatter", lambda n: 1, 1),
    "all_to_all": (exchange, "all-to-all", lambda n: 1, 1),
    "ppermute": (shift, "collective-permute", lambda n: 1, None),  # all of it
}
PLACES = pytest.mark.parametrize("place", ["here", pytest.param("h100", marks=needs_virtual)])


@functools.cache
def all_of_them(place, axes, dtype=jnp.float32, **sizes):
    """The entries by kind of one program that has each collective, of its own array."""
    sizes = sizes or SIZES
    n = int(np.prod([sizes[axis] for axis in axes]))
    count = int(np.prod(list(sizes.values())))
    devices = meshes.devices(8) if place == "here" else virtual.devices(place, count)
    mesh = make_mesh(devices, **sizes)
    outs = [P() if name == "psum" else P(axes) for name in COLLECTIVES]
    mapped = jax.shard_map(
        lambda *xs: [
            fn(x, axes, n) for (fn, *_), x in zip(COLLECTIVES.values(), xs, strict=True)
        ],
        mesh=mesh,
        in_specs=P(axes),
        out_specs=outs,
        check_vma=n > 1,  # along one device, a sum is known to be the same everywhere
    )
    xs = [array(mesh, (n * ROWS, COLUMNS), axes, dtype=dtype)] * len(COLLECTIVES)
    return {entry.kind: entry for entry in ledger(jax.jit(mapped).lower(*xs), mesh).entries}


@PLACES
@pytest.mark.parametrize("axes", [slow(("data",)), ("data", "tensor")], ids="+".join)
def test_a_collective_is_found_with_its_axes_and_its_bytes(axes, place):
    n, found = int(np.prod([SIZES[axis] for axis in axes])), all_of_them(place, axes)
    assert len(found) == len(COLLECTIVES)
    for _, kind, payload, times in COLLECTIVES.values():
        entry, share = found[kind], times * (n - 1) / n if times else 1
        assert (entry.axes, entry.dtype, entry.group_size) == (axes, "float32", n)
        assert entry.payload_bytes == payload(n) * BLOCK
        assert entry.sent_bytes == share * payload(n) * BLOCK
        assert entry.executions == 1 and "/shard_map/" in entry.scope
        assert set(entry.overlapped) <= {"copy"}  # there is nothing to compute


@PLACES
def test_a_gpu_sends_bfloat16_as_it_is_and_xla_cpu_as_float32(place):
    found = all_of_them(place, ("tensor",), jnp.bfloat16)
    sent = {"here": "float32", "h100": "bfloat16"}[place]
    for _, kind, payload, _ in COLLECTIVES.values():
        assert found[kind].dtype == sent
        assert found[kind].payload_bytes == payload(4) * BLOCK * jnp.dtype(sent).itemsize // 4


def test_along_an_axis_of_one_device_nothing_is_sent():
    assert all_of_them("here", ("tensor",), tensor=1, data=2) == {}
    by_nobody = by_hand(lambda x: jax.lax.ppermute(x, "tensor", []), ("data", "tensor"))
    assert by_nobody.entries == () and by_nobody.payload() == by_nobody.sent() == 0


def test_in_a_scan_a_collective_is_executed_once_an_iteration():
    def five_shifts(x):
        return jax.lax.scan(lambda x, _: (shift(jnp.sin(x), "tensor", 4), None), x, length=5)[0]

    found = by_hand(five_shifts, ("tensor",))
    (entry,) = found.entries
    assert (entry.executions, entry.payload_bytes) == (5, BLOCK)
    assert found.payload() == found.sent() == 5 * BLOCK


@pytest.mark.parametrize(
    ("sends", "size"), [([(0, 1), (1, 2), (2, 3)], 4), ([(0, 1), (1, 2), (2, 0), (3, 3)], 3)]
)
def test_devices_that_send_to_no_other_lower_what_a_device_sends(sends, size):
    (entry,) = by_hand(lambda x: jax.lax.ppermute(x, "tensor", sends), ("tensor",)).entries
    assert (entry.axes, entry.group_size) == (("tensor",), size)
    assert (entry.payload_bytes, entry.sent_bytes) == (BLOCK, 3 / 4 * BLOCK)


def test_bytes_that_n_does_not_divide_are_rounded_up():
    mesh = make_mesh(meshes.devices(8), tensor=3)
    found = by_hand(lambda x: jax.lax.psum(jnp.sum(x), "tensor"), ("tensor",), mesh, out=P())
    assert (found.payload(), found.sent()) == (FLOAT32, 6)  # 2 (3 - 1) / 3 of 4 bytes


def test_of_a_conditional_the_branch_that_sends_most_counts():
    def either(x):
        gather = functools.partial(jax.lax.all_gather, axis_name="tensor")
        flag = jax.lax.axis_index("data") > 0
        return jax.lax.cond(
            flag, lambda x: gather(x).sum(0), lambda x: gather(x[:1]).sum(0) + x, x
        )

    found = by_hand(either, ("data", "tensor"))
    assert [(entry.kind, entry.payload_bytes) for entry in found.entries] == [
        ("all-gather", 4 * BLOCK)
    ]


@functools.cache
def summed():
    mesh = here()
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "tensor"), mesh=mesh, in_specs=P("tensor"), out_specs=P()
    )
    return jax.jit(mapped).lower(array(mesh, (4 * ROWS, COLUMNS), "tensor")).compile()


def test_without_a_mesh_the_bytes_are_known_and_the_axes_are_not():
    found = ledger(summed())
    (entry,) = found.entries
    assert (entry.axes, entry.group_size, found.payload("all-reduce")) == (None, 4, BLOCK)
    with pytest.raises(ValueError, match="axis='tensor' needs a mesh"):
        found.payload(axis="tensor")


def test_a_mesh_of_another_size_is_refused_and_one_of_another_shape_fits_no_groups():
    with pytest.raises(ValueError, match=r"mesh=.*: it has 4 devices, the program 8"):
        ledger(summed(), make_mesh(meshes.devices(8), tensor=4))
    found = ledger(summed(), make_mesh(meshes.devices(8), data=4, tensor=2))
    assert found.entries[0].axes == () and found.rows()[0]["axes"] == "fits none"
    assert found.payload(axis=()) == found.payload() == BLOCK


def entry(kind="all-reduce", axes=("data",), payload=100, sent=50, executions=1, overlapped=()):
    return Collective(kind, axes, "float32", payload, sent, executions, overlapped, 4, "")


def test_bytes_of_all_kinds_and_axes_add_up():
    both = entry(axes=("data", "tensor"), payload=7)
    gather = entry("all-gather", ("tensor",), sent=75, executions=2)
    found = Ledger((entry(), entry(executions=3), both, gather), ("data", "tensor"))
    assert found.payload("all-reduce", "data") == 400
    assert found.sent("all-reduce", "data") == 200
    assert found.payload(axis=("tensor", "data")) == 7  # both, in any order
    axes = ("data", "tensor", ("data", "tensor"))
    assert found.payload() == sum(found.payload(axis=axis) for axis in axes)
    assert found.payload() == sum(found.payload(kind) for kind in KINDS) == 607


def test_an_unknown_kind_or_axis_is_refused():
    found = Ledger((entry(),), ("data", "tensor"))
    with pytest.raises(ValueError, match="kind='allreduce' must be a collective: one of"):
        found.payload("allreduce")
    with pytest.raises(ValueError, match="axis='pipe' must name axes of the mesh"):
        found.sent(axis="pipe")


def test_rows_gather_what_is_alike_and_put_first_what_is_sent_most():
    gather = entry("all-gather", sent=1000)
    found = Ledger((entry(overlapped=("matmul",)), entry(executions=3), gather), ("data",))
    first, second = found.rows()
    assert first["kind"] == "all-gather"
    assert found.overlapped_payload() == 100
    alike = {"kind": "all-reduce", "axes": "data", "dtype": "float32", "devices": 4}
    counts = {"executions": 4, "overlapped": 1, "payload_bytes": 400, "sent_bytes": 200}
    assert second == alike | counts


# Forms that XLA writes for other backends and versions.
TEXT = """
HloModule m, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: f32[16]) -> f32[4] {
  %p = f32[16]{0} parameter(0)
  ROOT %inner = f32[4]{0} reduce-scatter(%p), channel_id=3, replica_groups=[2,4]<=[8], \
dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[16], y: bf16[8], n: s32[], sizes: s32[8]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %y = bf16[8]{0} parameter(1)
  %n = s32[] parameter(2)
  %sizes = s32[8]{0} parameter(3)
  %gather = ((f32[16]{0}, bf16[8]{0}), (f32[64]{0}, bf16[32]{0})) all-gather-start(%x, %y), \
replica_groups=[2,4]<=[8]
  %scatter = ((f32[16]{0}), f32[4]{0}, u32[]) async-start(%x), calls=%wrapped
  %count = s32[] add(%n, %n)
  %square = f32[16]{0} multiply(%x, %x)
  %going = ((f32[16]{0}), f32[4]{0}, u32[]) async-update(%scatter), calls=%wrapped
  %scattered = f32[4]{0} async-done(%going), calls=%wrapped
  %root = f32[16]{0} sqrt(%square)
  %gathered = (f32[64]{0}, bf16[32]{0}) all-gather-done(%gather)
  %reduce = ((f32[16]{0}), f32[16]{0}) all-reduce-start(%square), replica_groups={}, \
to_apply=%add
  %twice = s32[] add(%count, %count)
  %reduced = f32[16]{0} all-reduce-done(%reduce)
  %all = f32[16]{0} collective-broadcast(%root), replica_groups=[4,2]<=[2,4]T(1,0)
  ROOT %rows = f32[16]{0} ragged-all-to-all(%all, %x, %sizes, %sizes, %sizes, %sizes), \
replica_groups=[2,4]<=[8]
}
"""


def test_starts_and_ends_are_one_entry_in_whatever_form_they_are_written():
    found = [
        (entry.kind, entry.axes, entry.dtype, entry.payload_bytes, entry.overlapped)
        for entry in ledger(program(TEXT), here()).entries
    ]
    assert found == [
        ("all-gather", ("tensor",), "float32", 64 * FLOAT32, ("elementwise", "elementwise")),
        ("all-gather", ("tensor",), "bfloat16", 32 * BFLOAT16, ("elementwise", "elementwise")),
        ("reduce-scatter", ("tensor",), "float32", 16 * FLOAT32, ("elementwise",)),
        ("all-reduce", ("data", "tensor"), "float32", 16 * FLOAT32, ()),
        ("collective-broadcast", ("data",), "float32", 16 * FLOAT32, ()),
        ("ragged-all-to-all", ("tensor",), "float32", 16 * FLOAT32, ()),
    ]


def test_the_order_of_kernels_around_a_start_and_its_end_is_read():
    order = schedule_around(program(TEXT), "all-gather")
    start, end = (order.index(f"all-gather-{one}") for one in ("start", "done"))
    assert start < order.index("elementwise") < end
    with pytest.raises(ValueError, match="the program has no all-to-all-start"):
        schedule_around(program(TEXT), "all-to-all")


def test_what_only_counts_is_no_work_and_a_second_transfer_is_not_computation():
    idle = TEXT.replace("f32[16]{0} multiply(%x, %x)", "f32[16]{0} bitcast(%x)")
    for entry in ledger(program(idle.replace("sqrt(", "bitcast("))).entries:
        assert entry.overlapped == ()


def test_a_collective_inside_a_fusion_counts():
    head = TEXT.split("ENTRY")[0].replace("ions=8", "ions=4, replica_count=2")
    fused = """ENTRY %main (x: f32[16]) -> f32[4] {
  %x = f32[16]{0} parameter(0)
  ROOT %fused = f32[4]{0} fusion(%x), kind=kCustom, calls=%wrapped
}
"""
    (inner,) = ledger(program(head + fused), here()).entries
    assert (inner.kind, inner.axes) == ("reduce-scatter", ("tensor",))
    assert inner.payload_bytes == 16 * FLOAT32


def test_a_permutation_written_as_send_and_receive_is_refused():
    text = (
        "HloModule m\n\nENTRY %main (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n"
        "  %sent = (f32[4]{0}, u32[], token[]) send(%x), channel_id=1\n"
        "  ROOT %y = f32[4]{0} negate(%x)\n}\n"
    )
    with pytest.raises(ValueError, match="the program uses send and recv .'sent'."):
        ledger(program(text))
    to_host = text.replace("channel_id=1", "channel_id=1, is_host_transfer=true")
    assert ledger(program(to_host)).entries == ()
