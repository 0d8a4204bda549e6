"""Fields of a configuration. One line declares a field: its default, what its values must be,
and whether a run may go on with another value.

    MODEL = dict(num_layers=12, attention=Rounding("reference", IMPLEMENTATIONS))
    TABLE = dict(model=MODEL)
    check(config, template(TABLE), by_name(TABLE))
"""

import dataclasses
import difflib
import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import arguments

# When a run goes on, a field keeps its value; or it may change, and the same sums are rounded
# otherwise; or it may change, and no number does.
FIXED, ROUNDING, FREE = "fixed", "rounding", "free"


class Rule(NamedTuple):
    """A test of values, and the same in words, as in "be positive"."""

    holds: Callable[[Any], bool]
    must: str


POSITIVE = Rule(lambda x: x > 0, "be positive")
NOT_NEGATIVE = Rule(lambda x: x >= 0, "not be negative; 0 turns it off")
FRACTION = Rule(lambda x: 0 <= x < 1, "be in [0, 1): 1 leaves nothing")


def at_least(least: int | float, why: str = "") -> Rule:
    return Rule(lambda x: x >= least, f"be at least {least}{why}")


@dataclasses.dataclass(frozen=True)
class Field:
    """A field, whose values have the type of its default."""

    default: Any
    given: Rule | Collection[Any] | None = None  # a rule, or a table that has the values
    resumed: str = FIXED
    about: str = ""  # for --help

    @functools.cached_property
    def rule(self) -> Rule | None:
        """The rule of its values. Numbers without one must be positive; or, if their default is
        0, not negative.
        """
        if self.given is None:
            number = type(self.default) in (int, float)
            return (POSITIVE if self.default else NOT_NEGATIVE) if number else None
        if isinstance(self.given, Rule):
            return self.given
        known = tuple(self.given)
        return Rule(lambda x: x in known, f"be one of {known}")

    def must(self, value: Any) -> str:
        """Returns what a value must be; "" if it is."""
        wrong = _not_like(value, self.default)
        return wrong or ("" if not self.rule or self.rule.holds(value) else self.rule.must)


Rounding = functools.partial(Field, resumed=ROUNDING)
Free = functools.partial(Field, resumed=FREE)
Table = Mapping[str, Any]  # from names to fields, to defaults (fields, too), or to tables


def option(default: Any, given: Any = None, resumed: str = ROUNDING) -> Any:
    """Returns a field of a dataclass, for `of_class`."""
    return dataclasses.field(
        default=default, metadata={"field": Field(default, given, resumed)}
    )


def required() -> Any:
    """Returns a field of a dataclass, too: a whole number above 0, without a default."""
    return dataclasses.field(metadata={"field": Field(1)})


@functools.cache
def of_class(kind: type) -> dict[str, Field]:
    """Returns the fields of a dataclass that `option` and `required` made."""
    every = dataclasses.fields(kind)
    return {each.name: each.metadata["field"] for each in every if each.metadata}


class Checked:
    """A dataclass with such fields, and with rules for several of them together."""

    def __post_init__(self) -> None:
        for name, field in of_class(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is not field.default and (must := field.must(value)):
                raise ValueError(f"{name}={shortened(repr(value))} must {must}")
        arguments.refuse(self._errors())

    def _errors(self) -> Iterator[str]:
        yield from ()


def template(table: Table) -> ConfigDict:
    """Returns a configuration in which every field has its default."""
    parts = {name: template(part) for name, part in table.items() if isinstance(part, Mapping)}
    own = {name: getattr(f, "default", f) for name, f in table.items() if name not in parts}
    return ConfigDict(own | parts)


def by_name(table: Table) -> dict[str, Field]:
    """Returns the fields by name with their part: "model.num_layers"."""
    return {name: f if isinstance(f, Field) else Field(f) for name, f in flat(table).items()}


def flat(tree: Any) -> dict[str, Any]:
    """Returns the leaves of nested dicts, or of a configuration, by name with their part."""
    return flatten_dict(tree.to_dict() if isinstance(tree, ConfigDict) else tree, sep=".")


def check(
    config: Any,
    template: Any,
    fields: Mapping[str, Field] = {},  # noqa: B006
    path: str = "",
    *,
    may_lack: bool = False,
) -> None:
    """Refuses misspelt fields, missing ones unless `may_lack`, and values of another type or
    against a rule. ConfigDict itself accepts None for any field and True for a number. As JSON
    has it, tuples may be lists, and 1.0 may be 1. `path` is the part, with a dot behind it.
    """
    for name in config:
        if name not in template:
            raise no_field(f"{path}{name}", config[name], [f"{path}{n}" for n in template])
    for name, example in template.items():
        field = f"{path}{name}"
        if name not in config:
            if may_lack:
                continue
            raise ValueError(f"{field} must be given: start from a preset, configs.get('155m')")
        value = config[name]
        if not isinstance(example, ConfigDict):
            must = fields[field].must(value) if field in fields else _not_like(value, example)
        elif isinstance(value, ConfigDict | FrozenConfigDict | Mapping):
            check(value, example, fields, f"{field}.", may_lack=may_lack)
            continue
        else:
            must = f"have fields, as {sorted(example)}"
        if must:
            raise ValueError(f"{field}={shortened(repr(value))} must {must}")


def _not_like(value: Any, example: Any) -> str:
    """Returns what a value must be to be of the kind of an example; "" if it is."""
    kind = type(example)
    if type(value) is kind and kind in (int, bool, str):
        return ""
    types = {float: (float, int), tuple: (tuple, list)}.get(kind, kind)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, types):
        return f"be of type {kind.__name__}, as in {example!r}"
    if isinstance(value, float) and not math.isfinite(value):
        return "be a finite number"
    if isinstance(value, tuple | list) and not all(isinstance(x, str) for x in value):
        return "hold strings"
    return ""


def shortened(text: str) -> str:
    """Returns what a user wrote as a message quotes it: at most 80 characters of it."""
    return text if len(text) <= 80 else f"{text[:79]}…"


def no_field(field: str, value: Any, known: Iterable[str]) -> ValueError:
    """Returns the error for a field that does not exist."""
    close = " or ".join(difflib.get_close_matches(field, known, n=3, cutoff=0))
    return ValueError(
        f"{shortened(field)}={shortened(repr(value))} is no field and would change nothing: did"
        f" you mean {close}?"
    )


def differences(
    first: Any, second: Any, names: tuple[str, str] = ("saved", "given")
) -> list[str]:
    """Returns a line for each field in which two nested dicts differ: "model.num_layers: 3
    saved, 6 given". Values are compared as JSON stores them: a tuple equals a list.
    """
    old, new = (
        {field: repr(json.loads(json.dumps(value))) for field, value in flat(tree).items()}
        for tree in (first, second)
    )
    return [
        f"{field}: {old.get(field, 'not')} {names[0]}, {new.get(field, 'not')} {names[1]}"
        for field in old | new
        if old.get(field) != new.get(field)
    ]


def set_field(config: ConfigDict, field: str, text: str) -> None:
    """Sets a field, as "model.num_layers", from text in its own type: a number; true or false;
    a string as it is; for a tuple, its strings with commas between them, a list in JSON, or
    nothing for ().
    """
    examples = flat(config)
    if field not in examples:
        raise no_field(field, text, examples)
    read, kind = _READ[type(examples[field])]
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
