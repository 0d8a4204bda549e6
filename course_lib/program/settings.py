"""The training program's configuration: that of `course_lib.configs`, and three more parts.

    config = settings.complete(configs.get("cpu"))
    settings.set_field(config, "model.num_layers", "6")    # typed; a misspelt field fails
    settings.check(config)

The additional parts are `run`, what the program does besides the steps; `mesh`, the number of
devices along each axis; and `strategy`, how they are used (`options.Strategy`).
"""

import functools
import json
import math
import pathlib
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import tokenizers
from flax.traverse_util import unflatten_dict
from ml_collections import ConfigDict

from course_lib import configs, fields, files, optimizers
from course_lib.fields import FIXED, FREE, ROUNDING, Field, Free, Rounding, Rule, at_least
from course_lib.fields import set_field as set_field
from course_lib.many_devices import meshes
from course_lib.many_devices.options import Strategy
from course_lib.many_devices.pipeline_parallel import V_SHAPED
from course_lib.measure import hardware
from course_lib.models import attention
from course_lib.program import journal

NON_FINITE = ("stop", "skip")
LOGGERS = ("none", "wandb", "trackio")
ALL = 0  # of a mesh axis: all devices that the other axes leave
EVERY = at_least(1, " step; for never, more than training.steps")
KEEP = at_least(2, ": if the last is damaged, the one before is needed")
COUNT = Rule(lambda x: x >= 0, "be 0 or more")
CORPUS = Rule(bool, "be 'shipped', or a folder or a file of UTF-8 text")
TOKENIZER = Rule(bool, "be 'course', 'own' or a tokenizer.json")
DEVICES = Rule(lambda x: x >= ALL, "be at least 1, or 0 for all devices")
RUN = dict(
    corpus=Free("shipped", CORPUS, about="or a folder or a file of UTF-8 text"),
    # the tokens may not change: see `fixed`
    tokenizer=Free("course", TOKENIZER, about="or own, of this text, or a tokenizer.json"),
    weights=Field("", about="a run's folder: begins with its last parameters"),
    logger=Free("none", LOGGERS, about="or wandb, or trackio: also gets the numbers"),
    log_every=Free(10, EVERY, about="steps between two lines of metrics, means over them"),
    validate_every=Free(250, EVERY, about="steps, and at the end"),
    # fixed, since validation losses are compared with each other
    validation_batches=Field(0, COUNT, about="all, up to 262,144 tokens"),
    checkpoint_every=Free(250, EVERY, about="steps, at the end, and at SIGTERM"),
    keep=Free(3, KEEP, about="checkpoints, and the best one besides"),
    sample_every=Free(250, EVERY, about="steps, and at the end"),
    sample_tokens=Free(100, COUNT, about="per sample, or 0 for none"),
    non_finite=Field("stop", NON_FINITE, about="or skip: updates that are not finite"),
    # a dynamic loss scale falls to 1 within 24
    skips_in_a_row=Free(25, at_least(1), about="updates skipped in a row that end the run"),
)
MESH = {axis: Rounding(1, at_least(1)) for axis in meshes.AXES}
MESH["data"] = Rounding(ALL, DEVICES, about="all devices that the other axes leave")
OWN = dict(run=RUN, mesh=MESH, strategy=fields.of_class(Strategy))
FIELDS = fields.by_name(configs.FIELDS | OWN)


def defaults() -> ConfigDict:
    """Returns the parts of a configuration that only the program reads."""
    return fields.template(OWN)


def complete(config: Any) -> ConfigDict:
    """Returns a copy of a configuration, a ConfigDict or a dict as JSON has it (tuples are
    lists, and 1.0 may be 1), with the default of each field that is missing, as in an older
    file.
    """
    given = config.to_dict() if isinstance(config, ConfigDict) else config
    filled = _template()
    if not isinstance(given, Mapping):
        raise ValueError(f"config={given!r} must have parts, as {sorted(filled)}")
    fields.check(given, filled, may_lack=True)
    filled.update(given)
    return filled.lock()


def _template() -> ConfigDict:
    """Returns a configuration in which every field has its type and its default."""
    template = configs.published_155m()
    template.update(defaults())
    return template


def check(config: ConfigDict) -> None:
    """Refuses what cannot work. Building a run shows whether it fits the devices."""
    if missing := [name for name in configs.PROGRAM if name not in config]:
        raise ValueError(f"{missing[0]} must be given: start from settings.complete(config)")
    fields.check(config, _template(), FIELDS)
    configs.check_pairs(config)


def fast_on_cpu(config: ConfigDict, chosen: Collection[str] = ()) -> None:
    """Sets the fields that make steps faster on a CPU, except those in `chosen`. Numbers change
    by rounding. Axes other than "data" and `by="types"` have products of their own, and longer
    sequences would have too many blocks to compile.
    """
    if config.strategy.by == "types" or any(
        config.mesh[axis] > 1 for axis in meshes.AXES if axis != "data"
    ):
        return
    if "model.flat_products" not in chosen:
        config.model.flat_products = True
    short = config.data.seq_len <= 16 * attention.BLOCK
    if short and "model.attention" not in chosen and config.model.attention == "reference":
        config.model.attention = "blocks"


def described() -> str:
    """Returns what --help says about the fields of --set."""
    run = [f"{name}={f.default} ({f.about})" for name, f in RUN.items()]
    names = [f"{name} ({row.about})" for name, row in optimizers.OPTIMIZERS.items()]
    free, rounding = (", ".join(_resumed_as(kind)) for kind in (FREE, ROUNDING))
    paragraphs = [
        "model: see course_lib/models/configuration.py; optimizer, data, training, seed: see"
        " course_lib/configs.py; a run's config.json has all of them with their values",
        f"optimizer.name is one of {', '.join(names)}; fields of one optimizer alone: see"
        " course_lib/optimizers.py",
        f"run.*: {', '.join(run)}",
        f"mesh.*: {', '.join(MESH)}; data={ALL} ({MESH['data'].about})",
        f"strategy.*: {', '.join(OWN['strategy'])} (course_lib/many_devices/options.py)",
        f"When a run goes on, these fields may differ: {free}. The text must be the same, but"
        " may lie in another folder. run.non_finite may change only from stop to skip. These"
        f" may differ, too, but change the rounding: {rounding} (with several chunks,"
        " mesh.pipe may not)",
    ]
    fill = functools.partial(
        textwrap.fill, width=96, initial_indent="  ", subsequent_indent="    "
    )
    return "\n".join(["fields of --set:", *map(fill, paragraphs)])


def _resumed_as(kind: str) -> Iterator[str]:
    """Yields the fields of a kind; as "run.* except ..." if they are most of a part."""
    for part in ("model", "optimizer", "data", "training", *configs.PROGRAM):
        own = {f.partition(".")[2]: f for f in FIELDS if f.startswith(f"{part}.")}
        alike = [f for f in own.values() if resumed(f) == kind]
        others = [name for name, f in own.items() if f not in alike]
        if len(alike) > len(others):
            yield f"{part}.*" + f" except {' and '.join(others)}" * bool(others)
        else:
            yield from alike


def axes(config: ConfigDict, count: int) -> dict[str, int]:
    """Returns the mesh's axes for a number of devices: "data", and each other axis above 1."""
    others = {axis: config.mesh[axis] for axis in meshes.AXES if axis != "data"}
    others = {axis: size for axis, size in others.items() if size > 1}
    inner = math.prod(others.values())
    size = config.mesh.data or count // inner
    if size * inner != count:
        raise ValueError(
            f"mesh={config.mesh.to_dict()} must multiply to the number of devices, {count}: set"
            f" mesh.data=0, which takes all that are left, and others that divide {count}"
        )
    return {"data": size} | others


def strategy(config: ConfigDict) -> Strategy:
    """Returns the strategy of a configuration; errors name its field."""
    try:
        return Strategy(**config.strategy.to_dict())
    except ValueError as error:
        raise ValueError(f"strategy.{error}") from None


def resumed(field: str) -> str:
    """Returns whether a field may change when a run goes on: `FIXED`, `ROUNDING` or `FREE`."""
    return FIELDS[field].resumed if field in FIELDS else FIXED


def fixed(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields that must not change when a run goes on."""
    kept = {f: value for f, value in fields.flat(config).items() if resumed(f) == FIXED}
    if config.strategy.chunks > 1:  # layers are stored in the order of a pipeline's stages
        kept["mesh.pipe"] = config.mesh.pipe
    if config.strategy.schedule in V_SHAPED:  # they lie in another order
        kept["strategy.v_shaped"] = True
    return unflatten_dict(kept, sep=".")


def numerics(config: ConfigDict, devices: Collection[jax.Device]) -> dict[str, Any]:
    """Returns what the last bits of the numbers depend on, besides `fixed`."""
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    values: dict[str, Any] = {
        "jax": jax.__version__,
        "device": kinds,
        "processes": jax.process_count(),
        "mesh": axes(config, len(devices)),
        # One device sends nothing, whatever the strategy.
        "strategy": (config if len(devices) > 1 else defaults()).strategy.to_dict(),
    }
    if kinds == "cpu":
        values["cores"] = hardware.cores()
    own = {part: value for part, value in config.items() if part not in OWN}
    rounding = {f: x for f, x in fields.flat(ConfigDict(own)).items() if resumed(f) == ROUNDING}
    # as a checkpoint gives it back
    return json.loads(json.dumps(values | unflatten_dict(rounding, sep=".")))


def changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each difference between what `fixed` returned for the saved run,
    perhaps in an older version of this course, and returns now.

    A field that the saved run lacks has its default; one that was fixed then and may change now
    is left out. `non_finite="stop"` has skipped no update, so it may become "skip".
    """
    usual, new = fields.flat(_template()), fields.flat(now)
    old = {f: x for f, x in _with_defaults(saved, now).items() if f in new or f not in usual}
    if old["run.non_finite"] == "stop":
        old["run.non_finite"] = new["run.non_finite"]
    for each in (old, new):  # by the name of the field that decides it
        if each.pop("strategy.v_shaped", False):
            each["strategy.schedule"] = " or ".join(V_SHAPED)
    return fields.differences(old, new)


def rounded_otherwise(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each difference of two results of `numerics`."""
    without_mesh = {name: part for name, part in now.items() if name != "mesh"}
    return fields.differences(_with_defaults(saved, without_mesh), now)


def _with_defaults(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns saved fields by name, with the default of each field that only `now` has."""
    old, usual = fields.flat(saved), fields.flat(_template())
    return old | {f: usual[f] for f in fields.flat(now) if f in usual and f not in old}


def why_not_begun(folder: pathlib.Path) -> str:
    """Returns why no run may begin in a folder without checkpoints, as it would write over what
    is there; "" if it may: a run that was killed before its first checkpoint was complete has
    no line beyond twice `run.checkpoint_every` steps, and no report.
    """
    lines = [folder / f"{name}.jsonl" for name in journal.FILES]
    written = [file.name for file in lines if file.exists() and file.stat().st_size]
    # Read after the lines: a process that begins this run writes config.json before any line.
    path = folder / "config.json"
    cure = "give another folder, or move these files away"
    if not written and not path.exists():
        return ""
    try:
        last = 2 * int(json.loads(path.read_text())["run"]["checkpoint_every"])
    except (OSError, ValueError, KeyError, TypeError):
        names = ", ".join(written) or path.name
        return f"{folder} holds {names}, but no configuration of a run: {cure}"
    later = any(line["step"] > last for line in journal.read(folder))
    if later or (folder / "report.md").exists():
        return (
            f"the run in {folder} has no checkpoints any more, and to begin anew would erase"
            f" its metrics and samples: {cure}"
        )
    return ""


def write(
    config: ConfigDict, folder: pathlib.Path, tokenizer: tokenizers.Tokenizer | None = None
) -> None:
    """Writes `config.json` of a run folder, and its `tokenizer.json`."""
    with files.atomic_write(folder / "config.json") as file:
        file.write(json.dumps(config.to_dict(), indent=1).encode())
    if tokenizer is not None:
        with files.atomic_write(folder / "tokenizer.json") as file:
            file.write(tokenizer.to_str().encode())
