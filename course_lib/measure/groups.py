"""Reads the groups of devices in which a collective runs, and their axes of the mesh.

In a compiled program a device is its place in `mesh.devices.flat`. XLA writes groups in several
ways, which differ from version to version (https://openxla.org/xla/operation_semantics):

    replica_groups={{0,1,2,3},{4,5,6,7}}       each group listed
    replica_groups={}                          one group of all devices
    replica_groups=[2,4]<=[8]                  0 to 7 in two rows of four; each row is a group
    replica_groups=[4,2]<=[2,4]T(1,0)          two rows of four, transposed, read as four of two
    replica_groups=mesh['a'=2,'b'=4] {'b'}     along an axis of a mesh, not always the caller's
    source_target_pairs={{0,1},{1,2},{2,3}}    a permutation: who sends to whom
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LIST = re.compile(r"\{([\d,\s]*)\}")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_LISTED = re.compile(r"\breplica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=" + _ORDER)
_MESH = re.compile(
    r"\breplica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'(?:=(\d+)|:\((\d+)\)(\d+))?")


def pairs(attributes: str) -> Groups:
    """Returns the (source, target) pairs of a permutation; none for other collectives."""
    match = _PAIRS.search(attributes)
    return _lists(match[1]) if match else ()


def groups(attributes: str, devices: int) -> Groups:
    """Returns the groups in which a collective runs; of a permutation, its chains."""
    if "source_target_pairs=" in attributes:
        return _chains(pairs(attributes))
    if match := _LISTED.search(attributes):
        return _lists(match[1]) or (tuple(range(devices)),)
    if match := _IOTA.search(attributes):
        return tuple(map(tuple, _order(match[2], match[3]).reshape(_ints(match[1])).tolist()))
    if match := _MESH.search(attributes):
        return _along(*match.groups())
    raise ValueError(f"attributes={attributes[:120]!r} must name the groups of devices")


def axes_of_groups(members: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the fewest axes of a mesh of `sizes` along which groups lie, `()` if none."""
    wanted = {frozenset(group) for group in members}
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    for count in range(len(sizes) + 1):
        for axes in itertools.combinations(range(len(sizes)), count):
            rows = _last(devices, axes)
            if len(rows) == len(wanted) and {frozenset(row) for row in rows.tolist()} == wanted:
                return tuple(list(sizes)[axis] for axis in axes)
    return ()


def axes_of_pairs(members: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of a mesh along which sources and targets of a permutation differ."""
    sources, targets = (
        np.unravel_index(ends, tuple(sizes.values())) for ends in np.transpose(members)
    )
    return tuple(
        name for name, a, b in zip(sizes, sources, targets, strict=True) if (a != b).any()
    )


def _along(mesh: str, device_ids: str | None, grouped: str) -> Groups:
    """Reads `'a'=2,'b'=8`, `4,0,5,1,...` or `[8,2]T(1,0)`, and the axes of a group:
    `'a','b':(2)4`, the second the factor 4 of an axis b of 8 = 2 x 4 x 1 devices.
    """
    names = {name: int(size) for name, size, _, _ in _AXIS.findall(mesh)}
    spans = [
        (name, int(p or 1), int(p or 1) * int(s or names[name]))
        for name, _, p, s in _AXIS.findall(grouped)
    ]
    sizes: list[int] = []
    axes: list[int] = []
    for name, size in names.items():
        inside = [(start, end) for axis, start, end in spans if axis == name]
        for low, high in itertools.pairwise(sorted({1, size, *itertools.chain(*inside)})):
            if any(start <= low and high <= end for start, end in inside):
                axes.append(len(sizes))
            sizes.append(high // low)
    listed = re.fullmatch(_ORDER, device_ids or f"[{math.prod(sizes)}]")
    devices = _order(listed[1], listed[2]) if listed else np.array(_ints(device_ids or ""))
    return tuple(map(tuple, _last(devices.reshape(sizes), tuple(axes)).tolist()))


def _order(sizes: str, transposed: str | None) -> np.ndarray:
    """Reads `[2,4]T(1,0)`: 0 to 7 in two rows of four, transposed."""
    shape = _ints(sizes)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(_ints(transposed) if transposed else None)


def _last(devices: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Puts the axes of a group last and makes one of them."""
    size = math.prod(devices.shape[axis] for axis in axes)
    return np.moveaxis(devices, axes, range(-len(axes), 0)).reshape(-1, size)


def _chains(permutation: Groups) -> Groups:
    """Returns the devices along each chain or ring of (source, target) pairs."""
    following = {source: target for source, target in permutation}
    chains = []
    # Chains first, from their beginnings. The rest are rings.
    for start in (*(following.keys() - following.values()), *following):
        chain = [start]
        while chain[-1] in following:
            chain.append(following.pop(chain[-1]))
        chains += [tuple(dict.fromkeys(chain))] if len(chain) > 1 else []
    return tuple(chains)


@functools.lru_cache
def _lists(text: str) -> Groups:
    """Reads `{0,1},{2,3}`. A step repeats few groups, and each lists every device: cached."""
    return tuple(_ints(inside) for inside in _LIST.findall(text))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
