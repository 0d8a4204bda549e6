"""Laws of the command `python -m course_lib.train`."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
import small_run
from small_run import STRICT, arguments, corpus

from course_lib import configs
from course_lib.lessons.by_processes import free_port
from course_lib.models import transformer
from course_lib.program import command, dry_run, journal, loop, processes, settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was(monkeypatch):
    """As if a user had started it: no launcher, 80 columns."""
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JOB_COMPLETION_INDEX")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    # so that it is taken back whatever comes
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")


def asked(*given):
    return command.configuration(command.arguments().parse_args(given))


def test_help_tells_every_option_every_preset_and_every_exit_code():
    text = command.arguments().format_help()
    options = "preset config set data run devices coordinator process processes dry-run target"
    for option in options.split():
        assert re.search(
            rf"^  --{option}\b.* {{2,}}\w|^  --{option}\b.*\n {{10,}}\w", text, re.M
        ), option
    # there are no others
    assert set(re.findall(r"^  --([a-z-]+)", text, re.M)) == set(options.split())
    assert all(name in text for name in configs.PRESETS)
    codes = text[text.index("exit codes:") :]
    for code in (
        0,
        command.FAILED,
        command.USAGE,
        command.DOES_NOT_FIT,
        command.EXIT_CODE_PREEMPTED,
        command.EXIT_CODE_NOT_FINITE,
    ):
        assert re.search(rf"(^|  ){code} \w", codes, re.M), code
    assert all(len(line) <= 128 for line in text.splitlines())
    assert all(field in text for field in settings.defaults().run)


def test_help_says_how_large_each_preset_is_and_it_is_true():
    text = re.sub(r"\s+", " ", command.arguments().format_help())
    for name in configs.PRESETS:
        stated, unit = re.search(
            rf"{name}: [^;]*?([\d.]+) (million|billion) parameters", text
        ).groups()
        model = configs.get(name)
        tokens = jax.ShapeDtypeStruct((1, model.data.seq_len), "int32")
        with jax.numpy_dtype_promotion("standard"):  # as Flax's LayerNorm needs
            found = transformer.num_params(
                transformer.abstract_params(transformer.Transformer(model.model), tokens)
            )
        assert f"{found / {'million': 1e6, 'billion': 1e9}[unit]:.1f}" == stated


def test_the_examples_of_help_can_be_given(tmp_path):
    joined = command.EPILOG.replace("\\\n", "")
    lines = re.findall(r"^  python -m course_lib\.train (.*)$", joined, re.M)
    assert len(lines) >= 4
    for line in lines:
        given = line.split()
        if "--config" in given:
            given[given.index("--config") + 1] = str(tmp_path / "config.json")
            (tmp_path / "config.json").write_text(
                json.dumps(settings.complete(configs.get("cpu")).to_dict())
            )
        settings.check(asked(*given))


def test_the_help_names_every_field_of_the_mesh_the_strategy_and_the_run():
    for part, fields in settings.defaults().items():
        for field in fields:
            assert re.search(rf"\b{field}\b", command.EPILOG), f"{part}.{field}"


def test_fields_are_set_in_order_over_a_preset_or_a_file(tmp_path):
    whole = asked(
        "--preset",
        "155m",
        "--set",
        "model.num_layers=6",
        "--set",
        "model.num_layers = 7",
        "--data",
        str(tmp_path),
    )
    assert (whole.model.num_layers, whole.model.hidden_size, whole.run.corpus) == (
        7,
        1024,
        str(tmp_path),
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole.to_dict()))
    assert asked("--config", str(path)) == whole
    assert asked("--config", str(path), "--set", "seed=3").seed == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--set", "model.num_layer=6"],
            "error: model.num_layer='6' is no field and would change nothing",
        ),
        (["--set", "model.num_layers"], "error: --set model.num_layers must be FIELD=VALUE"),
        (["--set", "model.num_heads=3"], "error: "),
        (["--config", "/no/such/file"], "error: --config /no/such/file cannot be read"),
        (["--devices", "0"], "error: --devices 0 must be at least 1"),
        (["--data", ""], "error: --data is empty, perhaps because a shell variable is not set"),
        (["--run", ""], "error: --run is empty"),
        (["--config", ""], "error: --config is empty"),
        (["--run", "\udcff"], "error: '\\udcff' has a name that is not UTF-8"),
        (["--dry-run", "--devices", "0"], "error: --devices 0 must be at least 1"),
        (
            ["--coordinator", "here:1"],
            "error: coordinator='here:1', process=None, processes=None must be given together",
        ),
        (["--dry-run", "--target", "abacus"], "error: --target abacus must be one of t4, "),
        (
            ["--preset", "80gb", "--dry-run", "--target", "t4"],
            "error: model.attention='xla' cannot run on NVIDIA T4: ",
        ),
        (
            ["--run", __file__, "--set", "data.batch_size=8"],
            f"error: folder={__file__!r} must be a folder, and",
        ),
        (["--run", f"{__file__}/run", "--set", "data.batch_size=8"], "error: folder="),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(given, message, capsys):
    assert command.main(given) == command.USAGE
    said = capsys.readouterr().err
    assert said.startswith(message) and said.count("\n") == 1


@pytest.mark.parametrize(
    "text", ['{"model": 3}', "3", "[]", "{", '{"model": {"num_layers": 3}}']
)
def test_a_file_that_is_no_configuration_is_one_line_and_exit_code_2(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert command.main(["--config", str(tmp_path / "config.json")]) == command.USAGE
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "given", ["--target h100", "--preset gpu", "--preset cpu --config x", "--steps 3"]
)
def test_arguments_that_do_not_go_together_are_refused(given, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(given.split())
    assert (
        error.value.code == command.USAGE
        and "usage: python -m course_lib.train" in capsys.readouterr().err
    )


def test_the_share_of_a_gpus_memory_is_set_before_jax_looks_for_devices(monkeypatch):
    order, share = [], "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(share, raising=False)

    def start(*_):
        assert os.environ[share] == str(dry_run.GPU_SHARE)  # what the dry run says is there
        order.append("devices")
        return contextlib.nullcontext()

    monkeypatch.setattr(command.processes, "start", start)
    monkeypatch.setattr(command, "_train", lambda *_: order.append("steps") or 0)
    assert command.main([]) == 0 and order == ["devices", "steps"]


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (loop.Ended(loop.DONE, 9), 0),
        (loop.Ended(loop.PREEMPTED, 9), 75),
        (loop.Ended(loop.NOT_FINITE, 9), 77),
        (loop.Refused("seq_len"), 2),
        (loop.CheckpointError("all damaged"), 1),
        (OSError("no space"), 1),
        # 2 would keep launchers from trying again
        (BlockingIOError("in use by another process"), 1),
    ],
)
def test_how_a_training_ends_is_its_exit_code(ended, code, monkeypatch, capsys):
    def stand_in(whole, folder):
        assert folder == "runs/cpu"
        if isinstance(ended, Exception):
            raise ended
        return ended

    monkeypatch.setattr(loop, "train", stand_in)
    assert command.main([]) == code
    said = capsys.readouterr().err
    assert str(ended) in said if isinstance(ended, Exception) else "9" in said


@pytest.mark.parametrize(
    "unforeseen", [ValueError("deep in a library"), RuntimeError("deep in a library")]
)
def test_an_error_that_is_not_the_configurations_keeps_its_traceback(unforeseen, monkeypatch):
    def stand_in(whole, folder):
        raise unforeseen

    monkeypatch.setattr(loop, "train", stand_in)
    # of which Python makes exit code 1
    with pytest.raises(type(unforeseen), match="deep in a library"):
        command.main([])


@pytest.mark.parametrize(
    ("fits", "refused", "code"), [(True, "", 0), (False, "", 3), (True, "batch_size", 2)]
)
def test_a_dry_run_that_does_not_fit_has_its_own_exit_code(
    fits, refused, code, monkeypatch, capsys
):
    class Found:
        def text(self):
            return "found"

    Found.fits, Found.refused = fits, refused
    monkeypatch.setattr(
        dry_run,
        "dry_run",
        lambda whole, target, count: Found() if (target, count) == ("h100", 64) else None,
    )
    assert command.main(["--dry-run", "--devices", "64"]) == code
    assert capsys.readouterr().out == "found\n"


@pytest.mark.slow
def test_the_program_trains_on_simulated_devices_ends_at_sigterm_and_goes_on(
    programs_kept, tmp_path
):
    text, run = corpus(tmp_path / "text"), tmp_path / "run"
    given = arguments(text, run, 2, "run.checkpoint_every=50")
    environment = (
        os.environ
        | programs_kept
        | {
            "PYTHONPATH": str(ROOT),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
    )
    words = [sys.executable, *STRICT, "-m", "course_lib.train", *given]
    metrics = run / "metrics.jsonl"
    endless = [*words, "--set", "training.steps=100000"]
    with subprocess.Popen(endless, env=environment, stderr=subprocess.PIPE, text=True) as first:
        late = threading.Timer(600, first.kill)
        late.start()
        while first.poll() is None and not (metrics.exists() and metrics.stat().st_size > 200):
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
        said = first.communicate()[1]
        late.cancel()
    assert first.returncode == command.EXIT_CODE_PREEMPTED, said
    step = int(re.search(r"ended by SIGTERM after step (\d+), with a checkpoint", said)[1])
    again = [*words, "--set", f"training.steps={step + 3}"]
    done = subprocess.run(again, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        f"goes on after step {step} of {step + 3}" in done.stderr
        and "2 x cpu" in (run / "times.jsonl").read_text()
    )
    steps = [line["step"] for line in journal.read(run) if "loss" in line]
    assert steps == list(range(1, step + 4))


class Commands:
    """Calls of the command, each in a process that is forked from one that has imported all:
    see small_run.py.
    """

    def __init__(self, server, folder):
        self.server, self.folder, self.text = server, folder, corpus(folder / "text")
        self.numbers = itertools.count()

    def start(self, run, *changes, devices=2, more=()):
        """Starts a small run, and returns its process number and where it writes to."""
        given = [*arguments(self.text, self.folder / run, devices, *changes), *more]
        self.folder.joinpath("logs").mkdir(exist_ok=True)
        log = self.folder / "logs" / str(next(self.numbers))
        return self._ask(dict(arguments=given, log=str(log))), log

    def pair(self, run, *changes, second=()):
        """Starts two processes of one run; the second may be told something else."""
        place = ["--coordinator", f"localhost:{free_port()}", "--processes", "2", "--process"]
        return [
            self.start(run, *changes, *second * number, more=[*place, str(number)])
            for number in range(2)
        ]

    def until(self, run, step, *processes):
        """Waits until a run has written the line of a step, and returns its last step."""
        last = time.monotonic() + 600
        while not (steps := [number for number, _ in self.losses(run)]) or steps[-1] < step:
            said = "".join(log.read_text() for _, log in processes if log.exists())
            assert time.monotonic() < last and not re.search(
                r"^[\w.]*error\b", said, re.I | re.M
            ), said
            time.sleep(0.02)
        return steps[-1]

    def log_with(self, words, *processes):
        """Waits until the first of some processes has said something, and returns all that it
        said.
        """
        last = time.monotonic() + 600
        while words not in (
            said := processes[0][1].read_text() if processes[0][1].exists() else ""
        ):
            assert time.monotonic() < last, said
            time.sleep(0.02)
        return said

    def losses(self, run):
        return journal.pairs(journal.read(self.folder / run), "loss")

    def code(self, process):
        """Waits for a process, and returns its exit code."""
        return self._ask(process[0])

    def _ask(self, what):
        """Asks the server, which is killed with all that it started if it does not answer: then
        there is no number to read.
        """
        late = threading.Timer(600, os.killpg, [self.server.pid, signal.SIGKILL])
        late.start()
        try:
            self.server.stdin.write(json.dumps(what) + "\n")
            self.server.stdin.flush()
            return int(self.server.stdout.readline())
        finally:
            late.cancel()


@pytest.fixture(scope="module")
def commands(programs_kept, tmp_path_factory):
    here = Path(small_run.__file__).parent
    environment = os.environ | programs_kept | {"PYTHONPATH": f"{ROOT}{os.pathsep}{here}"}
    with subprocess.Popen(
        [sys.executable, str(here / "small_run.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as server:
        try:
            yield Commands(server, tmp_path_factory.mktemp("commands"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_processes_that_are_told_different_things_end_at_once_and_say_which(commands):
    both = commands.pair(
        "unlike", "training.steps=3", second=["seed=7", "run.validate_every=2"]
    )
    assert [commands.code(each) for each in both] == [command.USAGE] * 2, both[0][1].read_text()
    for _, log in both:
        said = (
            "run.validate_every: 250 in process 0, 2 in process 1; seed: 42 in process 0, 7 in"
            " process 1"
        )
        # of any thread, at any time
        lines = [line for line in log.read_text().splitlines() if not line.startswith("[Gloo]")]
        assert lines[-1] == f"error: all processes must have the same configuration: {said}"
    assert not (commands.folder / "unlike" / "metrics.jsonl").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_ctrl_c_writes_a_checkpoint_and_has_its_own_exit_code(commands):
    one = commands.start("interrupted", "training.steps=100000", devices=1)
    commands.until("interrupted", 3, one)
    os.kill(one[0], signal.SIGINT)
    assert commands.code(one) == command.EXIT_CODE_INTERRUPTED, one[1].read_text()
    step = int(
        re.search(r"ended by Ctrl-C after step (\d+), with a checkpoint", one[1].read_text())[1]
    )
    assert (commands.folder / "interrupted" / "checkpoints" / f"{step:08d}").is_dir()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_sigterm_before_the_first_step_ends_the_program_at_once(commands):
    one = commands.start("early", "model.num_layers=9", devices=1)  # nobody has compiled that
    commands.log_with("begins, ", one)
    os.kill(one[0], signal.SIGTERM)
    assert commands.code(one) == -signal.SIGTERM
    assert not (commands.folder / "early" / "checkpoints").exists() and not commands.losses(
        "early"
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_two_processes_of_which_one_is_killed_and_then_one_is_told_to_end_lose_nothing(
    commands,
):
    changes = ["mesh.tensor=2", "strategy.zero=1"]
    endless = [*changes, "run.checkpoint_every=3", "training.steps=100000"]
    both = commands.pair("two", *endless)
    commands.until("two", 7, *both)
    os.kill(both[1][0], signal.SIGKILL)
    killed = time.monotonic()
    code = commands.code(both[0])
    jaxs = -signal.SIGABRT if jax.__version_info__ >= (0, 8) else 1
    # JAX's heartbeat may be faster than a broken connection
    assert code in (command.FAILED, jaxs), both[0][1].read_text()
    assert time.monotonic() - killed < processes.HEARTBEAT + 30  # the machine may be busy
    assert commands.code(both[1]) == -signal.SIGKILL
    assert (
        "another process ended first" in (said := both[0][1].read_text())
        or "another task died" in said  # JAX's words
    )

    both = commands.pair("two", *endless)
    went_on = int(
        re.search(r"goes on after step (\d+)", commands.log_with("goes on after", *both))[1]
    )
    commands.until("two", went_on + 4, *both)
    os.kill(both[1][0], signal.SIGTERM)
    assert [commands.code(each) for each in both] == [command.EXIT_CODE_PREEMPTED] * 2, both[0][
        1
    ].read_text()
    steps = int(
        re.search(
            r"ended by SIGTERM after step (\d+), with a checkpoint", both[0][1].read_text()
        )[1]
    )

    alone = commands.start("one", *changes, f"training.steps={steps}", devices=4)
    assert commands.code(alone) == 0, alone[1].read_text()
    found, expected = commands.losses("two"), commands.losses("one")
    assert (
        [step for step, _ in found]
        == [step for step, _ in expected]
        == list(range(1, steps + 1))
    )
    for (_, loss), (_, other) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other, rel=1e-4)  # sums over processes have another order


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_two_processes_train_as_one_does_and_one_goes_on_with_what_they_saved(commands):
    changes = [
        "run.validate_every=3",
        "run.validation_batches=2",
        "run.sample_tokens=3",
        "mesh.tensor=2",
        "strategy.zero=1",
    ]

    def done(process):
        assert commands.code(process) == 0, process[1].read_text()
        return process[1].read_text()

    first, second = [
        done(process) for process in commands.pair("both", *changes, "training.steps=5")
    ]
    assert "done after 5 steps" in first and "done" not in second  # one of them speaks
    assert "4 x cpu" in (commands.folder / "both" / "times.jsonl").read_text()
    assert "goes on after step 5 of 8" in done(
        commands.start("both", *changes, "training.steps=8", devices=4)
    )
    done(commands.start("single", *changes, "training.steps=8", devices=4))
    found, expected = (journal.read(commands.folder / name) for name in ("both", "single"))
    # Where the first run ended it validated, too.
    assert [line["step"] for line in found if line["step"] != 5 or "loss" in line] == [
        line["step"] for line in expected
    ]
    for name in ("loss", "validation_loss"):
        losses = dict(journal.pairs(found, name))
        for step, loss in journal.pairs(expected, name):
            # of sums over processes the order is another
            assert losses[step] == pytest.approx(loss, rel=1e-5)
