"""Losses of unigram and bigram models, in nats per token: a trained model must beat them."""

import numpy as np
from jaxtyping import Float, Integer

from course_lib.text import data


def unigram_loss(
    train: Integer[np.ndarray, "T"], validation: Integer[np.ndarray, "U"], vocab_size: int
) -> float:
    """Returns the loss of predicting each token of `validation` but the first by its frequency
    in `train`, in nats per token.

    p(v) = (count(v) + 1) / (T + V): add-one smoothing, so that no token is impossible.
    """
    _check(train, validation, vocab_size)
    return float(-np.log(_unigram(train, vocab_size)[validation[1:]]).mean())


def bigram_loss(
    train: Integer[np.ndarray, "T"], validation: Integer[np.ndarray, "U"], vocab_size: int
) -> float:
    """Returns the loss of predicting each token but the first from the one before it.

    p(v | u) = w count(u, v) / count(u) + (1 - w) p(v), with the unigram's p(v). A pair that was
    never seen has only the second term. The weight w is chosen on the last tenth of `train`,
    with counts from the rest (Jelinek and Mercer, 1980); then all of `train` is counted. The
    choice does not see `validation`.
    """
    _check(train, validation, vocab_size, shortest=20)  # the last tenth must hold a pair
    cut = len(train) - len(train) // 10
    weights = np.linspace(0.01, 0.99, 99)
    bigram, unigram = _probabilities(train[:cut], train[cut:], vocab_size)
    held_out = [-np.log(weight * bigram + (1 - weight) * unigram).mean() for weight in weights]
    weight = weights[int(np.argmin(held_out))]
    bigram, unigram = _probabilities(train, validation, vocab_size)
    return float(-np.log(weight * bigram + (1 - weight) * unigram).mean())


def _check(
    train: np.ndarray, validation: np.ndarray, vocab_size: int, shortest: int = 1
) -> None:
    for name, tokens, least in (("train", train, shortest), ("validation", validation, 2)):
        if len(tokens) < least:
            raise ValueError(f"len({name})={len(tokens)} must be at least {least}")
        data.check_tokens(tokens, vocab_size)  # another would be counted as another pair


def _unigram(train: Integer[np.ndarray, "T"], vocab_size: int) -> Float[np.ndarray, "V"]:
    return (np.bincount(train, minlength=vocab_size) + 1) / (len(train) + vocab_size)


def _probabilities(
    train: Integer[np.ndarray, "T"], text: Integer[np.ndarray, "U"], vocab_size: int
) -> tuple[Float[np.ndarray, "U-1"], Float[np.ndarray, "U-1"]]:
    """Returns count(u, v) / count(u) and p(v) for each token v of a text, u before it."""
    before, after = text[:-1].astype(np.int64), text[1:]
    # A table of all pairs would have V * V numbers.
    seen, counts = np.unique(
        train[:-1].astype(np.int64) * vocab_size + train[1:], return_counts=True
    )
    asked = before * vocab_size + after
    places = np.minimum(np.searchsorted(seen, asked), len(seen) - 1)
    pairs = np.where(seen[places] == asked, counts[places], 0)
    firsts = np.bincount(train[:-1], minlength=vocab_size)
    unigram = _unigram(train, vocab_size)[after]
    bigram = pairs / np.maximum(firsts, 1)[before]
    return np.where(firsts[before] > 0, bigram, unigram), unigram
