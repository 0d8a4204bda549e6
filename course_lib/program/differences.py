"""What differs between two configurations, field by field, and what an older one lacks."""

import json
from collections.abc import Mapping
from typing import Any


def differences(
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
    names: tuple[str, str] = ("saved", "given"),
) -> list[str]:
    """Returns a line for each field in which two nested dicts differ: "model.num_layers: 3
    saved, 6 given".

    They are compared as JSON would have them, where a tuple is a list.

    Args:
      saved: the first.
      given: the second.
      names: what the lines call them.
    """
    old, new = _flat(saved), _flat(given)
    return [
        f"{field}: {old.get(field, 'not')} {names[0]}, {new.get(field, 'not')} {names[1]}"
        for field in old | new
        if old.get(field) != new.get(field)
    ]


def with_defaults(
    saved: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a saved configuration with the default of each field that only the given one has.

    Args:
      saved: nested dicts; perhaps older than some fields.
      given: nested dicts.
      defaults: of the fields that there are. A field that has none is left alone.
    """
    found = dict(saved)
    for name, value in given.items():
        if name in defaults and isinstance(value, Mapping):
            found[name] = with_defaults(saved.get(name, {}), value, defaults[name])
        elif name in defaults and name not in saved:
            found[name] = defaults[name]
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping)
        flat |= (
            _flat(value, f"{prefix}{name}.")
            if inner
            else {f"{prefix}{name}": repr(json.loads(json.dumps(value)))}
        )
    return flat
