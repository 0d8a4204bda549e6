"""Laws of the published step times, of their predictions, and of the page about both."""

import dataclasses
import functools
import itertools
import math
import re
import statistics
from pathlib import Path

import jaxtyping
import PIL.Image
import pytest
from slow_cases import slow

from benchmarks import backtest as program
from course_lib import planner
from course_lib.lessons import backtest
from course_lib.many_devices.cluster_model import PRODUCTS_SHARE
from course_lib.measure import hardware
from course_lib.planner import Shape

ROOT = Path(__file__).parent.parent.parent
ROWS = backtest.load()
DENSE = backtest.dense(ROWS)


def row(source, part="", **fields):
    """Returns the one row of a publication whose place contains a text and whose fields are as
    given.
    """
    (found,) = [
        each
        for each in ROWS
        if each.source == source
        and part in each.where
        and all(getattr(each, name) == value for name, value in fields.items())
    ]
    return found


@pytest.fixture(scope="module", autouse=True)
def types_are_not_checked():
    """The figures come from a million small calls, and a check of types takes most of each.
    tests/planner checks the types of these functions.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# The data.


def test_every_row_names_its_place_and_has_an_mfu():
    for each in ROWS:
        assert each.where and each.status in ("checked", "from notes"), each
        assert 0 < each.mfu < 1, each
    assert set(backtest.publications()) == {each.source for each in ROWS}


def test_no_row_is_missing_or_there_twice():
    places = {
        (each.source, each.where, each.model, each.plan.batch, each.published) for each in ROWS
    }
    assert len(places) == len(ROWS) == 591
    assert len(DENSE) == 418 and len({each.source for each in DENSE}) == 21


def test_figures_as_they_stand_in_the_publications():
    # Narayanan et al., Table 1; Korthikanti et al., Table 5; Nemotron-4 340B, Table 2; Llama 3,
    # Table 4; JAX-Toolbox.
    table_1 = [each.published for each in ROWS if "Table 1" in each.where]
    assert {137, 138, 142, 135, 140, 148, 155, 163} <= set(table_1)
    table_5 = [each.published for each in ROWS if each.source == "korthikanti_2022"]
    assert {1.42, 1.10, 18.13, 13.75, 49.05, 37.83, 94.42, 71.49} <= set(table_5)
    nemotron = [each.published for each in ROWS if each.source == "nemotron4_2024"]
    assert nemotron == [10.3, 10.3, 8.0]
    llama = [each.published for each in ROWS if each.source == "llama3_2024"]
    assert llama[:2] == [430, 400]
    assert row("jax_toolbox").published == 0.721


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("tensor = 8", "tensr = 8", r"\['tensr'\] must be fields of a row"),
        ("tensor = 8", "tensor = 5", "must multiply to gpus=1536"),
        ('kind = "dense"', 'kind = "sparse"', "kind='sparse' must be one of"),
        ('unit = "seconds"', 'unit = "hours"', "unit='hours' must be one of"),
    ],
)
def test_a_wrong_field_is_named_with_its_file_and_row(
    monkeypatch, tmp_path, right, wrong, said
):
    text = (backtest.FOLDER / "nemotron4_2024.toml").read_text()
    (tmp_path / "paper.toml").write_text(text.replace(right, wrong))
    monkeypatch.setattr(backtest, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=rf"paper.toml, row 1: .*{said}"):
        backtest.load.__wrapped__()


# Units, each recomputed by hand for one row.


def test_seconds_are_seconds_and_give_the_published_rate_of_sequences():
    found = row("jax_toolbox")
    assert found.seconds == 0.721
    # The README's table has 22.19 sequences/s for the same run: 16 sequences per step.
    assert found.plan.batch / found.seconds == pytest.approx(22.19, rel=1e-3)


def test_tflops_of_narayanan_are_those_of_the_papers_formula():
    # Table 1, the first row: 24 layers of width 2304, 512 sequences of 2048, 32 A100s, 137
    # TFLOP/s per GPU.
    found = row("narayanan_2021", "Table 1", published=137)
    B, L, N, D, V = 512, 2048, 24, 2304, 51200
    assert (found.shape.layers, found.shape.width, found.plan.batch) == (N, D, B)
    flops = 96 * B * L * N * D**2 * (1 + L / (6 * D) + V / (16 * N * D))
    assert found.seconds == pytest.approx(flops / (137e12 * 32))


@pytest.mark.parametrize("gpus, tflops", [(2240, 126.0), (2800, 121.0), (3360, 113.0)])
def test_tflops_of_narayanan_and_seconds_agree_where_both_are_published(gpus, tflops):
    # Smith et al., section 2.4: 60.1, 50.2 and 44.4 s are 126, 121 and 113 TFLOP/s.
    (found,) = [
        each for each in ROWS if each.source == "mt_nlg_2022" and each.cluster.count == gpus
    ]
    rate = dataclasses.replace(found, published=tflops, unit="TFLOP/s", flops="narayanan")
    assert rate.seconds == pytest.approx(found.seconds, rel=0.01)


def test_the_published_mfu_of_korthikanti_follows_from_the_seconds():
    # Table 5, 530B, present work: 37.83 s, 56.0% MFU by 72 B s l h^2 (1 + s/6h + V/12lh).
    found = row("korthikanti_2022", "530B (MT-NLG), present work")
    rate = dataclasses.replace(found, published=0.560, unit="MFU", flops="narayanan-model")
    assert rate.seconds == pytest.approx(found.seconds, rel=0.01)
    B, L, N, D, V = 280, 2048, 105, 20480, 51200
    flops = 72 * B * L * N * D**2 * (1 + L / (6 * D) + V / (12 * N * D))
    assert rate.seconds == pytest.approx(flops / (0.560 * 312e12 * 280))


def test_mfu_is_a_share_of_the_bfloat16_peak():
    # Nanotron's summary: 3.57B on 64 H100s; FLOPs are 6 per parameter of products and full
    # attention, 1M tokens per step.
    found = next(
        each
        for each in ROWS
        if each.source == "nanotron_2025" and each.unit == "MFU" and each.cluster.count == 64
    )
    shape = found.shape
    products = shape.layers * (4 * shape.width**2 + 3 * shape.width * shape.mlp)
    products += shape.vocab * shape.width
    flops = 6 * products + 12 * shape.layers * shape.width * shape.seq_len
    tokens = found.plan.batch * shape.seq_len
    assert found.seconds == pytest.approx(tokens * flops / (found.published * 989e12 * 64))
    assert found.mfu == pytest.approx(found.published)


def test_tokens_per_second_are_per_gpu():
    # torchtitan, December 2024, Table 1: 8 H100s, 16 sequences of 8192, 5762 tokens/s per GPU.
    found = row("torchtitan_2024", "Table 1, row 1", published=5762)
    assert found.seconds == pytest.approx(16 * 8192 / (5762 * 8))


def test_each_count_of_flops_is_the_sum_of_its_products():
    # Two layers of width 64 with 6 heads of 16, keys and values of 2 heads, a gated MLP of 160,
    # a vocabulary of 100, and sequences of 256.
    shape = Shape(2, 64, 6, 16, 160, 100, 256, kv_heads=2, matrices=3)
    query, key, value, out = 64 * 96, 64 * 32, 64 * 32, 96 * 64
    layers = 2 * (query + key + value + out + 3 * 64 * 160)
    # A token meets 256 others: 96 multiplications and additions for its scores with each, as
    # many for its mean of values, and twice that backward.
    scores = 2 * 256 * (96 + 96) * 2 * 3
    expected = {
        "6N+12lhs": 6 * (layers + 2 * 6400) + scores,
        "6N+6lhs": 6 * (layers + 2 * 6400) + scores / 2,
        "6M+12lhs": 6 * (layers + 6400) + scores,  # the embedding is no product
    }
    assert {name: backtest.FLOPS[name](shape) for name in expected} == expected
    tied = dataclasses.replace(shape, tied=True)
    assert backtest.FLOPS["6N+12lhs"](tied) == expected["6M+12lhs"]
    assert backtest.FLOPS["6M+12lhs"](tied) == expected["6M+12lhs"]


# The statistics.


def prediction(error, mfu=0.5, source="a", accelerator="h100", seq_len=1024):
    """Returns a prediction with a published MFU, and an error in seconds."""
    dense = DENSE[0]
    made = dataclasses.replace(
        dense,
        source=source,
        shape=dataclasses.replace(dense.shape, seq_len=seq_len),
        cluster=dataclasses.replace(dense.cluster, accelerator=hardware.get(accelerator)),
        published=mfu,
        unit="MFU",
        flops="6M+12lhs",
    )
    total = (1 + error) * made.seconds
    step = planner.Breakdown({"products": total}, {}, mfu * made.seconds)
    return backtest.Prediction(made, step)


def test_halves_are_every_second_publication_and_share_none():
    seen, unseen = backtest.halves(DENSE)
    names = sorted({each.source for each in DENSE})
    assert {each.source for each in seen} == set(names[::2])
    assert {each.source for each in unseen} == set(names[1::2])
    assert len(seen) + len(unseen) == len(DENSE)


def test_a_fit_finds_the_share_that_steps_were_made_with():
    made = [
        dataclasses.replace(each.row, published=each.step.total, unit="seconds")
        for each in backtest.predict(DENSE[:3], 0.63)
    ]
    assert backtest.fit(made) == 0.63


def test_a_relative_error_is_over_the_median_of_the_other_rows_of_publication_and_gpu():
    found = [prediction(error) for error in (0.0, 0.2, 0.5)]
    found += [prediction(error, accelerator="a100-80") for error in (-0.5, -0.5, 0.0)]
    found += [prediction(error, source="b") for error in (0.3, 0.7)]  # too few for a level
    # the median of two, in logarithms, is their geometric mean
    expected = [
        1 / math.sqrt(1.2 * 1.5) - 1,
        1.2 / math.sqrt(1.5) - 1,
        1.5 / math.sqrt(1.2) - 1,
    ]
    expected += 2 * [0.5 / math.sqrt(0.5) - 1] + [1]
    assert backtest.relative_errors(found) == pytest.approx(expected)


# The figures that are shipped.


@functools.cache
def summary(half):
    return backtest.summary(program.halves()[half])


def test_the_constant_that_is_shipped_is_the_one_that_fits_the_seen_half():
    seen = [each.row for each in program.halves()["seen"]]  # notebook 12 tries all shares
    errors = [
        backtest.median_error(backtest.predict(seen, PRODUCTS_SHARE + change))
        for change in (-0.01, 0.0, 0.01)
    ]
    assert errors[1] < min(errors[0], errors[2])


def test_predictions_are_as_far_off_as_they_were_and_better_than_one_mfu_for_all_rows():
    unseen, every = summary("unseen"), summary("all")
    found = unseen.median_error, unseen.within_tenth, every.rank_correlation
    assert found == pytest.approx((0.084, 0.60, 0.81), abs=0.005)
    seen, rows = ([each.row for each in program.halves()[half]] for half in ("seen", "unseen"))
    assert found[0] < 0.7 * backtest.median_error(backtest.same_mfu(rows, seen))


def test_words_cite_the_figures_that_are_computed():
    text = " ".join((ROOT / "docs" / "training.md").read_text().split())
    error = summary("unseen").median_error
    assert f"median error is {error:.0%} on published steps that it was not fitted to" in text
    every = summary("all")
    near = backtest.within_tenth(backtest.relative_errors(program.predicted()))
    text = " ".join(planner.price.__doc__.split())
    assert f"for {every.within_tenth:.0%} of {every.rows} published steps" in text
    assert f"published seconds on the accelerators of its publication, {near:.0%} are" in text


def test_a_ratio_is_off_by_what_the_two_errors_differ_if_only_the_layout_differs():
    one, other = prediction(0.0), prediction(0.1)
    halved = {axis: n for axis, n in one.row.plan.axes.items() if axis != "data"} | {"data": 1}
    plan = dataclasses.replace(other.row.plan, axes=halved)
    elsewhere = dataclasses.replace(other, row=dataclasses.replace(other.row, plan=plan))
    [pair] = backtest.layout_pairs([one, elsewhere])
    assert pair.error == pytest.approx(0.1)
    right, wrong = pair._replace(predicted=0.8, published=0.9), pair._replace(predicted=1.25)
    assert (right.apart, right.error) == pytest.approx((0.25, 0.125)) and right.in_order
    assert wrong.apart == pytest.approx(0.25)
    assert not wrong._replace(published=0.9).in_order
    assert backtest.layout_pairs([one, other]) == []  # the same layout
    assert backtest.layout_pairs([one, prediction(0.1, source="b")]) == []


def test_two_of_three_ratios_of_layouts_are_within_the_error_that_the_planner_calls_a_tie():
    """The page says how many pairs, and their median."""
    errors = sorted(pair.error for pair in backtest.layout_pairs(program.predicted()))
    middle, most = statistics.median(errors), errors[2 * len(errors) // 3]
    assert most == pytest.approx(planner.LAYOUT_ERROR, abs=0.005)
    text = " ".join((ROOT / "docs" / "backtest.md").read_text().split())
    assert f"For {len(errors)} pairs of rows" in text and f"error is {middle:.1%}" in text


def test_tpus_are_faster_than_predicted_as_the_step_model_says():
    errors = [each.error for each in program.predicted("tpu")]
    assert len(errors) == 8 and min(errors) > 0.22


def test_nemotron_slows_down_as_published():
    published, predicted = program.nemotron()
    assert published == pytest.approx(8.0 / 10.3)
    assert predicted / published - 1 == pytest.approx(-0.016, abs=0.0005)
    # The bubble alone gives less.
    bubble = (12 - 1) / 8  # 12 stages, 8 chunks
    assert (36 + bubble) / (48 + bubble) < 7.95 / 10.35


def test_the_break_even_of_data_parallelism_is_that_of_the_scaling_book():
    # Inside of a host only without the factor (n-1)/n, which the book leaves out.
    assert program.break_even(1)[1] == pytest.approx(program.INSIDE, rel=0.1)
    assert program.break_even(128)[0] == pytest.approx(program.ACROSS, rel=0.1)
    # By hand: 989 TFLOP/s over 450 GB/s, or over eight ports.
    assert program.break_even(1)[0] == pytest.approx(989e12 / 450e9 * 7 / 8)
    assert program.break_even(128)[0] == pytest.approx(989e12 / 400e9 * 127 / 128)


def test_rows_that_are_more_than_a_tenth_off_have_a_reason_whose_figures_are_true():
    alone = "alone would take 85% of the published time or more"
    for each in itertools.chain(*map(program.predicted, backtest.KINDS)):
        if abs(each.error) > 0.1:
            assert each.row.reason, each.row.where
            if alone in each.row.reason:
                assert f"at {PRODUCTS_SHARE} of" in each.row.reason, each.row.where
                assert each.step.parts["products"] >= 0.85 * each.row.seconds, each.row.where


@pytest.mark.parametrize("other_constants", [False, slow(True)])
def test_page_table_and_picture_have_the_figures_that_are_computed(
    other_constants, monkeypatch
):
    text = (ROOT / program.PAGE).read_text()
    if not other_constants:
        stored = re.search("With other values of .*", text)[0]
        monkeypatch.setattr(program, "assumed", lambda: stored)
    assert text == program.page(text), "run python -m benchmarks.backtest"
    assert (ROOT / program.ROWS).read_text() == program.all_rows()
    with PIL.Image.open(ROOT / program.PICTURE) as picture:
        assert picture.text["Description"] == program.digest()
    assert {stack for _, stack, _, _ in program.points()} == set(program.STACKS)


def test_a_correlation_needs_two_predictions():
    with pytest.raises(ValueError, match="at least two, not 0"):
        backtest.summary([])
