"""Batches of examples, and those that are cut from the tokens of a text."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Integer


@struct.dataclass
class Batch:
    """Examples, their labels, and how much each label counts."""

    inputs: Any  # int32 tokens [B, L] of a language model, or features [B, D] of a classifier
    labels: Any  # int32 [B, L], the token after each input; or [B], the classes
    weights: Any  # float32, shaped like labels: 1, or 0 where a label is only padding


def check_tokens(tokens: Integer[np.ndarray, "..."], vocab_size: int) -> None:
    """Refuses tokens without an embedding: in a compiled step they are no error, but NaN."""
    signed = tokens.dtype.kind == "i"
    if tokens.size and (tokens.max() >= vocab_size or (signed and tokens.min() < 0)):
        position = tuple(map(int, np.argwhere((tokens < 0) | (tokens >= vocab_size))[0]))
        raise ValueError(
            f"tokens[{', '.join(map(str, position))}]={int(tokens[position])} must be in [0,"
            f" vocab_size={vocab_size}): the model has no such embedding; take a larger"
            " vocab_size, or this model's tokenizer"
        )


def check_windows(tokens: np.ndarray, batch_size: int, seq_len: int, vocab_size: int) -> None:
    """Refuses a stream of tokens that batches of windows cannot be cut from."""
    _check_stream(tokens, batch_size, seq_len, vocab_size)
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"seq_len={seq_len} must be under the number of tokens, {len(tokens)}: the text is"
            " too short for one window; take more text"
        )


def _check_stream(tokens: np.ndarray, batch_size: int, seq_len: int, vocab_size: int) -> None:
    # others would become integers, or batches of another rank, without a word
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"tokens of shape {tokens.shape} and dtype {tokens.dtype} must be integers [T]"
        )
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1: a batch would hold no label")
    check_tokens(tokens, vocab_size)


def batches(
    tokens: Integer[np.ndarray, "T"],
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    steps: int,
    vocab_size: int,
) -> Iterator[Batch]:
    """Yields `steps` batches [B, L] of windows from anywhere in the tokens of a split, the same
    for the same seed.
    """
    check_windows(tokens, batch_size, seq_len, vocab_size)
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1: there would be no batch")
    starts = np.random.default_rng(seed).integers(
        0, len(tokens) - seq_len, (steps, batch_size, 1)
    )
    return (of_windows(tokens[start + np.arange(seq_len + 1)]) for start in starts)


def of_windows(windows: Integer[np.ndarray, "B _"]) -> Batch:
    """Returns the batch [B, L] of windows [B, L + 1]; all labels have weight 1."""
    inputs, labels = windows[:, :-1].astype(np.int32), windows[:, 1:].astype(np.int32)
    return Batch(inputs=inputs, labels=labels, weights=np.ones(labels.shape, np.float32))


def validation_batches(
    tokens: Integer[np.ndarray, "T"], *, batch_size: int, seq_len: int, vocab_size: int
) -> Iterator[Batch]:
    """Yields batches that hold every token but the first exactly once as a label.

    The last batch is padded with labels of weight 0, so a mean weighted by the labels' weights
    is exact. Each batch is made when it is asked for.
    """
    _check_stream(tokens, batch_size, seq_len, vocab_size)
    labels, size = len(tokens) - 1, batch_size * seq_len
    if labels < 1:
        raise ValueError(f"tokens must be two or more, not {len(tokens)}: there is no label")

    def batch(start):
        positions = start + np.arange(size).reshape(batch_size, seq_len)
        weights = (positions < labels).astype(np.float32)
        positions = np.where(weights > 0, positions, 0)
        inputs, following = tokens[positions], tokens[positions + 1]
        return Batch(inputs.astype(np.int32), following.astype(np.int32), weights)

    return map(batch, range(0, labels, size))
