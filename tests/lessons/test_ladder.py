"""The ladder of notebook 19: each rung changes one field, and the records reach the goals."""

import jax
import PIL.Image
import pytest
import record

from course_lib import training
from course_lib.lessons import ladder
from course_lib.measure import virtual

MOST = {  # GB, the goals of notebook 19
    "64 minibatches": 2.60,
    "moments on the host": 1.60,
    "bfloat16 parameters": 1.20,
    "products once, 16 minibatches": 3.10,
    "products once, 4 minibatches": 5.50,
}


def test_each_rung_but_the_first_changes_one_field_of_the_rung_that_it_stands_on():
    first, *others = ladder.RUNGS
    assert not first.on
    for rung in others:
        [(field, value)] = rung.changes.items()
        part, name = field.split(".")
        before, after = (ladder.config_of(each)[part][name] for each in (rung.on, rung.name))
        assert before != value == after, rung.name


def test_the_table_has_every_rung_in_order():
    assert [row["case"] for row in ladder.table().rows] == list(ladder.BY_NAME)


def test_the_recorded_rungs_reach_the_goals_of_the_notebook():
    found = {row["case"]: row["bytes"] for row in ladder.table().rows}
    assert [name for name, most in MOST.items() if found[name] > most * 1e9] == []


def test_the_picture_is_that_of_the_recorded_rows():
    picture = record.PICTURES["ladder"]
    with PIL.Image.open(record.DOCS / picture.name) as stored:
        assert stored.text["Description"] == picture.digest(), "make ladder"


@pytest.mark.slow
@pytest.mark.skipif(virtual.why_unavailable() is not None, reason="needs virtual GPUs")
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the records are of the reference, JAX 0.12"
)
@pytest.mark.parametrize("name", ladder.BY_NAME)
def test_a_rung_compiles_to_its_record(name):
    [recorded] = [row for row in ladder.table().rows if row["case"] == name]
    compiled = ladder.compile_rung(name)
    assert compiled["bytes"] == pytest.approx(recorded["bytes"], rel=0.01)
    assert compiled["seconds"] == pytest.approx(recorded["seconds"], rel=0.01)
    assert compiled["bytes_each_way"] == recorded["bytes_each_way"]


@pytest.mark.parametrize(
    ("rung", "written_out", "by_kernels"),
    [("unrolled", 2 + 4, 2 + 7), ("products once, 4 minibatches", 2 + 4 + 2, 2 + 7 + 2)],
)
def test_flash_attention_leaves_out_masked_tiles_and_takes_the_products_of_its_kernels(
    rung, written_out, by_kernels
):
    config = ladder.config_of(rung)
    with jax.numpy_dtype_promotion("standard"):  # as Flax's LayerNorm needs it
        all_scores = sum(training.step_flops(config).total.values())
        flops = ladder.flops_of(config)["bfloat16"]
    score_product = 2 * 64 * 512 * 512 * 1024 * 12
    # 8 tiles of 64 positions: 36 of 64 pairs of tiles are not masked entirely
    assert all_scores - flops == (written_out - by_kernels * 36 / 64) * score_product


def test_where_dense_products_are_kept_the_two_of_attention_are_recomputed():
    config = ladder.config_of("products once, 16 minibatches")
    with jax.numpy_dtype_promotion("standard"):
        recomputed = sum(training.step_flops(config).recomputed.values())
    assert recomputed == 2 * (2 * 64 * 512 * 512 * 1024 * 12)


def test_a_live_row_of_no_case_is_refused():
    with pytest.raises(ValueError, match="live=.*65 minibatches.* must be among"):
        ladder.table(live=("65 minibatches",))
