"""Sharding rules: one table from the meaning of a dimension to the mesh axis that cuts it.

Every dimension of every parameter has a logical name (`LOGICAL`): "embed" is the model's width
D, "mlp" its hidden width F, "heads" its H heads, "vocab" its vocabulary V, "layers" its N
layers. A strategy is a table of *rules* from these names to mesh axes. The rules of several
strategies join by union:

    ZERO = {"embed": "data"}    each holds a slice of the width
    TENSOR = {"vocab": "tensor", "mlp": "tensor", "heads": "tensor"}

    specs(params, ZERO | TENSOR, mesh)      one PartitionSpec per parameter

The same specs serve both ways to write a strategy: by hand, as the `in_specs` of a
`jax.shard_map`, and by the compiler, as `NamedSharding`s that `jax.jit` has to respect
(https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html).
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course_lib import arguments
from course_lib.many_devices import meshes
from course_lib.training import TrainState

PyTree = Any
Rules = Mapping[str, str | tuple[str, ...]]

LOGICAL = {
    "embed/embedding": ("vocab", "embed"),
    "pos_emb/embedding": ("positions", "embed"),
    "mlp/input_layer/kernel": ("embed", "mlp"),
    "mlp/input_layer/bias": ("mlp",),
    "mlp/gate_layer/kernel": ("embed", "mlp"),
    "mlp/gate_layer/bias": ("mlp",),
    "mlp/output_layer/kernel": ("mlp", "embed"),
    "mlp/output_layer/bias": ("embed",),
    "mlp/router": ("embed", "choices"),
    "mlp/expert_in/kernel": ("experts", "embed", "mlp"),
    "mlp/expert_in/bias": ("experts", "mlp"),
    "mlp/expert_gate/kernel": ("experts", "embed", "mlp"),
    "mlp/expert_gate/bias": ("experts", "mlp"),
    "mlp/expert_out/kernel": ("experts", "mlp", "embed"),
    "mlp/expert_out/bias": ("experts", "embed"),
    "attn/qkv/kernel": ("embed", "heads", "head_dim"),
    "attn/qkv/bias": ("heads", "head_dim"),
    "attn/q/kernel": ("embed", "heads", "head_dim"),
    "attn/q/bias": ("heads", "head_dim"),
    "attn/kv/kernel": ("embed", "heads", "head_dim"),
    "attn/kv/bias": ("heads", "head_dim"),
    "attn/output_layer/kernel": ("heads", "head_dim", "embed"),
    "attn/output_layer/bias": ("embed",),
    "pre_norm/scale": ("embed",),
    "pre_norm/bias": ("embed",),
    "query_norm/scale": ("head_dim",),
    "key_norm/scale": ("head_dim",),
    "post_norm/scale": ("embed",),
    "post_norm/bias": ("embed",),
    "output_layer/kernel": ("embed", "vocab"),
    "output_layer/bias": ("vocab",),
}
"""The dimensions of the Transformer's parameters, by the end of a parameter's name. Those of
scanned layers have "layers" in front."""

ACTIVATIONS = {
    "block_in": ("batch", "length", "width"),
    "mlp_hidden": ("batch", "positions", "mlp"),
    "qkv": ("batch", "positions", "heads", "head_dim"),
    "attn_out": ("batch", "positions", "heads", "head_dim"),
    "dispatched": ("choices", "batch", "room", "width"),
    "at_experts": ("experts", "sequences", "room", "width"),
}
"""The dimensions of the activations that the model names (`layers.NAMES`), and of the tokens at
their experts. Sequence parallelism cuts "length", context parallelism "length" and "positions".
"""

ZERO: Rules = {"embed": "data"}
TENSOR: Rules = {"vocab": "tensor", "mlp": "tensor", "heads": "tensor"}
PIPELINE: Rules = {"layers": "pipe"}
EXPERTS: Rules = {"experts": "expert"}


def spec(logical: tuple[str, ...], rules: Rules) -> P:
    """Returns the PartitionSpec of an array from the names of its dimensions."""
    return P(*(rules.get(name) for name in logical))


def specs(params: PyTree, rules: Rules, mesh: meshes.AnyMesh, table: Any = LOGICAL) -> PyTree:
    """Returns the PartitionSpec of each parameter, or of its shape. `table` names the
    dimensions by the end of the parameter's name, as "up/kernel" for "blocks/0/up/kernel";
    leading dimensions without a name are layers.
    """

    def of_leaf(path: Any, leaf: Any) -> P:
        keys = arguments.name_in_tree(path).split("/")
        ends = ("/".join(keys[start:]) for start in range(len(keys)))
        logical = next((table[end] for end in ends if end in table), None)
        if logical is None:
            raise ValueError(f"table must name the dimensions of {'/'.join(keys)!r}")
        cut = spec(("layers",) * (leaf.ndim - len(logical)) + logical, rules)
        for dim, axis in enumerate(cut):
            if axis is not None:
                name = "/".join(keys)
                meshes.check_divides(leaf.shape, dim, axis, mesh.shape[axis], name)
        return cut

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def dim_of(spec: P, axis: str) -> int | None:
    """Returns the dimension that a mesh axis cuts, or None."""
    return tuple(spec).index(axis) if axis in tuple(spec) else None


def axes_of(cuts: Iterable[str | tuple[str, ...] | None]) -> list[str]:
    """Lists the mesh axes that cut dimensions."""
    names = (cut if isinstance(cut, tuple) else (cut,) for cut in cuts)
    return [axis for axes in names for axis in axes if axis]


def state_specs(
    state: TrainState, params: PyTree, moment_specs: PyTree, mesh: meshes.AnyMesh
) -> TrainState:
    """Returns the specs of a train state, or of its shapes.

    In an optimizer's state, an array belongs to the parameter whose path its own path contains.
    If it has the parameter's shape, as Adam's moments and 8-bit codes do, it is divided like
    that parameter's gradient. The scales of 8-bit blocks are, too. Muon's momentum of matrices
    is divided into whole ones (`muon.to_stacks`). Anything else is small, and whole on each
    device: counts, keys, and the row and column means of Adafactor.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    if any(jax.tree_util.DictKey("muon") in path for path in paths):  # Optax's name
        from course_lib.many_devices import muon  # most runs do not need it

        moment_specs = muon.to_stacks(state.params, moment_specs, mesh)[-1]
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    specs = jax.tree.leaves(moment_specs, is_leaf=lambda x: isinstance(x, P))
    by_path = {
        path: (leaf.shape, spec) for (path, leaf), spec in zip(leaves, specs, strict=True)
    }

    def of_leaf(path: Any, leaf: Any) -> P:
        slices = itertools.combinations(range(len(path) + 1), 2)
        inside = (path[start:end] for start, end in slices)
        shape, spec = next((by_path[part] for part in inside if part in by_path), ((), P()))
        if path[-1] == jax.tree_util.GetAttrKey("scales"):
            _check_blocks(path, shape, leaf.shape, spec, mesh)
            return spec
        return spec if leaf.shape == shape else P()

    alone = jax.tree.map(
        lambda _: P(), dict(step=state.step, rng=state.rng, loss_scale=state.loss_scale)
    )
    opt_state = jax.tree_util.tree_map_with_path(of_leaf, state.opt_state)
    return TrainState(params=params, opt_state=opt_state, **alone)


def _check_blocks(
    path: Any, shape: tuple[int, ...], scales: tuple[int, ...], spec: P, mesh: meshes.AnyMesh
) -> None:
    """Refuses blocks of 8-bit moments that would lie on two devices: see `optimizer_memory`."""
    axis = spec[-1] if len(spec) == len(shape) else None
    if axis is None or scales[-1] % mesh.shape[axis] == 0:
        return
    own, block = shape[-1] // mesh.shape[axis], shape[-1] // scales[-1]
    raise ValueError(
        f"optimizer.block_size={block} must divide the {own} numbers that a device keeps of the"
        f" last dimension of {jax.tree_util.keystr(path[:-1])}, cut over {axis!r}: else a block"
        " straddles devices, which would have to send moments; take"
        f" optimizer.block_size={math.gcd(own, block)}"
    )


def place(specs: PyTree, mesh: meshes.AnyMesh) -> PyTree:
    """Returns the same tree of `NamedSharding`s on a mesh."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
