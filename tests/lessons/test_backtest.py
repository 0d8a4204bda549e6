"""Laws of the published step times, of their predictions, and of the page about both."""

import collections
import dataclasses
import itertools
import math
import statistics
from pathlib import Path

import jaxtyping
import PIL.Image
import pytest

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


def test_every_row_names_its_place_its_status_and_its_kind():
    for each in ROWS:
        assert each.where and each.status in ("checked", "from notes"), each
        assert each.kind in backtest.KINDS and each.unit in backtest.UNITS, each
        assert each.published > 0 and 0 < each.mfu < 1, each


def test_every_publication_has_a_title_an_address_and_a_note():
    for name, publication in backtest.sources().items():
        assert publication["title"] and publication["note"], name
        assert publication["url"].startswith("https://"), name
    assert set(backtest.sources()) == {each.source for each in ROWS}


def test_there_are_enough_dense_rows_of_enough_publications():
    assert len(DENSE) >= 80
    assert len({each.source for each in DENSE}) >= 12


def test_no_row_is_there_twice():
    counts = collections.Counter(
        (each.source, each.where, each.model, each.plan.batch, each.published) for each in ROWS
    )
    assert [place for place, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    "source, at_least",
    [
        ("narayanan_2021", 16),
        ("korthikanti_2022", 8),
        ("nemotron4_2024", 3),
        ("llama3_2024", 2),
        ("dgxc_benchmarking", 19),
        ("jax_toolbox", 1),
    ],
)
def test_the_publications_that_everyone_quotes_are_whole(source, at_least):
    assert sum(each.source == source for each in DENSE) >= at_least


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


# Errors in a wrong file.

FILE = """
title = "A title"
url = "https://example.org"
note = "A note"
{publication}

[models.small]
layers = 2
width = 64
heads = 4
head_dim = 16
mlp = 256
vocab = 128
tied = true

[[rows]]
where = "Table 1, row 1"
status = "checked"
kind = "dense"
model = "small"
accelerator = "a100-80"
gpus = 8
batch = 8
seq_len = 128
microbatch = 1
published = 1.5
unit = "seconds"
{row}
"""


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Puts one file, with lines of the test's choice, in the place of the published ones."""
    monkeypatch.setattr(backtest, "FOLDER", tmp_path)

    def written(row="", publication=""):
        text = FILE.format(row=row, publication=publication)
        (tmp_path / "paper.toml").write_text(text)
        return backtest.load.__wrapped__()

    return written


def test_a_row_without_a_reason_has_that_of_its_publication(write):
    assert write()[0].reason == ""
    assert write(publication='reason = "all"')[0].reason == "all"
    assert write(row='reason = "own"', publication='reason = "all"')[0].reason == "own"


@pytest.mark.parametrize(
    "line, said",
    [
        ("tensr = 2", r"\['tensr'\] must be fields of a row"),
        ("tensor = 3", "must multiply to gpus=8"),
        ('flops = "6N+12lhs"\nmemory = 1', r"\['memory'\] must be fields of a row"),
        ("fsdp = 3", "batch=8 must be a multiple of 6"),
    ],
)
def test_a_wrong_field_is_named_with_its_file_and_row(write, line, said):
    with pytest.raises(ValueError, match=rf"paper.toml, row 1: .*{said}"):
        write(row=line)


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ('kind = "dense"', 'kind = "sparse"', "kind='sparse' must be one of"),
        ('unit = "seconds"', 'unit = "hours"', "unit='hours' must be one of"),
        ('unit = "seconds"', 'unit = "TFLOP/s"', "flops='' must be one of"),
        ('model = "small"\n', "", "'model'"),
        ("width = 64", "widht = 64", "widht"),
    ],
)
def test_a_wrong_value_is_named_with_its_file_and_row(monkeypatch, write, right, wrong, said):
    monkeypatch.setitem(globals(), "FILE", FILE.replace(right, wrong))
    with pytest.raises(ValueError, match=rf"paper.toml, row 1: .*{said}"):
        write()


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


@pytest.mark.parametrize(
    "share, found", [(0.4, 0.5), (0.5, 0.5), (0.63, 0.63), (0.99, 0.99), (1.0, 0.99)]
)
def test_a_fit_finds_the_share_that_steps_were_made_with_from_a_half_to_the_peak(share, found):
    made = [
        dataclasses.replace(each.row, published=each.step.total, unit="seconds")
        for each in backtest.predict(DENSE[:3], share)
    ]
    assert backtest.fit(made) == found


def test_a_publication_that_is_off_by_one_factor_has_no_relative_error():
    same = [prediction(0.25) for _ in range(4)]
    assert backtest.relative_errors(same) == pytest.approx([0] * 4)


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


def test_one_measured_step_takes_the_level_of_its_model_out():
    found = [prediction(error) for error in (0.0, 0.25)] + [prediction(0.5, source="b")]
    assert backtest.errors_after_one_step(found) == pytest.approx([1 / 1.25 - 1, 0.25])


def test_a_pair_is_in_order_if_the_faster_row_is_predicted_to_be_the_faster():
    right = [prediction(0.0, mfu=0.4), prediction(0.0, mfu=0.5)]
    assert backtest.orders(backtest.pairs(right)) == [True]
    wrong = [prediction(-0.3, mfu=0.4), prediction(0.0, mfu=0.5)]
    assert backtest.orders(backtest.pairs(wrong)) == [False]


@pytest.mark.parametrize(
    "other",
    [
        prediction(0.0, mfu=0.52),  # within 5%
        prediction(0.0, mfu=0.4, source="b"),
        prediction(0.0, mfu=0.4, accelerator="a100-80"),
        prediction(0.0, mfu=0.4, seq_len=2048),
    ],
)
def test_rows_that_cannot_be_compared_are_no_pair(other):
    assert backtest.pairs([prediction(0.0), other]) == []


def test_a_pair_is_of_layouts_if_axes_or_chunks_differ_and_gpus_and_task_do_not():
    one, faster = prediction(0.0, mfu=0.4), prediction(0.0, mfu=0.5)

    def changed(**fields):
        plan = dataclasses.replace(faster.row.plan, **fields)
        return dataclasses.replace(faster, row=dataclasses.replace(faster.row, plan=plan))

    axes = dict(one.row.plan.axes)
    others = [
        changed(axes={**axes, "data": axes["data"] // 2, "tensor": 2 * axes["tensor"]}),
        changed(chunks=2),
    ]
    for other in others:
        assert backtest.of_layouts([(one, other)]) == [(one, other)]
    larger = dataclasses.replace(
        others[0],
        row=dataclasses.replace(
            others[0].row, cluster=dataclasses.replace(one.row.cluster, count=16)
        ),
    )
    others_in_more = [
        changed(**{**one_other, "chunks": 2})
        for one_other in ({"batch": 2 * one.row.plan.batch}, {"recompute": "selective"})
    ]
    for other in (faster, changed(microbatch=2), larger, *others_in_more):
        assert backtest.of_layouts([(one, other)]) == []


# The figures that are shipped.


def test_the_constant_that_is_shipped_is_the_one_that_fits_the_seen_half():
    assert program.fitted() == PRODUCTS_SHARE


def test_predictions_are_better_than_one_mfu_for_all_rows():
    found = program.halves()
    seen, unseen = ([each.row for each in found[half]] for half in ("seen", "unseen"))
    baseline = [abs(each.error) for each in backtest.same_mfu(unseen, seen)]
    assert backtest.summary(found["unseen"]).median_error < 0.7 * statistics.median(baseline)


def test_the_programs_page_has_the_median_error_of_the_unseen_half():
    error = backtest.summary(program.halves()["unseen"]).median_error
    text = " ".join((ROOT / "docs" / "training.md").read_text().split())
    assert f"median error is {error:.0%} on published steps that it was not fitted to" in text


def test_of_layouts_on_as_many_gpus_three_quarters_are_in_the_right_order():
    """Two thirds of BLOOM's are right, and none of Narayanan's, whose pairs compare ZeRO-3.
    Without these two nearly all are right.
    """
    pairs = backtest.of_layouts(backtest.pairs(program.halves()["all"]))
    by_source = collections.defaultdict(list)
    for pair, right in zip(pairs, backtest.orders(pairs), strict=True):
        by_source[pair[0].row.source].append(right)
    assert len(pairs) == 92 and sum(backtest.orders(pairs)) > 0.7 * len(pairs)
    assert by_source.pop("narayanan_2021") == [False] * 5
    assert 0.6 < statistics.mean(by_source.pop("bloom_2022")) < 0.7
    rest = list(itertools.chain(*by_source.values()))
    assert len(rest) == 30 and sum(rest) > 0.9 * len(rest)


def test_without_pairs_of_two_software_releases_the_rule_orders_more_pairs_than_the_formula():
    """As docs/backtest.md and notebook 12 say."""
    pairs = backtest.of_layouts(backtest.pairs(backtest.predict(DENSE)))
    releases = [pair for pair in pairs if pair[0].row.source == "dgxc_benchmarking"]
    assert len(releases) == 13
    assert all(a.row.where.split(",")[0] != b.row.where.split(",")[0] for a, b in releases)
    others = [pair for pair in pairs if pair not in releases]
    counts = len(others), sum(backtest.orders(others)), sum(backtest.orders_by_rule(others))
    assert counts == (79, 54, 58)
    close = [(a, b) for a, b in releases if {a.row.plan.chunks, b.row.plan.chunks} == {6, 12}]
    assert len(close) == 5
    for a, b in close:
        assert abs(a.step.mfu / b.step.mfu - 1) < 0.0005
        assert 0.05 < abs(a.row.mfu / b.row.mfu - 1) < 0.085


def test_tpus_are_faster_than_predicted_as_the_step_model_says():
    errors = [each.error for each in backtest.predict(ROWS) if each.row.kind == "tpu"]
    assert len(errors) == 8 and min(errors) > 0.22


def test_nemotron_slows_down_as_published():
    _, published, predicted = program.nemotron()
    assert published == pytest.approx(8.0 / 10.3)
    assert predicted == pytest.approx(published, rel=0.03)
    # The bubble alone gives less.
    stages, chunks = 12, 8
    bubble = (stages - 1) / chunks
    assert (36 + bubble) / (48 + bubble) < 7.95 / 10.35


def test_the_break_even_of_data_parallelism_is_that_of_the_scaling_book():
    inside, across = program.BOOK.values()
    # Inside of a host only without the factor (n-1)/n, which the book leaves out.
    assert program.break_even(1)[1] == pytest.approx(inside, rel=0.1)
    assert program.break_even(128)[0] == pytest.approx(across, rel=0.1)
    # By hand: 989 TFLOP/s over 450 GB/s, or over eight ports.
    assert program.break_even(1)[0] == pytest.approx(989e12 / 450e9 * 7 / 8)
    assert program.break_even(128)[0] == pytest.approx(989e12 / 400e9 * 127 / 128)


def test_the_reason_that_products_alone_take_nearly_all_of_the_time_is_true():
    alone = "alone would take 85% of the published time or more"
    found = [each for each in backtest.predict(ROWS) if alone in each.row.reason]
    assert len({each.row.source for each in found}) == 3
    for each in found:
        assert f"at {PRODUCTS_SHARE} of" in each.row.reason, each.row.where
        if abs(each.error) > 0.1:  # other rows of the publication need no reason
            assert each.step.parts["products"] >= 0.85 * each.row.seconds, each.row.where


def test_every_row_that_is_more_than_a_tenth_off_has_a_reason():
    silent = [
        (each.row.source, each.row.where)
        for each in backtest.predict(ROWS)
        if abs(each.error) > 0.1 and not each.row.reason
    ]
    assert silent == []


def test_the_page_has_the_figures_that_are_computed():
    text = (ROOT / program.PAGE).read_text()
    assert text == program.page(text), "run python -m benchmarks.backtest"


def test_the_page_names_every_row():
    text = (ROOT / program.PAGE).read_text().replace("\\|", "|")
    assert [each.where for each in ROWS if f"| {each.where} |" not in text] == []


def test_nothing_is_fitted_to_no_rows_and_one_row_has_no_rank():
    with pytest.raises(ValueError, match="rows must have at least one published step"):
        backtest.fit([])
    one = backtest.predict(DENSE[:1])
    with pytest.raises(ValueError, match="predictions must be at least two, not 1"):
        backtest.summary(one)


def test_the_page_must_have_a_place_for_every_table():
    text = (ROOT / program.PAGE).read_text()
    with pytest.raises(ValueError, match="the page must have one place for each of"):
        program.page(text.replace("<!-- goals -->", ""))


def test_the_picture_shows_the_rows_that_are_computed():
    with PIL.Image.open(ROOT / program.PICTURE) as picture:
        assert picture.text["Description"] == program.digest(), (
            "run python -m benchmarks.backtest"
        )


def test_every_dense_row_is_in_the_picture_in_one_of_its_groups():
    found = program.points()
    assert len(found) == len(DENSE)
    assert {stack for _, stack, _, _ in found} == set(program.STACKS)
    assert max(max(published, predicted) for *_, published, predicted in found) < 0.8


def test_docstrings_cite_the_figures_that_are_computed():
    found = program.halves()["all"]
    of, relative = backtest.summary(found), backtest.relative_errors(found)
    near = sum(abs(error) <= 0.1 for error in relative) / len(relative)
    text = " ".join(planner.price.__doc__.split())
    assert f"for {of.within_tenth:.0%} of {of.rows} published steps" in text
    assert f"published seconds on the accelerators of its publication, {near:.0%} are" in text
