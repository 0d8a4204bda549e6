"""A training run that is over in a second or two, for the tests of the program.

Run as a program, it forks a process for each line that it reads: JAX starts in the fork, but
nothing is imported anew. `python small_run.py FOLDER CORPUS` trains the run of that folder with
the number of steps that the line says, and says what became of it. `python small_run.py` calls
the command `course_lib.train` with the arguments that the line holds, in JSON, its output in a
file; for a line with a process's number it waits for that one, and says its exit code.
"""

import contextlib
import dataclasses
import json
import os
import runpy
import signal
import sys

from course_lib import configs
from course_lib.program import settings

# A program that is killed while it keeps a compiled one leaves a part of it: the next one says
# so, and compiles it itself.
STRICT = ["-W", "error", "-W", "ignore:Error reading persistent compilation cache entry"]
# Colab's matplotlib calls what its pyparsing deprecates.
for _module in ("matplotlib._fontconfig_pattern", "matplotlib._mathtext", "pyparsing.util"):
    STRICT += ["-W", f"ignore::DeprecationWarning:{_module}"]


def corpus(folder):
    """Writes a corpus of a few thousand tokens into a folder, and returns its name."""
    folder.mkdir(parents=True)
    for number in range(12):
        lines = (
            f"def add_{number}_{line}(a, b):\n    return a + {line} * b - {number * line}\n"
            for line in range(40)
        )
        (folder / f"{number:02d}.py").write_text("".join(lines))
    return str(folder)


def configuration(corpus, **changes):
    """Returns a configuration whose numbers all count: Adam, dropout, a schedule, lines that
    lie across checkpoints.
    """
    whole = settings.complete(configs.get("cpu"))
    whole.model.update(
        num_layers=1, hidden_size=16, head_dim=4, num_heads=4, max_seq_len=16, dropout_rate=0.1
    )
    whole.optimizer.update(schedule="warmup_exponential", warmup_steps=10, learning_rate=1e-2)
    whole.data.update(batch_size=4, seq_len=16)
    whole.run.update(
        corpus=corpus,
        log_every=7,
        validate_every=20,
        checkpoint_every=10,
        sample_every=20,
        sample_tokens=5,
    )
    whole.run.update(validation_batches=2)
    whole.training.steps = 40
    for field, value in changes.items():
        part, name = field.split("__")
        whole[part][name] = value
    settings.check(whole)
    return whole


def one_device():
    import jax

    return jax.devices("cpu")[:1]


def train(corpus, folder, devices=None, **changes):
    from course_lib.program import loop

    return loop.train(configuration(corpus, **changes), folder, devices or one_device())


def final_state(corpus, folder, **changes):
    """Restores the newest checkpoint of a run on one device."""
    from course_lib.program import checkpoints, loop

    run, _ = loop.build(configuration(corpus, **changes), one_device())
    with contextlib.closing(checkpoints.Checkpoints(folder / "checkpoints")) as found:
        return found.restore(run.abstract()[0])


def is_key(leaf):
    import jax

    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def steps_end_with(monkeypatch, change):
    """Has `change` make something else of the state and the metrics that a step returns."""
    from course_lib.program import loop

    build = loop.build

    def built(*given):
        run, place = build(*given)

        def step(*given):
            return change(*run.train_step(*given))

        return dataclasses.replace(run, train_step=step), place

    monkeypatch.setattr(loop, "build", built)


def losses(folder, ends):
    """Returns the mean training losses up to each of some steps, of lines that may be of fewer
    steps each.
    """
    from course_lib.program import journal

    means, total, before = [], 0.0, 0
    for step, loss in journal.pairs(journal.read(folder), "loss"):
        total, before = total + loss * (step - before), step
        if step in ends:
            means.append(total / (step - max((end for end in ends if end < step), default=0)))
            total = 0.0
    return means


def assert_same_losses(folder, other):
    """Compares losses of programs that round in another order and may have ended in between."""
    import numpy as np

    from course_lib.program import journal

    expected = journal.read(other)
    ends = [step for step, _ in journal.pairs(expected, "loss")]
    # Adam divides what rounding has changed
    np.testing.assert_allclose(losses(folder, ends), losses(other, ends), rtol=1e-4)
    found, expected = (
        dict(journal.pairs(lines, "validation_loss"))
        for lines in (journal.read(folder), expected)
    )
    assert expected and found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4)


def arguments(corpus, run, devices, *changes):
    """Returns what the command `course_lib.train` is told for a run that is smaller still;
    changes are for --set.
    """
    sizes = ("num_layers=1", "hidden_size=8", "head_dim=4", "num_heads=2", "max_seq_len=8")
    small = [
        *(f"model.{size}" for size in sizes),
        "data.seq_len=8",
        "run.log_every=1",
        "run.sample_tokens=0",
    ]
    small += ["optimizer.schedule=constant", "run.validation_batches=1", *changes]
    given = [word for each in small for word in ("--set", each)]
    return ["--data", corpus, "--run", str(run), "--devices", str(devices), *given]


def serve(folder, corpus):
    """Trains in a fork for each line of the input, and says which process it is, and what
    became of it.
    """
    import jax

    from course_lib.program import loop

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            print(os.getpid(), flush=True)
            ended = loop.train(configuration(corpus, training__steps=int(line)), folder)
            os._exit(0 if ended.reason == loop.DONE else 75)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def serve_commands():
    """Calls the command in a fork for each line of the input."""
    import jax

    from course_lib.program import dry_run, loop  # noqa: F401  all that the command imports

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
            continue
        child = os.fork()
        if not child:
            log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.argv[1:] = asked["arguments"]
            runpy.run_module("course_lib.train", run_name="__main__")
        print(child, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:]) if sys.argv[1:] else serve_commands()
