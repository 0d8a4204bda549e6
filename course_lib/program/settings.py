"""The training program's configuration: that of `course_lib.configs`, and three more parts.

    config = settings.complete(configs.get("cpu"))
    settings.set_field(config, "model.num_layers", "6")    # typed; a misspelt field fails
    settings.check(config)

The additional parts are `run`, what the program does besides the steps; `mesh`, the number of
devices along each axis; and `strategy`, how they are used (`options.Strategy`).
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from course_lib import configs, files
from course_lib.many_devices import meshes
from course_lib.many_devices.options import Strategy
from course_lib.measure import hardware
from course_lib.program import journal, processes
from course_lib.program.differences import differences, with_defaults

NON_FINITE = ("stop", "skip")
ALL = 0  # of a mesh axis: all devices that the other axes leave
LIMITS: configs.Limits = {
    "be 'shipped' or a folder of UTF-8 text": (bool, "run.corpus"),
    "be at least 1 step; for never, more than training.steps": (
        lambda x: x >= 1,
        "run.log_every run.validate_every run.checkpoint_every run.sample_every",
    ),
    "be 0 or more": (lambda x: x >= 0, "run.validation_batches run.sample_tokens"),
    "be at least 2: if the last is damaged, the one before is needed": (
        lambda x: x >= 2,
        "run.keep",
    ),
    f"be one of {NON_FINITE}": (NON_FINITE.__contains__, "run.non_finite"),
    "be at least 1": (
        lambda x: x >= 1,
        " ".join(
            ["run.skips_in_a_row", *(f"mesh.{axis}" for axis in meshes.AXES if axis != "data")]
        ),
    ),
    "be at least 1, or 0 for all devices": (lambda x: x >= ALL, "mesh.data"),
}


def defaults() -> ConfigDict:
    """Returns the parts of a configuration that only the program reads."""
    run = dict(
        corpus="shipped",  # or a folder of UTF-8 text: see course_lib.text.data.documents
        log_every=10,  # steps between two lines of metrics, each a mean over these steps
        validate_every=250,  # steps; and at the end. A new best is written as a checkpoint, too
        validation_batches=0,  # of the validation split; 0: all, up to observe.VALIDATED tokens
        checkpoint_every=250,  # steps; a kill loses no more. Also at the end, and at SIGTERM
        keep=3,  # checkpoints, and the best one besides
        sample_every=250,  # steps between two samples; and at the end
        sample_tokens=100,  # per sample; 0: none
        non_finite="stop",  # or "skip": skip updates that are not finite, and count them
        skips_in_a_row=25,  # as many end the run; a dynamic loss scale falls to 1 within 24
    )
    mesh = dict.fromkeys(meshes.AXES, 1) | {"data": ALL}
    return ConfigDict(dict(run=run, mesh=mesh, strategy=dataclasses.asdict(Strategy())))


def complete(config: Any) -> ConfigDict:
    """Returns a copy of a configuration, with the default of each field that is missing.

    Fields of `course_lib.configs` have their defaults in `configs.published_155m`, the others
    in `defaults`. A file that is older than a field can therefore be read.

    Args:
      config: a ConfigDict, as a preset is; or a dict as JSON has it, where tuples are lists and
        1.0 may be 1.

    Raises:
      ValueError: if it is neither of these, or a field does not exist or has another type.
    """
    fields = config.to_dict() if isinstance(config, ConfigDict) else config
    filled = _template()
    if not isinstance(fields, Mapping):
        raise ValueError(f"config={fields!r} must have parts, as {sorted(filled)}")
    configs.check_fields(fields, filled, may_lack=True)
    filled.update(fields)
    return filled.lock()


def _template() -> ConfigDict:
    """Returns a configuration in which every field has its type and its default."""
    template = configs.published_155m()
    template.update(defaults())
    return template


def check(config: ConfigDict) -> None:
    """Refuses a configuration that cannot work. Building it shows whether it fits the devices.

    Raises:
      ValueError: naming the field, its value, and the fix.
    """
    if missing := [name for name in configs.PROGRAM if name not in config]:
        raise ValueError(f"{missing[0]} must be given: start from settings.complete(config)")
    configs.check_fields(config, _template())
    configs.check(config)
    configs.check_limits(config, LIMITS)
    strategy(config)


def axes(config: ConfigDict, count: int) -> dict[str, int]:
    """Returns the mesh's axes for a number of devices: "data", and each other axis above 1.

    Raises:
      ValueError: if the sizes do not multiply to that number.
    """
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
    """Returns the strategy of a configuration.

    Raises:
      ValueError: if one of its values does not exist.
    """
    try:
        return Strategy(**config.strategy.to_dict())
    except ValueError as error:
        raise ValueError(f"strategy.{error}") from None


def fixed(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields that must not change when a run is resumed, as its numbers depend on
    them.

    These fields may change without changing a single bit of the result:

    - `training.steps`, to train longer, and `training.donate`, which says where results are
      written;
    - most of `run`: what is done besides the steps, and when. The text is identified by its
      tokens, so its folder may change.

    These fields may change, but they change the rounding (the same sums in another order):

    - `mesh` and `strategy`, which say which device computes what (dropout masks differ, too).
      If a pipeline has several chunks per device, layers are stored in the order of its stages:
      then `mesh.pipe` and `strategy.chunks` are fixed;
    - `model.remat*`, `model.attention`, `model.flat_products`, `model.loss_*`,
      `training.accumulation` and `training.backward`, which say how a device computes it.

    Two fields of `run` are fixed: `validation_batches`, because validation losses are compared
    with each other and must be of the same text, and `non_finite`, which says which updates are
    made (see `changed`).
    """
    fields = {k: v for k, v in config.to_dict().items() if k not in configs.PROGRAM}
    for part, names in (*_ROUNDING.items(), ("training", ("steps", "donate"))):
        fields[part] = {k: v for k, v in fields[part].items() if k not in names}
    fields["run"] = {name: config.run[name] for name in ("validation_batches", "non_finite")}
    fields["strategy"] = {"chunks": config.strategy.chunks}
    if config.strategy.chunks > 1:
        fields["mesh"] = {"pipe": config.mesh.pipe}
    return fields


_ROUNDING = {
    "training": ("accumulation", "backward"),
    "model": (
        "remat",
        "remat_policy",
        "remat_names",
        "attention",
        "flat_products",
        "loss_chunks",
        "loss_along",
    ),
}


def numerics(config: ConfigDict, devices: Collection[jax.Device]) -> dict[str, Any]:
    """Returns what the rounding of the numbers depends on, besides the fields in `fixed`:
    versions, devices, and the fields that say who computes and how.

    If a run continues with other values, the last bits of its numbers differ from then on.
    """
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
    for part, names in _ROUNDING.items():
        values[part] = {name: config[part][name] for name in names}
    return json.loads(json.dumps(values))  # as a checkpoint gives it back


def changed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each field that differs and must not.

    A field that the saved configuration lacks counts as having its default: the run is older
    than the field. A run with `non_finite="stop"` has skipped no update so far, so it may go on
    with "skip", but not the other way round.

    Args:
      saved: as `fixed` returned it, perhaps in an older version of this course.
      now: as `fixed` returns it.
    """
    template = _template().to_dict()
    saved = _still_fixed(with_defaults(saved, now, template), now, template)
    if saved["run"]["non_finite"] == "stop":
        saved = {**saved, "run": {**saved["run"], "non_finite": now["run"]["non_finite"]}}
    return differences(saved, now)


def _still_fixed(
    saved: Mapping[str, Any], now: Mapping[str, Any], template: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns saved fields without those that were fixed then and may change now."""
    return {
        name: _still_fixed(value, now[name], template[name])
        if isinstance(value, Mapping) and name in now and name in template
        else value
        for name, value in saved.items()
        if name in now or name not in template
    }


def rounded_otherwise(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each difference that changes the rounding, between two results of
    `numerics`. A saved field that is missing has its default, as for `changed`.
    """
    fields = {name: part for name, part in now.items() if name != "mesh"}  # has no defaults
    return differences(with_defaults(saved, fields, _template().to_dict()), now)


def unlike(values: Mapping[str, Any]) -> list[str]:
    """Compares every process's values with process 0's, and returns a line for each difference
    of the first process that differs. A collective: every process must call it.

    Args:
      values: of this process, as JSON can hold them.
    """
    first, *others = map(json.loads, processes.gather(json.dumps(values)))
    lines = (
        differences(first, other, ("in process 0", f"in process {n}"))
        for n, other in enumerate(others, 1)
    )
    return next(filter(None, lines), [])


def why_not_begun(folder: pathlib.Path) -> str:
    """Returns why no run may begin in a folder without checkpoints, as it would write over what
    is there; "" if it may.

    A run that was killed before its first checkpoint was complete may begin anew. That
    checkpoint is complete at the latest when the second one begins, after twice
    `run.checkpoint_every` steps; or, in a shorter run, before the report is written.
    """
    written = [
        file.name
        for file in folder.glob("*.jsonl")
        if file.stem in journal.FILES and file.stat().st_size
    ]
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


def write(config: ConfigDict, folder: pathlib.Path) -> None:
    """Writes `config.json` of a run folder."""
    with files.atomic_write(folder / "config.json") as file:
        file.write(json.dumps(config.to_dict(), indent=1).encode())


def set_field(config: ConfigDict, field: str, text: str) -> None:
    """Sets a field from text, in the type of the field.

    Args:
      config: as `complete` returns it; it is changed.
      field: its name with its part, as in "model.num_layers".
      text: a number; true or false; a string as it is; for a tuple, its strings with commas
        between them, a list in JSON, or an empty text for ().

    Raises:
      ValueError: if there is no such field, or the text is not of its type.
    """
    fields = {"seed": 0} | {
        f"{part}.{name}": example
        for part, examples in _template().items()
        if part != "seed"
        for name, example in examples.items()
    }
    if field not in fields:
        raise configs.no_field(field, text, fields)
    read, kind = _READ[type(fields[field])]
    try:
        config.update_from_flattened_dict({field: read(text)})
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{field}={text} must be {kind}") from None


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
