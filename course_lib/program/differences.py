"""Differences between two configurations, and defaults for fields that an older one lacks."""

import json
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict


def differences(
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
    names: tuple[str, str] = ("saved", "given"),
) -> list[str]:
    """Returns a line for each field in which two nested dicts differ: "model.num_layers: 3
    saved, 6 given".

    Values are compared as JSON stores them: a tuple equals a list.

    Args:
      saved: the first.
      given: the second.
      names: what the lines call them.
    """
    first, second = (
        {
            field: repr(json.loads(json.dumps(value)))
            for field, value in flatten_dict(tree, sep=".").items()
        }
        for tree in (saved, given)
    )
    return [
        f"{field}: {first.get(field, 'not')} {names[0]}, {second.get(field, 'not')} {names[1]}"
        for field in first | second
        if first.get(field) != second.get(field)
    ]


def with_defaults(
    saved: Mapping[str, Any], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a saved configuration with the default of each field that only the given one has.

    Args:
      saved: nested dicts, perhaps older than some fields.
      given: nested dicts.
      defaults: nested dicts. A field without a default is not added.
    """
    old, usual = flatten_dict(saved), flatten_dict(defaults)
    new = (field for field in flatten_dict(given) if field in usual and field not in old)
    return unflatten_dict(old | {field: usual[field] for field in new})
