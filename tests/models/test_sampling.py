"""Laws of sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib.models import sampling

VOCAB = 5


def counts_up(params, tokens, rng=None):
    """Expects the next token to be the last one plus one; sees nothing that comes later."""
    return params * jax.nn.one_hot((tokens + 1) % VOCAB, VOCAB)


def generate(prompt, length, params=100.0, apply_fn=counts_up, max_seq_len=4, **options):
    return sampling.generate(
        apply_fn,
        jnp.float32(params),
        jnp.array(prompt),
        length,
        jax.random.key(0),
        max_seq_len=max_seq_len,
        **options,
    )


def test_a_prompt_is_continued_by_what_the_model_expects():
    np.testing.assert_array_equal(
        generate([[0, 1], [3, 4]], 6, max_seq_len=10),
        [[0, 1, 2, 3, 4, 0, 1, 2], [3, 4, 0, 1, 2, 3, 4, 0]],
    )


def test_text_longer_than_the_model_sees_goes_on_from_the_last_tokens():
    def sees_at_most_four(params, tokens, rng=None):
        assert tokens.shape[1] <= 4
        return counts_up(params, tokens)

    np.testing.assert_array_equal(
        generate([[0, 1]], 7, apply_fn=sees_at_most_four), [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    )
    np.testing.assert_array_equal(
        generate([[2, 3, 4, 0, 1, 2]], 2, apply_fn=sees_at_most_four)[:, -2:], [[3, 4]]
    )


def test_tokens_are_drawn_as_often_as_the_model_expects_them():
    def always_the_same(params, tokens, rng=None):
        return jnp.broadcast_to(
            jnp.log(jnp.array([0.5, 0.3, 0.2, 1e-9, 1e-9])), (*tokens.shape, VOCAB)
        )

    drawn = generate(np.zeros((1000, 1), np.int32), 4, apply_fn=always_the_same)[:, 1:]
    shares = np.bincount(np.array(drawn).ravel(), minlength=VOCAB) / drawn.size
    # four standard deviations of 4000 draws
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2, 0, 0], atol=0.03)
    # each with a key of its own: two in a row are equal as often as chance says
    equal = (drawn[:, 1:] == drawn[:, :-1]).mean()
    np.testing.assert_allclose(equal, 0.5**2 + 0.3**2 + 0.2**2, atol=0.05)


def test_a_low_temperature_takes_the_likeliest_and_a_high_one_takes_any():
    expected = np.array(generate([[0]], 4, params=100.0))
    np.testing.assert_array_equal(generate([[0]], 4, params=1.0, temperature=0.01), expected)
    many = np.zeros((50, 1), np.int32)
    assert len(np.unique(generate(many, 4, params=1.0, temperature=100.0), axis=0)) > 25


BAD = [
    ([[0, VOCAB]], {}, r"tokens from 0 to 5, which must be in \[0, 5\)"),
    ([[-1]], {}, "tokens from -1 to -1"),
    (np.zeros((1, 0), np.int32), {}, "must hold at least one token"),
    ([[0]], {"temperature": 0.0}, "temperature=0.0"),
    ([[0]], {"length": 0}, "length=0"),
    ([[0]], {"max_seq_len": 0}, "max_seq_len=0"),
]


@pytest.mark.parametrize(("prompt", "options", "message"), BAD)
def test_mistakes_are_refused(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        generate(prompt, **({"length": 1} | options))
