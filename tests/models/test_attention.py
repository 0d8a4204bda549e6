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
EVERYWHERE = ("reference", "blocks", "xla")
NEAR = dict(rtol=1e-5, atol=1e-6)  # float32, sums in another order


@pytest.fixture(scope="module")
def qkv():
    draw = np.random.default_rng(0)
    return tuple(jnp.asarray(draw.normal(size=(3, B, L, H, K)), jnp.float32))


def _out_and_grads(implementation, qkv, **options):
    def loss(qkv):
        out = attention.attend(*qkv, implementation=implementation, **options)
        return jnp.sum(jnp.sin(out)), out

    with jax.default_matmul_precision("highest"):
        grads, out = jax.jit(jax.grad(loss, has_aux=True))(qkv)
    return out, *grads


@pytest.mark.parametrize("causal", [True, False])
def test_what_runs_everywhere_gives_the_same_values_and_gradients(qkv, causal, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 4)  # a whole one, and a part of one
    reference, *others = (_out_and_grads(name, qkv, causal=causal) for name in EVERYWHERE)
    for other in others:
        for ours, theirs in zip(reference, other, strict=True):
            np.testing.assert_allclose(ours, theirs, **NEAR)


@pytest.mark.parametrize("window", [1, 3, L, 2 * L])
def test_a_window_hides_what_lies_before_it(qkv, window, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 2)
    at = np.arange(L)
    distance = at[:, None] - at
    mask = jnp.asarray((distance >= 0) & (distance < window))
    expected = attention.reference(*qkv, mask, jnp.float32)
    expected_grads = _out_and_grads("xla", qkv, window=window)[1:]
    for name in (*EVERYWHERE, "flash"):
        out, *grads = _out_and_grads(name, qkv, window=window)
        np.testing.assert_allclose(out, expected, **NEAR)
        for ours, theirs in zip(grads, expected_grads, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_block_of_queries_has_no_scores_of_keys_that_none_of_them_sees(qkv, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 2)
    attend = functools.partial(attention.attend, implementation="blocks")
    traced = str(jax.make_jaxpr(attend)(*qkv))
    # 2 queries with the keys up to the last of them
    assert all(f"f32[{B},{H},2,{keys}]" in traced for keys in (2, 4, 6))
    assert f"f32[{B},{H},{L},{L}]" not in traced


def test_grouped_queries_read_the_same_keys_as_if_each_had_a_copy(qkv):
    # 6 heads, of which 3 in a row share the keys and values of one
    query = jnp.concatenate(qkv, axis=2)

    def loss(query, key, value, copies):
        key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
        ways = (attention.attend(query, key, value, implementation=way) for way in EVERYWHERE)
        return sum(jnp.sin(way).sum() * (i + 1) for i, way in enumerate(ways))

    with jax.default_matmul_precision("highest"):
        both = [
            jax.jit(jax.grad(functools.partial(loss, copies=n), (0, 1, 2)))(query, *qkv[1:])
            for n in (1, 3)
        ]
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_allclose(ours, theirs, **NEAR)


def test_attention_is_a_mean_of_the_values_weighted_by_a_softmax(qkv):
    query, key, value = (np.asarray(x, np.float64) for x in qkv)
    scores = query[1, :, 0] @ key[1, :, 0].T / np.sqrt(K)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    with jax.default_matmul_precision("highest"):
        out = attention.attend(*qkv, causal=False)
    np.testing.assert_allclose(out[1, :, 0], weights @ value[1, :, 0], **NEAR)


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_causal_attention_reads_the_past_and_only_the_past(qkv, implementation):
    """Three gradient criteria, after nanodo's test_causality
    (https://github.com/google-deepmind/nanodo): the output at a position does not depend on
    later ones, depends on itself, and on earlier ones.
    """
    at, attend = 3, functools.partial(attention.attend, implementation=implementation)
    grad = jax.jit(jax.grad(lambda value: attend(*qkv[:2], value)[:, at].sum()))(qkv[2])
    assert np.all(grad[:, at + 1 :] == 0)
    assert np.all(grad[:, : at + 1] != 0)


def test_in_bfloat16_only_the_weights_and_the_result_are_rounded():
    """A head of 128 is scaled by 1 / 11.3, which bfloat16 would round; one of 4 or 16 by a
    power of two.
    """
    draw = np.random.default_rng(0)
    query, key, value = jnp.asarray(draw.normal(size=(3, 1, 64, 2, 128)), jnp.bfloat16)

    def by_hand(query, key, value):
        scores = jnp.einsum("bqhk,bshk->bhqs", query.astype("float32"), key.astype("float32"))
        past = jnp.tril(jnp.ones((64, 64), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(past, scores * 128**-0.5, -jnp.inf), axis=-1)
        return jnp.einsum("bhqs,bshk->bqhk", weights.astype(jnp.bfloat16), value)

    with jax.default_matmul_precision("highest"):
        expected, found, rounded = (
            np.asarray(jax.jit(attend)(query, key, value), np.float32)
            for attend in (
                by_hand,
                attention.attend,
                functools.partial(attention.attend, softmax_dtype="bfloat16"),
            )
        )
    differ = [np.mean(abs(x - expected) > 0.02 * abs(expected)) for x in (found, rounded)]
    # a few weights lie next to where bfloat16 rounds up or down
    assert differ[0] < 0.01 < differ[1]


def test_why_unavailable_names_the_reason():
    t4, a100, v5e = (hardware.get(name) for name in ("t4", "a100-80", "v5e"))
    why = attention.why_unavailable
    for name, accelerator, dtype in (
        ("reference", None, "bfloat16"),
        ("xla", None, "bfloat16"),
        ("xla", t4, "float16"),
        ("blocks", t4, "bfloat16"),
        ("xla", a100, "bfloat16"),
        ("flash", v5e, "bfloat16"),  # as tiles in JAX
    ):
        assert why(name, accelerator, dtype) is None
    assert "add the GPU's row" in why("cudnn", None)
    assert "needs an NVIDIA GPU" in why("cudnn", v5e)
    assert "no unit for them: use 'reference' or 'blocks'" in why("xla", t4, "bfloat16")
    for name in ("cudnn", "flash"):  # the way out must be one that leads on
        assert "compute capability 8.0" in why(name, t4)
        assert "use 'reference' or 'blocks'" in why(name, t4, "bfloat16")
    assert attention.stand_in("flash", v5e).startswith("flash attention runs as tiles in JAX")
    assert attention.stand_in("reference", v5e) is None
    with pytest.raises(ValueError, match="attention='pallas' must be one of"):
        why("pallas", None)


BAD = [
    ({"implementation": "pallas"}, "attention='pallas'"),
    ({"implementation": "xla", "softmax_dtype": jnp.bfloat16}, "softmax_dtype='bfloat16'"),
    ({"softmax_dtype": "int32"}, "softmax_dtype='int32'"),
    ({"softmax_dtype": None}, "softmax_dtype=None"),  # NumPy takes it for float64
    ({"implementation": "cudnn"}, "dtype='float32'"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_what_cannot_be_done_is_refused(qkv, options, message):
    with pytest.raises(ValueError, match=message):
        attention.attend(*qkv, **options)


def test_arrays_that_would_broadcast_are_refused(qkv):
    query, key, value = qkv
    with pytest.raises(ValueError, match=r"key of shape \(1, 6, 2, 4\)"):
        inspect.unwrap(attention.attend)(query, key[:1], value[:1])
