"""`submit`: checks a step, compiles it, and shows its place among the submissions."""

import secrets
import sys
from collections.abc import Sequence
from typing import Any

from course_lib.lessons.check.answers import WrongAnswer, in_one_line, require
from course_lib.lessons.game import hints, positions, score, scoreboard, setups, small, updates
from course_lib.lessons.game.score import Score
from course_lib.measure import MIB, gib, hardware, virtual
from course_lib.measure.units import GIB
from course_lib.show import figures, notebook
from course_lib.smaller_and_faster import offload

MOST_DRAWN = 12


def submit(
    make_step: Any,
    gpu: str = "a5000",
    name: str = "",
    optimizer: str = "adamw",
    moments: str = "device",
) -> None:
    """Checks and scores a training step of the game. Prints; never raises.

    First it compares the updates on a small model of new random numbers, then on one of the
    real length. Then it compiles the step of `game.REAL` for a GPU that need not be there, and
    prints its costs beside the targets and the earlier submissions, and a hint.

    Args:
      make_step: `make_step(config) -> step`, where `step(state, batch) -> (state, loss)`. The
        state is `(params, config.optimizer.init(params))` with `game.init`'s parameters; the
        batch is int32 tokens [batch_size length+1]. Begin with `game.first_step`.
      gpu: the name of a GPU in `hardware`.
      name: of the submission in the table; the function's if it is empty.
      optimizer: the name of `config.optimizer`, one of `setups.OPTIMIZERS`.
      moments: the memory that the optimizer's moments are in between steps, "device" or "host".
    """
    try:
        gpus = [one for one in hardware.names() if hardware.get(one).platform == "gpu"]
        require(gpu in gpus, f"gpu={gpu!r} must be one of {', '.join(gpus)}.")
        setup = setups.read(optimizer, moments)
        if moments == "host" and (reason := offload.why_unavailable()):
            print(f"Moments on the host cannot be checked here: {reason}.")
            return
        small.draw(secrets.randbits(31))
        right = updates.check(make_step, setup)
        if optimizer == "adamw":
            print(f"✓ The updates equal the first step's: they {right}")
        else:
            print(
                f"✓ The updates are those of {optimizer}. The gradient equals the first"
                f" step's: the two {right}"
            )
        if reason := virtual.why_unavailable(gpu):
            print(
                f"There is no score, because here {reason}. Where virtual GPUs work, submit"
                " compiles the real step as well."
            )
            return
        positions.check(make_step, setup)
        named = str(name or getattr(make_step, "__name__", type(make_step).__name__))
        submission, program = score.compile_step(make_step, gpu, named, setup)
        of_this_gpu = [one for one in scoreboard.add(submission) if one.gpu == gpu]
        table(of_this_gpu, gpu)
        if program.recomputed:
            print(f"In addition, {program.recomputed}.")
        print(f"Hint: {hints.hint(submission, program, of_this_gpu[:-1])}")
        _show(picture(of_this_gpu, gpu))
    except WrongAnswer as wrong:
        print(f"✗ {' '.join(str(wrong).split())}")
    except Exception as error:
        print(f"✗ The game could not read your step: {in_one_line(error)}")


def table(submissions: Sequence[Score], gpu: str) -> None:
    """Prints submissions for one GPU, numbered, below the targets."""
    targets: list[dict[str, Any]] = [
        {"name": "target: small", "peak GiB": score.SMALL_PEAK / GIB},
        {"name": "target: fast", "attainable ms": 1e3 * score.fast_seconds(gpu)},
    ]
    targets += [
        {
            "name": f"target {level.notebook}: {level.name}",
            "peak GiB": level.peak / GIB,
            "attainable ms": 1e3 * level.seconds(gpu),
        }
        for level in score.open_levels(submissions)
    ]
    rows = [
        {
            "#": number,
            "name": one.name,
            "peak GiB": one.peak / GIB,
            "fits": "yes" if one.fits else "no",
            "attainable ms": 1e3 * one.seconds,
            "your extra FLOPs %": 100 * one.extra_flops,
            "host MiB per step": one.host_bytes / MIB,
            "optimizer": _optimizer(one),
        }
        for number, one in enumerate(submissions, 1)
    ]
    if all(row["optimizer"] == "adamw" for row in rows):
        rows = [{key: row[key] for key in row if key != "optimizer"} for row in rows]
    empty = dict.fromkeys(rows[0])
    memory = gib(score.limit(gpu))
    notebook.table(
        [*({**empty, **target} for target in targets), *rows],
        title=f"One step on an {hardware.get(gpu).title}, which fits in {memory}:",
        formats={"peak GiB": ".1f", "attainable ms": ".0f", "your extra FLOPs %": ".0f"},
    )


def picture(submissions: Sequence[Score], gpu: str) -> Any:
    """Returns the picture of the last submissions for one GPU."""
    last = submissions[-MOST_DRAWN:]
    level = score.next_level(submissions)
    return figures.progress(
        [{"name": one.name, "seconds": one.seconds, "peak": one.peak} for one in last],
        first=len(submissions) - len(last) + 1,
        limit=score.limit(gpu),
        small=score.SMALL_PEAK,
        fast=score.fast_seconds(gpu),
        next_target=(level.seconds(gpu), level.peak) if level else None,
        title=f"One training step on an {hardware.get(gpu).title}",
    )


def _optimizer(one: Score) -> str:
    return one.optimizer if one.moments == "device" else f"{one.optimizer}, on the host"


def _show(figure: Any) -> None:
    """Displays a picture, in a notebook only."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        from IPython.display import display

        display(figure)
