"""Laws of every implementation of attention."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib.measure import hardware
from course_lib.models import attention

B, L, H, K = 2, 6, 2, 4
NEAR = dict(rtol=1e-5, atol=1e-6)  # float32, sums in another order


@pytest.fixture(scope="module")
def qkv():
    return tuple(
        jax.random.normal(key, (B, L, H, K)) for key in jax.random.split(jax.random.key(0), 3)
    )


def _out_and_grads(implementation, qkv, **options):
    def loss(qkv):
        out = attention.attend(*qkv, implementation=implementation, **options)
        return jnp.sum(jnp.sin(out)), out

    with jax.default_matmul_precision("highest"):
        grads, out = jax.jit(jax.grad(loss, has_aux=True))(qkv)
    return out, *grads


@pytest.mark.parametrize("options", [{}, {"causal": False}])
def test_what_runs_everywhere_gives_the_same_values_and_gradients(qkv, options, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 4)  # a whole one, and a part of one
    reference, *others = (
        _out_and_grads(name, qkv, **options) for name in ("reference", "blocks", "xla")
    )
    for other in others:
        for ours, theirs in zip(reference, other, strict=True):
            np.testing.assert_allclose(ours, theirs, **NEAR)


def test_a_block_of_queries_has_no_scores_of_keys_that_none_of_them_sees(qkv, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 2)
    product = f"{B},{H},2,{{}}"  # 2 queries with the keys up to the last of them: 2, 4, 6
    lowered = str(
        jax.make_jaxpr(lambda *qkv: attention.attend(*qkv, implementation="blocks"))(*qkv)
    )
    assert (
        all(f"f32[{product.format(keys)}]" in lowered for keys in (2, 4, 6))
        and f"f32[{B},{H},{L},{L}]" not in lowered
    )


@pytest.mark.parametrize("implementation", ["reference", "blocks", "xla"])
def test_grouped_queries_read_the_same_keys_as_if_each_had_a_copy(qkv, implementation):
    # 6 heads, of which 3 in a row share the keys and values of one
    query = jnp.concatenate(qkv, axis=2)

    def loss(query, key, value, copies):
        key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
        return jnp.sin(attention.attend(query, key, value, implementation=implementation)).sum()

    with jax.default_matmul_precision("highest"):
        both = [
            jax.jit(jax.grad(functools.partial(loss, copies=copies), argnums=(0, 1, 2)))(
                query, *qkv[1:]
            )
            for copies in (1, 3)
        ]
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_allclose(ours, theirs, **NEAR)


def test_grouped_queries_are_refused_where_they_cannot_be(qkv):
    query = jnp.concatenate(qkv, axis=2)
    with pytest.raises(
        ValueError,
        match=r"key of shape \(2, 6, 2, 4\) must have a number of heads that divides .* 3",
    ):
        attention.attend(query[:, :, :3], *qkv[1:])


def test_attention_is_a_mean_of_the_values_weighted_by_a_softmax(qkv):
    query, key, value = (np.asarray(x, np.float64) for x in qkv)
    scores = query[1, :, 0] @ key[1, :, 0].T / np.sqrt(K)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    with jax.default_matmul_precision("highest"):
        out = attention.attend(*qkv, causal=False)
    np.testing.assert_allclose(out[1, :, 0], weights @ value[1, :, 0], **NEAR)


@pytest.mark.parametrize("implementation", ["reference", "blocks", "xla"])
def test_causal_attention_reads_the_past_and_only_the_past(qkv, implementation):
    """Three gradient criteria, after nanodo's test_causality
    (https://github.com/google-deepmind/nanodo).

    The output at a position does not depend on later ones, depends on itself, and on earlier
    ones.
    """
    at = 3
    grad = jax.grad(
        lambda value: attention.attend(*qkv[:2], value, implementation=implementation)[
            :, at
        ].sum()
    )(qkv[2])
    assert np.all(grad[:, at + 1 :] == 0)
    assert np.all(grad[:, at] != 0)
    assert np.all(grad[:, :at] != 0)


def test_a_bfloat16_softmax_errs_more_than_a_float32_one(qkv):
    short = tuple(x.astype(jnp.bfloat16) for x in qkv)
    exact = attention.attend(*(x.astype(jnp.float32) for x in short))

    def error(softmax_dtype):
        out = attention.attend(*short, softmax_dtype=softmax_dtype)
        assert out.dtype == jnp.bfloat16
        return float(jnp.abs(out.astype(jnp.float32) - exact).mean())

    assert error(jnp.float32) < error(jnp.bfloat16)


def test_in_bfloat16_only_the_weights_and_the_result_are_rounded():
    """A head of 128 is scaled by 1 / 11.3, which bfloat16 would round; one of 4 or 16 by a
    power of two.
    """
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 128), jnp.bfloat16)
    given = [x.astype(jnp.float32) for x in (query, key, value)]
    scores = jnp.einsum("bqhk,bshk->bhqs", given[0], given[1], precision="highest") * 128**-0.5
    past = jnp.tril(jnp.ones((64, 64), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1).astype(jnp.bfloat16)
    expected = jnp.einsum("bhqs,bshk->bqhk", weights, value).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        found = attention.attend(query, key, value).astype(jnp.float32)
    differ = jnp.mean(jnp.abs(found - expected) > 0.02 * jnp.abs(expected))
    assert differ < 0.01  # a few weights lie next to where bfloat16 rounds up or down


def test_why_unavailable_names_the_reason():
    for name in ("reference", "xla"):
        assert attention.why_unavailable(name, None) is None
    reason = attention.why_unavailable("cudnn", None)
    assert (
        "needs an NVIDIA GPU that course_lib.measure.hardware knows" in reason
        and "add the GPU's row" in reason
    )
    assert "needs an NVIDIA GPU" in attention.why_unavailable("cudnn", hardware.get("v5e"))
    for name in ("cudnn", "flash"):
        assert "compute capability 8.0" in attention.why_unavailable(name, hardware.get("t4"))
    with pytest.raises(ValueError, match="attention='pallas' must be one of"):
        attention.why_unavailable("pallas", None)


def test_flash_attention_runs_everywhere_and_says_where_no_kernel_does():
    for accelerator in (None, hardware.get("v5e")):
        assert attention.why_unavailable("flash", accelerator) is None
        note = attention.stand_in("flash", accelerator)
        assert note.startswith("flash attention runs as tiles in JAX, not as a kernel: ")
        assert attention.stand_in("reference", accelerator) is None


def test_flash_attention_gives_the_values_and_gradients_of_the_reference():
    qkv = tuple(
        jax.random.normal(key, (1, 128, 2, 16))
        for key in jax.random.split(jax.random.key(0), 3)
    )
    both = (_out_and_grads(name, qkv) for name in ("reference", "flash"))
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6)


def test_on_a_gpu_without_bfloat16_units_only_what_does_not_ask_for_them_can_be_had():
    t4, a100 = hardware.get("t4"), hardware.get("a100-80")
    reason = attention.why_unavailable("xla", t4, "bfloat16")
    assert "no unit for them: use 'reference' or 'blocks', or dtype 'float16'" in reason
    for name, accelerator, dtype in [
        ("xla", t4, "float16"),
        ("blocks", t4, "bfloat16"),
        ("xla", a100, "bfloat16"),
    ]:
        assert attention.why_unavailable(name, accelerator, dtype) is None
    assert attention.why_unavailable("xla", None, "bfloat16") is None
    with pytest.raises(
        ValueError, match=r"accelerator='t4' must be a row of the table: hardware.get\('t4'\)"
    ):
        inspect.unwrap(attention.why_unavailable)("xla", "t4", "bfloat16")
    for name in ("cudnn", "flash"):  # the way out must be one that leads on
        assert "use 'reference' or 'blocks'" in attention.why_unavailable(name, t4, "bfloat16")


def test_what_is_not_installed_is_refused_before_anything_is_compiled(qkv):
    a5000 = hardware.get("a5000")
    # what it could do: 384 positions
    long = tuple(jnp.tile(x, (1, 64, 1, 1)).astype(jnp.bfloat16) for x in qkv)
    if attention.why_unavailable("cudnn", a5000):
        with pytest.raises(ValueError, match="attention='cudnn' cannot be had"):
            attention.attend(*long, implementation="cudnn")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "pallas"}, "attention='pallas' must be one of"),
        (
            {"implementation": "xla", "softmax_dtype": jnp.bfloat16},
            "softmax_dtype='bfloat16' must be 'float32'",
        ),
        ({"softmax_dtype": "int32"}, "softmax_dtype='int32' must be a floating dtype"),
        ({"softmax_dtype": "flaot32"}, "softmax_dtype='flaot32' must be a floating dtype"),
        # NumPy takes it for float64
        ({"softmax_dtype": None}, "softmax_dtype=None must be a floating dtype"),
        (
            {"implementation": "cudnn"},
            "dtype='float32' must be 'bfloat16' or 'float16' for attention='cudnn'",
        ),
        ({"implementation": "flash"}, "head_dim=4 must be a power of two, at least 16"),
    ],
)
def test_what_cannot_be_done_is_refused(qkv, options, message):
    with pytest.raises(ValueError, match=message):
        attention.attend(*qkv, **options)


# without the tests' checks of types and shapes, which would refuse it first
AS_A_USER = inspect.unwrap(attention.attend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda q, k, v: [x.astype(jnp.int32) for x in (q, k, v)],
            r"must be of one floating dtype, not \['int32', 'int32', 'int32'\]",
        ),
        (
            lambda q, k, v: [q, k.astype(jnp.bfloat16), v],
            r"must be of one floating dtype, not \['float32', 'bfloat16', 'float32'\]",
        ),
        (
            lambda q, k, v: [q, k, v.astype(jnp.float16)],
            r"must be of one floating dtype, not \['float32', 'float32', 'float16'\]",
        ),
        (lambda q, k, v: [q[0], k, v], r"query of shape \(6, 2, 4\) must be \[B, L, H, K\]"),
        (
            lambda q, k, v: [q, k[:, :3], v[:, :3]],
            r"key of shape \(2, 3, 2, 4\) .* must be \[2, 6, G, 4\]",
        ),
        (
            lambda q, k, v: [q, k, v[:, :3]],
            r"value of shape \(2, 3, 2, 4\) must be \[2, 6, G, 4\]",
        ),
        # it would be broadcast
        (lambda q, k, v: [q, k[:1], v[:1]], r"key of shape \(1, 6, 2, 4\)"),
        (lambda q, k, v: [q, k[..., :2], v[..., :2]], r"key of shape \(2, 6, 2, 2\)"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused(qkv, change, message):
    with pytest.raises(ValueError, match=message):
        AS_A_USER(*change(*qkv))
