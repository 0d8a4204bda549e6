"""Trains a language model: python -m course_lib.train --preset cpu

A run is a folder with its configuration, metrics, checkpoints, samples and a report. The same
command resumes a run, whatever stopped it.
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from course_lib import configs
from course_lib.many_devices import meshes
from course_lib.measure import hardware
from course_lib.program import dry_run, loop, processes, settings
from course_lib.program.checkpoints import CheckpointError

FAILED, USAGE, DOES_NOT_FIT = 1, 2, 3
EXIT_CODE_PREEMPTED, EXIT_CODE_NOT_FINITE, EXIT_CODE_INTERRUPTED = 75, 77, 130

EPILOG = f"""\
examples:
  python -m course_lib.train --preset cpu
  python -m course_lib.train --data ~/books --run runs/books \\
      --set training.steps=500 --set optimizer.total_steps=500
  python -m course_lib.train --config runs/books/config.json --run runs/books-2
  python -m course_lib.train --preset cpu --run runs/cpu-4 --devices 4 \\
      --set mesh.tensor=2 --set strategy.zero=1
  python -m course_lib.train --preset 80gb --set training.num_minibatches=1 \\
      --dry-run --target h100 --devices 64

fields of --set:
  model, optimizer, data, training, seed: see course_lib/configs.py; a run's config.json has all
    of them with their values
  run.*: corpus, log_every, validate_every, checkpoint_every, sample_every (steps),
    sample_tokens, validation_batches (0: all, up to 262,144 tokens), keep (checkpoints),
    non_finite (stop, or skip updates that are not finite), skips_in_a_row (this many skipped
    updates in a row end the run)
  mesh.*: data (0: all devices), pipe, expert, context, tensor
  strategy.*: by, zero, gather_again, sequence, overlap, schedule, microbatches, chunks
    (course_lib/many_devices/options.py)
  When a run goes on, these fields may differ: training.steps, training.donate, and run.* except
    validation_batches. The text must be the same, but may lie in another folder. non_finite may
    change only from stop to skip. These may differ, too, but change the rounding: mesh.*,
    strategy.* (chunks may not; with several chunks, mesh.pipe may not), model.remat*,
    model.loss_*, model.attention, model.flat_products, training.accumulation, training.backward

a run that was stopped and continues gives the same numbers, bit for bit:
  on CPUs with the same number of cores (XLA splits sums by threads) and the same JAX; on GPUs
  of the same kind with XLA_FLAGS=--xla_gpu_deterministic_ops=true in the environment of every
  start. The flag makes steps slower: additions have an order, and XLA does not time kernels
  to choose the fastest. With another JAX or on other devices, numbers are rounded differently,
  and the run says so

to make steps on a CPU faster (1.15 to 1.28 times in docs/benchmarks.md):
  set MALLOC_TRIM_THRESHOLD_=-1 MALLOC_MMAP_MAX_=0 MALLOC_ARENA_MAX=1 in the environment: glibc
  then keeps the memory of a step for the next one, instead of returning it to the system

exit codes:
    0 done
  {FAILED:3} an error, here or in another process, or no checkpoint can be read or written
  {USAGE:3} the arguments or the configuration cannot work
  {DOES_NOT_FIT:3} a dry run whose step does not fit
  {EXIT_CODE_PREEMPTED:3} ended by SIGTERM, after a checkpoint: start it again
  {EXIT_CODE_NOT_FINITE:3} loss or train state not finite, or too many updates skipped
  {EXIT_CODE_INTERRUPTED:3} ended by Ctrl-C, after a checkpoint; a second one ends at once;
      before the first step SIGTERM and Ctrl-C end at once
"""


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.train",
        usage=(
            "%(prog)s [--preset NAME | --config FILE] [--set FIELD=VALUE ...] [--data DIR]"
            " [--run FOLDER] [...]"
        ),
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trained = parser.add_argument_group("configuration")
    # The sizes come from the docstrings: counting would take a second at each start.
    size = " parameters"
    presets = "; ".join(
        f"{name}: {make.__doc__.partition(size)[0]}{size}"
        for name, make in configs.PRESETS.items()
    )
    add = trained.add_mutually_exclusive_group().add_argument
    add(
        "--preset",
        choices=configs.PRESETS,
        default="cpu",
        help=f"the configuration (default: cpu). {presets}",
    )
    add(
        "--config",
        metavar="FILE",
        help="a JSON file in place of a preset, such as a run's config.json",
    )
    add = trained.add_argument
    add(
        "--set",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="changes a field; may be repeated",
    )
    add(
        "--data",
        metavar="DIR",
        help="a folder of UTF-8 text, at least two files; a tenth of them is for validation"
        " (default: the course's corpus); sets run.corpus",
    )
    add = parser.add_argument_group("where").add_argument
    add(
        "--run",
        metavar="FOLDER",
        help="the run's folder, which all processes see (default: runs/PRESET; with --config"
        " X.json, runs/X)",
    )
    add(
        "--devices",
        metavar="N",
        type=int,
        help="simulates N devices on this CPU; in a dry run, N devices of the target",
    )
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="the address of process 0, if no launcher sets it (docs/cluster)",
    )
    add("--process", metavar="P", type=int, help="the number of this process, from 0")
    add("--processes", metavar="N", type=int, help="the number of processes")
    add = parser.add_argument_group("dry run").add_argument
    add(
        "--dry-run",
        action="store_true",
        help="only compiles, also for devices that are not there; prints memory, FLOPs,"
        " communication and estimated time per step",
    )
    add("--target", metavar="NAME", help=f"default: h100. One of {', '.join(hardware.names())}")
    return parser


def configuration(options: argparse.Namespace) -> ConfigDict:
    """Returns the configuration of a command line. `loop.train` and `dry_run.dry_run` check it.

    Raises:
      ValueError: if a field does not exist, a value is not of its type, or a file cannot be
        read.
    """
    for option in ("config", "data", "run"):
        if getattr(options, option) == "":
            raise ValueError(
                f"--{option} is empty, perhaps because a shell variable is not set: leave it"
                " out, or give it a value"
            )
    if options.config:
        try:
            config = settings.complete(json.loads(pathlib.Path(options.config).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"--config {options.config} cannot be read: {error}") from None
    else:
        config = settings.complete(configs.get(options.preset))
    for change in options.set:
        field, equals, text = change.partition("=")
        if not equals:
            raise ValueError(
                f"--set {change} must be FIELD=VALUE, as in --set model.num_layers=6"
            )
        settings.set_field(config, field.strip(), text.strip())
    if options.data:
        folder = str(pathlib.Path(options.data).expanduser().absolute())
        config.run.corpus = "shipped" if options.data == "shipped" else folder
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = arguments()
    options = parser.parse_args(argv)
    if options.target and not options.dry_run:
        parser.error(
            "--target needs --dry-run: a training run uses the devices of this machine"
        )
    with contextlib.ExitStack() as stack:
        try:
            config = configuration(options)
            count = 1 if options.devices is None else options.devices
            if count < 1:
                raise ValueError(f"--devices {count} must be at least 1")
            if options.target not in (None, *hardware.names()):
                raise ValueError(
                    f"--target {options.target} must be one of {', '.join(hardware.names())}"
                )
            if options.dry_run:
                result = dry_run.dry_run(config, options.target or "h100", count)
                print(result.text())
                return USAGE if result.refused else 0 if result.fits else DOES_NOT_FIT
            if options.devices:
                jax.config.update("jax_platforms", "cpu")
                meshes.simulate(options.devices)
            os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(dry_run.GPU_SHARE))
            stack.enter_context(
                processes.start(options.coordinator, options.process, options.processes)
            )
        except (ValueError, RuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise
            return _error(error, USAGE)
        name = pathlib.Path(options.config).stem if options.config else options.preset
        return _train(config, options.run or f"runs/{name}")


def _train(config: ConfigDict, folder: str) -> int:
    """Trains and returns the exit code. Expected errors become exit codes. With several
    processes, every error except a refusal ends all of them (`processes.start`).
    """
    try:
        ended = loop.train(config, folder)
    except loop.Refused as error:  # all processes raise it
        return _error(error, USAGE)
    except (CheckpointError, OSError) as error:
        if jax.process_count() > 1:
            raise
        return _error(error, FAILED)
    after = f"after step {ended.step}"
    again = "the same command goes on from the last checkpoint"
    if ended.reason == loop.PREEMPTED:
        _say(f"ended by SIGTERM {after}, with a checkpoint: {again}")
        return EXIT_CODE_PREEMPTED
    if ended.reason == loop.INTERRUPTED:
        _say(f"ended by Ctrl-C {after}, with a checkpoint: {again}")
        return EXIT_CODE_INTERRUPTED
    if ended.reason == loop.NOT_FINITE:
        if not any((pathlib.Path(folder) / "checkpoints").glob("0*")):
            again = "the same command starts from step 0, as there is no checkpoint yet"
        _say(
            f"stopped {after}: not finite. {again.capitalize()}, and ends in the same way"
            " unless you change something: --set run.non_finite=skip skips such updates, and"
            " --set run.skips_in_a_row=N allows more of them"
        )
        return EXIT_CODE_NOT_FINITE
    # A run without a line of metrics has no report.
    report = pathlib.Path(folder) / "report.md"
    _say(f"done after {ended.step} steps" + f": see {report}" * report.exists())
    return 0


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def _error(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code
