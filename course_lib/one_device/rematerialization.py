"""Rematerialization: discards activations and computes them again in the backward pass.

Reverse-mode differentiation keeps activations until the backward pass has used them.
Rematerialization (gradient checkpointing; Chen et al., 2016, https://arxiv.org/abs/1604.06174)
keeps only the inputs of chosen modules, and the values inside that a *policy* saves. It saves
memory and costs a second forward pass of these modules.
See also https://docs.jax.dev/en/latest/gradient-checkpointing.html.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from course_lib import arguments

MODULES = ("MLP", "Attn", "Block")  # what can be rematerialized; a block is both others

POLICIES = {
    "nothing": (
        "keep nothing inside the module, recompute all of it: the least memory (JAX's default)"
    ),
    "everything": "keep everything: as if there were no rematerialization",
    "dots": "keep the results of all matrix products, recompute the cheap rest",
    "dots_no_batch": (
        "keep the results of products without batch dimensions: dense layers, not attention"
        " scores"
    ),
    "names": "keep only the values whose `checkpoint_name` is in `remat_names`",
    "offload": "move those values to the host's memory, and back for the backward pass",
}
"""The policies: which values inside a rematerialized module are kept."""


def policy(name: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """Returns the JAX checkpoint policy of that name.

    Args:
      name: one of `POLICIES`.
      names: for "names" and "offload": the named values to keep or offload.
    """
    policies = jax.checkpoint_policies
    arguments.one_of("remat_policy", name, POLICIES)
    arguments.refuse(errors(name, names))
    if name == "names":
        return policies.save_only_these_names(*names)
    if name == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return {
        "nothing": policies.nothing_saveable,
        "everything": policies.everything_saveable,
        "dots": policies.dots_saveable,
        "dots_no_batch": policies.dots_with_no_batch_dims_saveable,
    }[name]


def wrap(
    function: Callable[..., Any], name: str, names: Sequence[str] = (), *, in_loop: bool = False
) -> Callable[..., Any]:
    """Returns a function that saves its inputs, and what the policy `name` keeps.

    A compiler that sees the forward pass and its repetition merges them (common subexpression
    elimination), which undoes the rematerialization. JAX's barriers (`prevent_cse`) stop it.
    `in_loop` leaves them out: inside a scan of two layers or more, the forward pass and its
    repetition are in different loops. XLA unrolls a scan of one layer.
    """
    return jax.checkpoint(function, prevent_cse=not in_loop, policy=policy(name, names))


def errors(name: str, names: Sequence[str]) -> Iterator[str]:
    """Yields an error for names that a policy needs and does not get, or would ignore."""
    takes_names = name in ("names", "offload")
    if isinstance(names, str) or takes_names != bool(names):
        must = "name a value, as ('mlp_hidden',)" if takes_names else "be empty, it is ignored,"
        yield f"remat_names={names!r} must {must} for remat_policy={name!r}"


@dataclass(frozen=True)
class Residual:
    """One array that the forward pass leaves for the backward pass."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    why: str  # the argument, the named value, or the operation (and its scope) that made it


def residuals(fn: Callable[..., Any], *args: Any) -> list[Residual]:
    """Lists what `fn` saves for its backward pass with respect to all `args` (arrays or their
    shapes), largest first, also arguments that the backward pass reads.

    `jax.vjp` returns a function that holds the residuals; tracing it shows them and the
    operations that made them, without computing. A compiler may save less: it can recompute
    cheap values, and share memory.
    """
    closed = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args)[1])(*args)
    jaxpr = closed.jaxpr
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(args)
    ]
    why = {var: f"argument {path}" for var, path in zip(jaxpr.invars, paths, strict=True)}
    arrays = []
    # Each value once; literals take no memory.
    for var in dict.fromkeys(v for v in jaxpr.outvars if not hasattr(v, "val")):
        aval: Any = var.aval
        extended = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)  # a random key
        size = 0 if extended else aval.size * np.dtype(aval.dtype).itemsize
        made_by = why.get(var) or _origin(jaxpr, var)
        arrays.append(Residual(size, aval.shape, str(aval.dtype), made_by))
    return sorted(arrays, key=lambda residual: -residual.bytes)


def _origin(jaxpr: Any, var: Any) -> str:
    """Names the operation that made `var`, also inside jitted, scanned and remat functions."""
    for eqn in jaxpr.eqns:
        if var not in eqn.outvars:
            continue
        inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        inner = getattr(inner, "jaxpr", inner)
        # The insides of a kernel return nothing.
        if inner is not None and len(inner.outvars) == len(eqn.outvars):
            return _origin(inner, inner.outvars[list(eqn.outvars).index(var)])
        if eqn.primitive.name == "name":
            return f"named {eqn.params['name']!r}"
        # JAX marks with `reduce_precision` what a rematerialized function saves.
        if eqn.primitive.name == "reduce_precision":
            return _origin(jaxpr, eqn.invars[0])
        if eqn.primitive.name == "device_put":
            return f"{_origin(jaxpr, eqn.invars[0])}, moved to the host"
        scope = re.sub(r"jvp\((\w*)\)", r"\1", str(eqn.source_info.name_stack)).strip("/")
        return f"{eqn.primitive.name} in {scope}" if scope else eqn.primitive.name
    return "input of a loop's body" if var in jaxpr.invars else "constant"
