"""Laws of a model that counts."""

import numpy as np
import pytest

from course_lib.text import data, ngrams


def test_counting_pairs_beats_counting_tokens_on_the_corpus(cache):
    train, validation = data.tokens("train"), data.tokens("validation")
    assert (
        ngrams.bigram_loss(train, validation, 2048)
        < ngrams.unigram_loss(train, validation, 2048) - 1
    )


def test_the_weight_between_pairs_and_tokens_is_chosen_on_the_end_of_the_training_text_only():
    up, down = np.tile([0, 1, 2, 3], 450), np.tile([3, 2, 1, 0], 50)
    # In the end of up + down none of the counted pairs occurs, so that pairs are trusted least,
    # though in `up` they say all.
    least = -np.log(0.01 * 0.9 + 0.99 / 4)
    assert ngrams.bigram_loss(np.concatenate([up, down]), up, 4) == pytest.approx(
        least, abs=1e-2
    )
    assert ngrams.bigram_loss(np.concatenate([up, up]), up, 4) < 0.02


def test_the_weight_is_chosen_on_text_whose_pairs_were_not_counted():
    train, validation = np.random.default_rng(0).integers(50, size=(2, 1000))
    # Pairs of noise say nothing of the next token. Counted already, they would seem to say all.
    unigram = ngrams.unigram_loss(train, validation, 50)
    assert ngrams.bigram_loss(train, validation, 50) < 1.05 * unigram


def test_the_bigram_of_a_text_that_repeats_knows_the_next_token_the_unigram_its_frequency():
    train, validation = np.tile([0, 1], 500), np.tile([0, 1], 50)
    assert ngrams.unigram_loss(train, validation, 2) == pytest.approx(np.log(2), abs=1e-3)
    assert ngrams.bigram_loss(train, validation, 2) == pytest.approx(
        -np.log(0.99 + 0.01 / 2), abs=1e-3
    )


def test_no_token_is_impossible():
    train = np.array([0, 1] * 20)
    assert np.isfinite(ngrams.bigram_loss(train, np.array([0, 2, 3]), 4))


@pytest.mark.parametrize("loss", [ngrams.unigram_loss, ngrams.bigram_loss])
def test_tokens_outside_of_the_vocabulary_are_refused_and_not_counted_as_another_pair(loss):
    inside = np.tile([0, 1, 2], 50)
    for token in (3, -1):
        outside = np.tile([0, 1, token], 50)
        for train, validation in ((outside, inside), (inside, outside)):
            with pytest.raises(ValueError, match=rf"tokens\[2\]={token}"):
                loss(train, validation, 3)


def test_a_text_too_short_for_a_mean_is_refused():
    text = np.tile([0, 1], 20)
    with pytest.raises(ValueError, match=r"len\(train\)=19"):
        ngrams.bigram_loss(text[:19], text, 2)
    with pytest.raises(ValueError, match=r"len\(validation\)=1"):
        ngrams.unigram_loss(text, text[:1], 2)
