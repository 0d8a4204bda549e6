"""Samples text from a language model, one token after the other."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from course_lib import arguments

PyTree = Any


def generate(
    apply_fn: Any,
    params: PyTree,
    prompt: Int[Array, "B L"],
    length: int,
    rng: Key[Array, ""],
    *,
    max_seq_len: int,
    temperature: float = 1.0,
) -> Int[Array, "B L+{length}"]:
    """Continues B prompts of L tokens by `length` tokens. The model, `apply_fn(params, tokens,
    rng=None) -> logits [B, L, V]`, must be causal, and take all V tokens that it has logits
    for. For each new token it computes the last `max_seq_len` tokens again, without a cache.
    `temperature` divides the logits before a token is drawn; below 1, likely tokens become
    likelier.
    """
    arguments.refuse(_errors(apply_fn, params, prompt, length, max_seq_len, temperature))
    return _generate(apply_fn, length, max_seq_len, params, prompt, rng, temperature)


def _errors(apply_fn, params, prompt, length, max_seq_len, temperature):
    if length < 1:
        yield f"length={length} must be at least 1 token"
    if not temperature >= 1e-6:
        yield f"temperature={temperature} must be at least 1e-6; 0.01 is all but greedy"
    if max_seq_len < 1:
        yield f"max_seq_len={max_seq_len} must be at least 1 token"
    if prompt.ndim != 2:
        yield f"prompt.shape={prompt.shape} must be [B, L]: one prompt is prompt[None]"
    if not prompt.size:
        yield f"prompt.shape={prompt.shape} must hold at least one token"
    vocab_size = jax.eval_shape(apply_fn, params, prompt[:, :1]).shape[-1]
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        yield (
            f"prompt holds tokens from {prompt.min()} to {prompt.max()}, which must be in [0,"
            f" {vocab_size}): encode the text with the tokenizer the model was trained with"
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(apply_fn, length, max_seq_len, params, prompt, rng, temperature):
    total = prompt.shape[1] + length
    window = min(max_seq_len, total)

    def add_token(position, tokens):
        start = jnp.maximum(position - window, 0)
        # A causal model ignores what is to come.
        seen = jax.lax.dynamic_slice_in_dim(tokens, start, window, axis=1)
        logits = apply_fn(params, seen)[:, position - 1 - start]
        token = jax.random.categorical(jax.random.fold_in(rng, position), logits / temperature)
        return tokens.at[:, position].set(token.astype(tokens.dtype))

    tokens = jnp.pad(prompt, ((0, 0), (0, length)))
    return jax.lax.fori_loop(prompt.shape[1], total, add_token, tokens)
