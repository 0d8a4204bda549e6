"""A training run that is over in a second or two, for the tests of the program."""

import contextlib
import dataclasses
import json
import resource

import jax
import numpy as np

from course_lib import configs
from course_lib.program import checkpoints, journal, loop, settings

# A program that is killed while it keeps a compiled one leaves a part of it: the next one says
# so, and compiles it itself.
STRICT = ["-W", "error", "-W", "ignore:Error reading persistent compilation cache entry"]
# Colab's matplotlib calls what its pyparsing deprecates.
for _module in ("matplotlib._fontconfig_pattern", "matplotlib._mathtext", "pyparsing.util"):
    STRICT += ["-W", f"ignore::DeprecationWarning:{_module}"]
# This run writes a line after each step; it is smaller still.
SMALLEST = (
    "model.num_layers=1 model.hidden_size=8 model.head_dim=4 model.num_heads=2"
    " model.max_seq_len=8 data.seq_len=8 run.log_every=1 run.sample_tokens=0"
    " run.validation_batches=1 optimizer.schedule=constant"
)


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
    whole.run.update(corpus=corpus, log_every=7, validate_every=20, checkpoint_every=10)
    whole.run.update(sample_every=20, sample_tokens=5, validation_batches=2)
    whole.training.steps = 40
    for field, value in changes.items():
        part, name = field.split("__")
        whole[part][name] = value
    settings.check(whole)
    return whole


def arguments(corpus, run, devices, *changes):
    """Returns what the command `course_lib.train` is told for the smallest run."""
    given = [word for each in (*SMALLEST.split(), *changes) for word in ("--set", each)]
    return ["--data", corpus, "--run", str(run), "--devices", str(devices), *given]


def one_device():
    return jax.devices("cpu")[:1]


def train(corpus, folder, devices=None, **changes):
    return loop.train(configuration(corpus, **changes), folder, devices or one_device())


def stored_configuration(folder):
    return settings.complete(json.loads((folder / "config.json").read_text()))


def final_state(folder, builder=None):
    """Restores the newest checkpoint of a run on one device."""
    run, _ = (builder or loop.build)(stored_configuration(folder), one_device())
    with contextlib.closing(checkpoints.Checkpoints(folder / "checkpoints")) as found:
        return found.restore(run.abstract()[0])


def numbers(leaf):
    """Returns an array, or the numbers of a random key, in NumPy."""
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same_run(folder, other, written=("metrics.jsonl", "samples.jsonl"), builder=None):
    """Compares files and the last checkpoint of two runs bit for bit."""
    for name in written:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    first, second = (final_state(each, builder) for each in (folder, other))
    if written:
        assert first.data_state == second.data_state and first.loss == second.loss
    assert first.step == second.step
    for a, b in zip(*map(jax.tree.leaves, (first.state, second.state)), strict=True):
        np.testing.assert_array_equal(numbers(a), numbers(b))


def losses(folder, ends):
    """Returns the mean training losses up to each of some steps, of lines that may be of fewer
    steps each.
    """
    means, total, before = [], 0.0, 0
    for step, loss in journal.pairs(journal.read(folder), "loss"):
        total, before = total + loss * (step - before), step
        if step in ends:
            means.append(total / (step - max((end for end in ends if end < step), default=0)))
            total = 0.0
    return means


def assert_same_losses(folder, other, rtol=1e-4):
    """Compares losses of programs that round in another order and may have ended in between."""
    expected = journal.read(other)
    ends = [step for step, _ in journal.pairs(expected, "loss")]
    # Adam divides what rounding has changed
    np.testing.assert_allclose(losses(folder, ends), losses(other, ends), rtol=rtol)
    found, expected = (
        dict(journal.pairs(lines, "validation_loss"))
        for lines in (journal.read(folder), expected)
    )
    assert expected and found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=rtol)


def steps_end_with(monkeypatch, change):
    """Has `change` make something else of the state and the metrics that a step returns."""
    build = loop.build

    def built(*given):
        run, place = build(*given)

        def step(*given):
            return change(*run.train_step(*given))

        return dataclasses.replace(run, train_step=step), place

    monkeypatch.setattr(loop, "build", built)


@contextlib.contextmanager
def full_disk(size=1):
    """No file can become longer than so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
