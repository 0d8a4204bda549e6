"""What the training program is told: a whole configuration, and three parts more.

    config = settings.whole(configs.get("cpu"))
    settings.set_field(config, "model.num_layers", "6")    # typed; a misspelt field fails
    settings.check(config)

To `model`, `optimizer`, `data`, `training` and `seed` (`course_lib.configs`) come `run`, what
the program does beside the steps, `mesh`, how many devices an axis has, and `strategy`, how
they are used (`options.Strategy`).
"""

import dataclasses
import difflib
import json
import math
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from course_lib import configs, files
from course_lib.many_devices import meshes
from course_lib.many_devices.async_tensor_parallel import OVERLAPS
from course_lib.many_devices.data_parallel import STAGES
from course_lib.many_devices.options import BY, Strategy
from course_lib.many_devices.pipeline_parallel.schedules import SCHEDULES
from course_lib.measure import hardware
from course_lib.program import journal, processes
from course_lib.program.differences import differences, with_defaults

NON_FINITE = ("stop", "skip")
ALL = 0  # of a mesh axis: all devices that the other axes leave


def defaults() -> ConfigDict:
    """Returns the parts of a configuration that only the program reads."""
    run = dict(
        corpus="shipped",  # or a folder of UTF-8 text: see course_lib.text.data.documents
        log_every=10,  # steps between two lines of metrics, each the mean since the one before
        validate_every=250,  # steps; and at the end. A new best is written as a checkpoint, too
        validation_batches=0,  # of the validation split; 0: all, up to observe.VALIDATED tokens
        checkpoint_every=250,  # steps; lost if killed. At the end, and at SIGTERM, anyway
        keep=3,  # checkpoints, and the best one besides
        sample_every=250,  # steps between two samples; and at the end
        sample_tokens=100,  # of a sample; 0: none
        non_finite="stop",  # or "skip": an update that is not finite is left out, and counted
        skips_in_a_row=25,  # end the run; a dynamic loss scale falls to 1 in 24 at most
    )
    mesh = dict.fromkeys(meshes.AXES, 1) | {"data": ALL}  # what the others leave
    return ConfigDict(dict(run=run, mesh=mesh, strategy=dataclasses.asdict(Strategy())))


def whole(config: Any) -> ConfigDict:
    """Returns a copy of a configuration in which every field that is missing has its default.

    A field's default is its value in `_template`: in the published 155m for what the model
    trains with, in `defaults` for the rest. So a file that is older than a field can be read.

    Args:
      config: a ConfigDict, as a preset is; or a dict as JSON has it, where tuples are lists and
        1.0 may be 1.

    Raises:
      ValueError: if it is no such dict, or a field does not exist or is of another type.
    """
    given = config.to_dict() if isinstance(config, ConfigDict) else config
    found = _template()
    if not isinstance(given, Mapping):
        raise ValueError(f"config={given!r} must have parts, as {sorted(found)}")
    configs.check_fields(given, found, "", may_lack=True)
    found.update(given)
    return found.lock()


def _template() -> ConfigDict:
    """Returns a configuration whose fields have their types and their defaults."""
    template = configs.published_155m()
    template.update(defaults())
    return template


def part_of_model(config: ConfigDict) -> ConfigDict:
    """Returns what `course_lib.configs` knows of a configuration."""
    return ConfigDict(
        {name: value for name, value in config.to_dict().items() if name not in defaults()}
    )


def check(config: ConfigDict) -> None:
    """Refuses a configuration that cannot work. Whether it fits the devices is seen when it is
    built.

    Raises:
      ValueError: naming the field, its value, and the fix.
    """
    if missing := [name for name in defaults() if name not in config]:
        raise ValueError(f"{missing[0]} must be given: start from settings.whole(config)")
    configs.check_fields(config, _template(), "")
    for part, fields in config.items():
        for field, value in fields.items() if isinstance(fields, ConfigDict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{part}.{field}={value} must be a finite number")
            if isinstance(value, tuple) and not all(isinstance(name, str) for name in value):
                raise ValueError(f"{part}.{field}={value!r} must hold strings")
    configs.check(part_of_model(config))
    if not config.run.corpus:
        raise ValueError("run.corpus='' must be 'shipped' or a folder of UTF-8 text")
    for field in ("log_every", "validate_every", "checkpoint_every", "sample_every"):
        if config.run[field] < 1:
            raise ValueError(
                f"run.{field}={config.run[field]} must be at least 1 step; for never, more than"
                " training.steps"
            )
    for field in ("validation_batches", "sample_tokens"):
        if config.run[field] < 0:
            raise ValueError(f"run.{field}={config.run[field]} must be 0 or more")
    if config.run.keep < 2:
        raise ValueError(
            f"run.keep={config.run.keep} must be at least 2: if the last is damaged, the one"
            " before is needed"
        )
    if config.run.skips_in_a_row < 1:
        raise ValueError(
            f"run.skips_in_a_row={config.run.skips_in_a_row} must be at least 1: so many left"
            " out end the run"
        )
    if config.run.non_finite not in NON_FINITE:
        raise ValueError(
            f"run.non_finite={config.run.non_finite!r} must be one of {NON_FINITE}"
        )
    for axis, size in config.mesh.items():
        if size < (ALL if axis == "data" else 1):
            raise ValueError(
                f"mesh.{axis}={size} must be at least 1"
                + ", or 0 for all devices" * (axis == "data")
            )
    for field, known in _STRATEGY.items():
        if config.strategy[field] not in known:
            raise ValueError(
                f"strategy.{field}={config.strategy[field]!r} must be one of {known}"
            )
    for field in ("microbatches", "chunks"):
        if config.strategy[field] < 1:
            raise ValueError(f"strategy.{field}={config.strategy[field]} must be at least 1")


# The values that there are, on whatever mesh.
_STRATEGY = dict(by=BY, zero=STAGES, overlap=OVERLAPS, schedule=tuple(SCHEDULES))


def axes(config: ConfigDict, count: int) -> dict[str, int]:
    """Returns the axes of the mesh for a number of devices: "data", and those along which there
    is more than one.

    Raises:
      ValueError: if the sizes do not multiply to that number.
    """
    others = {
        axis: config.mesh[axis]
        for axis in meshes.AXES
        if axis != "data" and config.mesh[axis] > 1
    }
    inner = math.prod(others.values())
    size = config.mesh.data or count // inner
    if size * inner != count:
        raise ValueError(
            f"mesh={config.mesh.to_dict()} must multiply to the number of devices, {count}: set"
            f" mesh.data=0, which takes all that are left, and others that divide {count}"
        )
    return {"data": size} | others


def strategy(config: ConfigDict) -> Strategy:
    """Returns the strategy of a configuration."""
    return Strategy(**config.strategy.to_dict())


def fixed(config: ConfigDict) -> dict[str, Any]:
    """Returns what must stay as it is when a run is resumed: all that its numbers follow from.

    Free are, for numbers that are the same bit for bit:

    - `training.steps`, so that a run can go on, and `training.donate`, which says where results
      are written;
    - of `run`, what is done beside the steps, and when. The text is known by its tokens,
      wherever it lies.

    Free are, for numbers that differ in their rounding, as the same sums are taken in another
    order:

    - `mesh` and `strategy`, which say who computes (dropout draws other masks there). Only
      where a stage of a pipeline has several chunks, layers are stored in the order of the
      stages, and both stay;
    - `model.remat*`, `model.attention`, `model.flat_products` and `training.accumulation`,
      which say how.

    Fixed are of `run`: `validation_batches`, as the best loss is one of several of the same
    text, and `non_finite`, which says which updates are made: see `changed`.
    """
    kept = part_of_model(config).to_dict()
    for part, names in (*_ROUNDING.items(), ("training", _BESIDE)):
        kept[part] = {name: value for name, value in kept[part].items() if name not in names}
    kept["run"] = {name: config.run[name] for name in ("validation_batches", "non_finite")}
    chunks = config.strategy.chunks
    return (
        kept
        | {"strategy": {"chunks": chunks}}
        | ({"mesh": {"pipe": config.mesh.pipe}} if chunks > 1 else {})
    )


_BESIDE = ("steps", "donate")  # of training
_ROUNDING = {
    "training": ("accumulation",),
    "model": ("remat", "remat_policy", "remat_names", "attention", "flat_products"),
}


def computed(config: ConfigDict, devices: Collection[jax.Device]) -> dict[str, Any]:
    """Returns what the rounding of the numbers follows from, beside what is `fixed`: versions,
    devices, and what says how.

    A run that goes on with another one has other last bits from there on.
    """
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    found: dict[str, Any] = {
        "jax": jax.__version__,
        "device": kinds,
        "processes": jax.process_count(),
    }
    found |= {"cores": hardware.cores()} if kinds == "cpu" else {}
    found["mesh"] = axes(config, len(devices))
    # One device sends nothing, whatever the strategy.
    how = config if len(devices) > 1 else defaults()
    found["strategy"] = how.strategy.to_dict()
    found |= {
        part: {name: config[part][name] for name in names} for part, names in _ROUNDING.items()
    }
    return json.loads(json.dumps(found))  # as a checkpoint gives it back


def changed(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Returns a line for each field that differs although it must not.

    A field that the saved configuration lacks has its default there: the run is older than
    the field. A run that stops at what is not finite has left out no update until then. So it
    may go on as one that leaves them out; not the other way.

    Args:
      saved: as `fixed` returned it, perhaps to an older version of this course.
      given: as `fixed` returns it.
    """
    template = _template().to_dict()
    saved = _still_fixed(with_defaults(saved, given, template), given, template)
    if saved["run"]["non_finite"] == "stop":
        saved = {**saved, "run": {**saved["run"], "non_finite": given["run"]["non_finite"]}}
    return differences(saved, given)


def _still_fixed(
    saved: Mapping[str, Any], given: Mapping[str, Any], template: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what was saved, without fields that were fixed then and are free now."""
    return {
        name: _still_fixed(value, given[name], template[name])
        if isinstance(value, Mapping) and name in given and name in template
        else value
        for name, value in saved.items()
        if name in given or name not in template
    }


def rounded_otherwise(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Returns a line for each thing that rounds numbers otherwise, of two as `computed`
    returns.

    A field that the saved one lacks has its default there, as for `changed`.
    """
    fields = {name: part for name, part in given.items() if name != "mesh"}  # sizes found
    return differences(with_defaults(saved, fields, _template().to_dict()), given)


def unlike(told: Mapping[str, Any]) -> list[str]:
    """Returns a line for each thing that the first process which differs is told otherwise than
    process 0. All call it.

    Args:
      told: to this process; of what JSON knows.
    """
    first, *others = (json.loads(said) for said in processes.gather(json.dumps(told)))
    found = (
        differences(first, other, ("in process 0", f"in process {n}"))
        for n, other in enumerate(others, 1)
    )
    return next(filter(None, found), [])


def why_not_begun(folder: pathlib.Path) -> str:
    """Returns why no run may begin in a folder without checkpoints, which would write over what
    is there; "" if it may.

    A run that was killed before its first checkpoint was whole may begin anew. At the latest
    that checkpoint is whole when the next one is saved, twice `run.checkpoint_every` steps
    after the start, and when a report is written.
    """
    written = [
        file.name
        for file in folder.glob("*.jsonl")
        if file.stem in journal.FILES and file.stat().st_size
    ]
    # Looked at last: another process that begins the same run writes it first.
    path = folder / "config.json"
    cure = "give another folder, or move what is there away"
    if not written and not path.exists():
        return ""
    try:
        last = 2 * int(json.loads(path.read_text())["run"]["checkpoint_every"])
    except (OSError, ValueError, KeyError, TypeError):
        return (
            f"{folder} holds {', '.join(written) or path.name}, but no configuration of a run:"
            f" {cure}"
        )
    if (folder / "report.md").exists() or any(
        line["step"] > last for line in journal.read(folder)
    ):
        return (
            f"the run in {folder} has no checkpoints any more, and to begin anew would erase"
            f" its metrics and samples: {cure}"
        )
    return ""


def write(config: ConfigDict, folder: pathlib.Path) -> None:
    """Writes `config.json` of a run folder."""
    with files.atomic_write(folder / "config.json") as file:
        file.write(json.dumps(config.to_dict(), indent=1).encode())


def set_field(config: ConfigDict, field: str, text: str) -> None:
    """Sets a field to what a text says, in the type of the field.

    Args:
      config: as `whole` returns it; it is changed.
      field: its name with its part, as in "model.num_layers".
      text: a number; true or false; a string as it is; for a tuple, its strings with commas
        between, none, or a list in JSON.

    Raises:
      ValueError: if there is no such field, or the text is not of its type.
    """
    fields = {
        f"{part}.{name}": (part, name)
        for part in config
        if part != "seed"
        for name in config[part]
    }
    if field not in fields and field != "seed":
        close = difflib.get_close_matches(field, [*fields, "seed"], n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"the fields are those of {', '.join(config)}"
        )
        raise ValueError(f"{field}={text} is no field and would change nothing: {hint}")
    part, name = fields.get(field, ("", "seed"))
    owner, examples = (config[part], _template()[part]) if part else (config, _template())
    read, what = _READ[type(examples[name])]
    try:
        owner[name] = read(text)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{field}={text} must be {what}") from None


def _names(text: str) -> tuple[str, ...]:
    names = json.loads(text) if text.startswith("[") else text.split(",")
    return tuple(filter(None, map(str.strip, names)))


_READ: dict[type, tuple[Callable[[str], Any], str]] = {
    str: (str, "a text"),
    tuple: (_names, 'names, as MLP,Attn or ["MLP", "Attn"]'),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
}
