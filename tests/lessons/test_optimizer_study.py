"""Laws of the study of optimizers, on a few steps."""

import math

import jax
import pytest

from course_lib.lessons import optimizer_study


@pytest.fixture(autouse=True)
def promotion_as_flax_and_optax_need_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_the_record_holds_every_case_with_three_seeds_and_a_best_rate_inside_its_grid():
    record = optimizer_study.recorded()
    assert [row["case"] for row in record["rows"]] == [
        case.name for case in optimizer_study.CASES
    ]
    for row in record["rows"]:
        assert len(row["runs"]) == len(optimizer_study.SEEDS)
        losses = list(row["grid"].values())
        assert min(losses) == row["runs"][0]["validation"]
        assert min(losses) not in (losses[0], losses[-1]), f"{row['case']}: best at the edge"
        for run in row["runs"]:
            assert len(run["curve"]) == record["steps"] // optimizer_study.EVERY


def test_a_case_learns_and_its_rate_is_an_argument_of_one_compiled_step(monkeypatch):
    few = optimizer_study._validation()[:1]
    monkeypatch.setattr(optimizer_study, "_validation", lambda: few)
    case = optimizer_study.CASES[0]
    slow, fast = (optimizer_study.train(case, rate, steps=40) for rate in (1e-5, 1e-2))
    uniform = math.log(2048)
    assert fast["validation"] < slow["validation"] and fast["validation"] < uniform
