"""Laws of flash attention: the reference's numbers, without its scores."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from course_lib import measure
from course_lib.measure import hardware
from course_lib.models import attention
from course_lib.smaller_and_faster import flash_attention

B, L, H, G, K = 2, 64, 4, 2, 16
TILE = 16
WAYS = pytest.mark.parametrize("by", ["tiles", "interpreter"])


def arrays(groups=G, dtype=jnp.float32, length=L, width=K):
    """Queries, keys, values, and weights of a loss that differ for each number."""
    shapes = [(B, length, heads, width) for heads in (H, groups, groups, H)]
    random = np.random.default_rng(0)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def out_and_gradients(attend, query, key, value, weights):
    def loss(qkv):
        out = attend(*qkv)
        return jnp.sum(out.astype(jnp.float32) * weights.astype(jnp.float32)), out

    with jax.default_matmul_precision("highest"):
        gradients, out = jax.jit(jax.grad(loss, has_aux=True))((query, key, value))
    return out, *gradients


def error(ours, exact):
    """The distance, as a fraction of the norm of what is right."""
    ours, exact = (np.asarray(x, np.float64) for x in (ours, exact))
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


@WAYS
@pytest.mark.parametrize(("groups", "causal"), [(2, True), (1, False), slow(4, True)])
def test_values_and_gradients_are_those_of_the_reference(by, causal, groups):
    """Also where scores are in the thousands."""
    flash = functools.partial(flash_attention.attend, causal=causal, tile=TILE, by=by)
    reference = functools.partial(attention.attend, causal=causal)
    query, *given = arrays(groups)
    both = (out_and_gradients(attend, query, *given) for attend in (flash, reference))
    for ours, exact in zip(*both, strict=True):
        assert error(ours, exact) < 2e-6
    for x in out_and_gradients(flash, 1e4 * query, *given):
        assert np.all(np.isfinite(x))


@WAYS
def test_in_bfloat16_it_is_as_close_to_the_exact_result_as_the_reference(by):
    given = arrays(dtype=jnp.bfloat16)
    exact = out_and_gradients(attention.attend, *(x.astype(jnp.float32) for x in given))
    flash = functools.partial(flash_attention.attend, tile=TILE, by=by)
    ours, theirs = (out_and_gradients(attend, *given) for attend in (flash, attention.attend))
    for a, b, right in zip(ours, theirs, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert error(a, right) < 1.2 * error(b, right)


def masked(mask, query, key, value):
    """The reference, where a query sees the keys that `mask` [B L L] says."""
    key, value = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (key, value))
    return attention.reference(query, key, value, mask[:, None], jnp.float32)


def same(flash, exact, given):
    """Whether values and gradients are the same, but for rounding."""
    both = (out_and_gradients(attend, *given) for attend in (flash, exact))
    for ours, right in zip(*both, strict=True):
        assert error(ours, right) < 2e-6


LENGTHS = [[20, 30, 14], [1, 62, 1]]  # of the documents in each row
ROWS = jnp.array([np.repeat([1, 2, 1], lengths) for lengths in LENGTHS])


@WAYS
@pytest.mark.parametrize("causal", [True, slow(False)])
def test_documents_in_a_row_are_attended_and_differentiated_as_if_each_were_alone(by, causal):
    """Also if two that are no neighbours have one number."""

    def alone(*qkv):
        attend = functools.partial(attention.attend, causal=causal)
        ends = [np.cumsum([0, *lengths]) for lengths in LENGTHS]
        rows = [
            [attend(*(x[row : row + 1, a:b] for x in qkv)) for a, b in itertools.pairwise(at)]
            for row, at in enumerate(ends)
        ]
        return jnp.concatenate([jnp.concatenate(row, axis=1) for row in rows])

    options = dict(causal=causal, documents=ROWS, tile=TILE, by=by)
    same(functools.partial(flash_attention.attend, **options), alone, arrays())


@WAYS
@pytest.mark.parametrize(
    ("length", "width", "window", "causal"),
    [
        (50, 16, None, False),
        (50, 24, 2, True),
        slow(33, 80, 18, False),
        slow(64, 192, 33, True),
    ],
)
def test_any_length_any_width_and_windows_are_those_of_the_reference(
    by, length, width, window, causal
):
    i, j = np.indices((length, length))
    seen = ((i >= j) | (not causal)) & (abs(i - j) < (window or length))
    options = dict(causal=causal, window=window, tile=TILE, by=by)
    given = arrays(length=length, width=width)
    mask = jnp.broadcast_to(seen, (B, length, length))
    same(
        functools.partial(flash_attention.attend, **options),
        functools.partial(masked, mask),
        given,
    )


@pytest.mark.parametrize(("window", "causal"), [(None, True), (18, True), (18, False)])
def test_pairs_are_the_tiles_in_which_some_query_sees_some_key(window, causal):
    tiling = flash_attention.Tiling(TILE, 1.0, causal, window)
    i, j = np.indices((L, L))
    seen = ((i >= j) | (not causal)) & (abs(i - j) < (window or L))
    some = seen.reshape(L // TILE, TILE, L // TILE, TILE).any(axis=(1, 3))
    np.testing.assert_array_equal(tiling.pairs(L), np.nonzero(some))


@pytest.mark.parametrize("options", [{"documents": ROWS}, {"window": 18}, {"causal": False}])
def test_the_library_s_kernel_is_asked_for_the_same_mask(options):
    """Asked for XLA's in its place, which runs here."""
    given, ours = arrays()[:3], {"causal": True, "window": None, "documents": None} | options
    xla = flash_attention.by_library(*given, **ours, implementation="xla")
    assert error(xla, flash_attention.attend(*given, by="tiles", **ours)) < 1e-5


def test_without_triton_a_hopper_gpu_takes_the_library_s_kernel_and_an_older_one_the_tiles(
    monkeypatch,
):
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 2))
    monkeypatch.setattr(flash_attention, "by_library", lambda *arrays: "cudnn")
    given = arrays(dtype=jnp.bfloat16)[:3]
    for name, library in (("h100", True), ("b200", True), ("a100-80", False)):
        row = hardware.get(name)
        monkeypatch.setattr(hardware, "recognize", lambda device, row=row: row)
        out = inspect.unwrap(flash_attention.attend)(*given)
        assert (isinstance(out, str)) == library, name
    monkeypatch.setattr(hardware, "recognize", lambda device: hardware.get("h100"))
    with pytest.raises(ValueError, match="by='cudnn' cannot be had: .* float16 and bfloat16"):
        flash_attention.attend(*arrays()[:3], by="cudnn")


def test_the_kernel_reads_no_tile_of_another_document():
    query, key, value, _ = arrays()
    key, value = (x.at[:, : 2 * TILE].set(jnp.nan) for x in (key, value))
    documents = jnp.broadcast_to(jnp.arange(L) >= 2 * TILE, (B, L)).astype(jnp.int32)
    options = dict(documents=documents, tile=TILE, by="interpreter")
    out = flash_attention.attend(query, key, value, **options)
    assert jnp.all(jnp.isfinite(out[:, 2 * TILE :]))


@WAYS
def test_the_loop_reads_no_tile_that_is_masked_entirely(by):
    """Not-a-numbers in later tiles would spread, even with a weight of 0."""
    query, key, value, _ = arrays()
    key, value = (x.at[:, TILE:].set(jnp.nan) for x in (key, value))
    out = flash_attention.attend(query, key, value, tile=TILE, by=by)
    assert jnp.all(jnp.isfinite(out[:, :TILE])) and jnp.all(jnp.isnan(out[:, TILE:]))


@pytest.mark.parametrize(("by", "backward"), [("tiles", 5), ("interpreter", 7)])
def test_flops_count_each_pair_of_tiles_that_some_query_sees(by, backward):
    """Two products forward. Backward: scores, weights' gradient, and three gradients in one
    loop; the kernels compute the first two twice.
    """
    given, n = arrays(), L // TILE
    per_pair = 2 * B * H * TILE**2 * K
    for causal, pairs in ((True, n * (n + 1) // 2), (False, n * n)):
        once = functools.partial(flash_attention.attend, tile=TILE, by=by, causal=causal)
        gradients = lambda *args, f=once: jax.vjp(f, *args[:3])[1](args[3])  # noqa: E731
        assert measure.flops(once, *given[:3]).total == {"float32": 2 * per_pair * pairs}
        both = (2 + backward) * per_pair * pairs
        assert measure.flops(gradients, *given).total == {"float32": both}


@pytest.mark.parametrize(
    ("width", "dtype", "tile"),
    [(128, "bfloat16", 64), (128, "float32", 32), (256, "float32", 16)],
)
def test_the_default_tile_is_the_largest_that_every_gpu_has_room_for(width, dtype, tile):
    assert flash_attention.tile_for(width, dtype) == tile
    flash_attention.check_fits(tile, width, dtype, hardware.get("a5000"))


def attend(change, **options):
    """Without the tests' own checks of shapes."""
    return inspect.unwrap(flash_attention.attend)(*change(*arrays()[:3]), **options)


A5000, V5E = hardware.get("a5000"), hardware.get("v5e")
ROOM = "tile=128 needs 164,864 bytes .* the NVIDIA RTX A5000 has 101,376"
BAD = [
    (lambda: attend(lambda *x: x, tile=48), "tile=48"),
    (lambda: attend(lambda *x: x, window=0), "window=0"),
    (lambda: attend(lambda *x: x, documents=ROWS[:, :9]), r"documents of shape \(2, 9\)"),
    (
        lambda: attend(lambda *x: x, documents=ROWS.astype(float)),
        "dtype float32 must be integers",
    ),
    (lambda: attend(lambda *x: x, by="cudnn"), "by='cudnn' cannot be had: .* from Hopper on"),
    (lambda: flash_attention.tile_for(512, "float32"), "tile=16 needs 133,248 bytes"),
    (lambda: flash_attention.check_fits(128, 128, "bfloat16", A5000), ROOM),
    (lambda: flash_attention.check_fits(64, 64, "float32", V5E), "must be an NVIDIA"),
    (lambda: attend(lambda *x: x, by="cuda"), "by='cuda'"),
    (lambda: attend(lambda q, k, v: (q[:, :, :3], k, v)), "divides the query's 3"),
    (lambda: attend(lambda q, k, v: (q, k[:1], v[:1])), "as many positions of as many"),
    (lambda: attend(lambda q, k, v: (q.astype("bfloat16"), k, v)), "one floating dtype"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_cannot_be_is_refused_before_anything_is_compiled(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_where_no_kernel_compiles_the_reason_is_said_and_the_tiles_stand_in(monkeypatch):
    assert "NVIDIA GPUs" in flash_attention.why_no_kernel(None)
    assert "NVIDIA GPUs" in flash_attention.why_no_kernel(hardware.get("v5e"))
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 2))
    assert "JAX 0.9 or newer" in flash_attention.why_no_kernel(hardware.get("a100-80"))
    given = arrays()[:3]
    with pytest.raises(ValueError, match="by='kernel' cannot be had"):
        flash_attention.attend(*given, by="kernel")
    np.testing.assert_array_equal(
        flash_attention.attend(*given), flash_attention.attend(*given, by="tiles")
    )
