"""Differences between two configurations, and defaults for fields that an older one lacks."""

import json
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict


def differences(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    names: tuple[str, str] = ("saved", "given"),
) -> list[str]:
    """Returns a line for each field in which two nested dicts differ: "model.num_layers: 3
    saved, 6 given".

    Values are compared as JSON stores them: a tuple equals a list.

    Args:
      first: nested dicts.
      second: nested dicts.
      names: the words that the lines use for `first` and `second`.
    """
    old, new = (
        {
            field: repr(json.loads(json.dumps(value)))
            for field, value in flatten_dict(tree, sep=".").items()
        }
        for tree in (first, second)
    )
    return [
        f"{field}: {old.get(field, 'not')} {names[0]}, {new.get(field, 'not')} {names[1]}"
        for field in old | new
        if old.get(field) != new.get(field)
    ]


def with_defaults(
    saved: Mapping[str, Any], current: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a saved configuration, with defaults for fields that only the current one has.

    Args:
      saved: nested dicts, perhaps older than some fields.
      current: nested dicts.
      defaults: nested dicts. A field without a default is not added.
    """
    old, usual = flatten_dict(saved), flatten_dict(defaults)
    new = (field for field in flatten_dict(current) if field in usual and field not in old)
    return unflatten_dict(old | {field: usual[field] for field in new})
