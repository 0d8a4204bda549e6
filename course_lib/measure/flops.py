"""Counts the FLOPs of a function's matrix products, without running or compiling it.

Nearly all arithmetic of a Transformer is in its matrix products: an (M, K) matrix times a (K,
N) matrix takes M N K multiplications and as many additions. JAX lists a function's operations
before anything is compiled (its jaxpr, https://docs.jax.dev/en/latest/jaxpr.html).
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Calls whose insides are not counted here. Passing over them would count too little.
_OPAQUE = (
    "dot_product_attention",
    "ffi_call",
    "custom_partitioning",
    "triton_kernel_call",
    "mosaic_gpu",
    "tpu_custom",
    "ragged_dot",
    "scaled_",
    "shard_map",
)
FULL = "float32 (highest)"  # what a product of float32 counts as that XLA must not round


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products, by the dtype of their operands."""

    total: Mapping[str, int]  # executed
    recomputed: Mapping[str, int]  # the part that rematerialization adds

    @property
    def model(self) -> dict[str, int]:
        """The FLOPs that the model needs, total - recomputed: MFU counts these."""
        return {
            dtype: count - self.recomputed.get(dtype, 0) for dtype, count in self.total.items()
        }


def flops(fn: Callable[..., Any], *args: Any) -> Flops:
    """Counts the FLOPs of the matrix products and convolutions of one call of a function.

    The body of a scan counts as often as it runs, a conditional as its most expensive branch, a
    complex multiplication and addition as 8. Elementwise operations and reductions do not
    count. A Pallas kernel counts as its `cost_estimate`.

    Counts are named by dtype, as `Accelerator.peak_flops`: `{"bfloat16": 1.2e12}`. A product of
    unequal dtypes counts as the wider one, one with a `jax.lax.Precision` as "float32 (high)"
    or "float32 (highest)", and a `jax.lax.DotAlgorithmPreset` as its own dtype. Refused are a
    loop that stops on a condition on data, a kernel without a cost estimate, a `shard_map`.

    Args:
      fn: a function of arrays, jitted or not: a loss, its gradient, a whole train step. Or what
        `jax.jit(f).trace(...)` returned, without `args`.
      *args: its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.
    """
    total: collections.Counter[str] = collections.Counter()
    recomputed: collections.Counter[str] = collections.Counter()
    # A jit with compiler options cannot be inside of another one, which `make_jaxpr` would be.
    if not isinstance(fn, jax.stages.Traced):
        fn = (fn if isinstance(fn, type(jax.jit(flops))) else jax.jit(fn)).trace(*args)
    for dtype, count, again in _products(fn.jaxpr.jaxpr, times=1, again=False):
        total[dtype] += count
        recomputed[dtype] += count if again else 0
    return Flops(dict(total), dict(+recomputed))


def _products(jaxpr: Any, times: int, again: bool) -> list[tuple[str, int, bool]]:
    """Lists (dtype, FLOPs, whether recomputed) of a jaxpr's products."""
    products = []
    for eqn in jaxpr.eqns:
        # JAX puts the recomputation of jax.checkpoint into a scope of this name.
        eqn_again = again or "rematted_computation" in str(eqn.source_info.name_stack)
        name, params = eqn.primitive.name, eqn.params
        if name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            unit, passes = _unit(eqn)
            products.append((unit, times * passes * _flops_of_product(eqn), eqn_again))
        elif name == "pallas_call":
            largest = max((v.aval for v in eqn.invars), key=lambda aval: aval.size)
            products.append((largest.dtype.name, times * _flops_of_kernel(eqn), eqn_again))
        elif name == "cond":
            branches = [
                _products(branch.jaxpr, times, eqn_again) for branch in params["branches"]
            ]
            products += max(branches, key=lambda branch: sum(count for _, count, _ in branch))
        elif name == "while":
            if _products(params["body_jaxpr"].jaxpr, 1, False) + _products(
                params["cond_jaxpr"].jaxpr, 1, False
            ):
                raise ValueError(
                    f"while loop at {str(eqn.source_info.name_stack)!r} must have a known"
                    " number of iterations, since it holds matrix products: use jax.lax.scan,"
                    " or fori_loop with Python integers"
                )
        elif name.startswith(_OPAQUE):
            raise ValueError(
                f"primitive={name!r} must not occur where FLOPs are counted, which cannot see"
                " its products; count the reference implementation on one device"
            )
        elif name == "custom_linear_solve":
            # It carries four programs, three of them for its derivatives.
            products += _products(params["jaxprs"].solve.jaxpr, times, eqn_again)
        elif name == "call_hi_primitive":
            # From JAX 0.12 on, `custom_root` and others are objects that know their program.
            shapes = jax.tree.map(
                lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype),
                params["_prim"].in_avals,
            )
            program = jax.make_jaxpr(params["_prim"].expand)(*shapes)
            products += _products(program.jaxpr, times, eqn_again)
        else:
            repeats = times * params["length"] if name == "scan" else times
            for inner in inner_jaxprs(params):
                products += _products(inner, repeats, eqn_again)
    return products


def _unit(eqn: Any) -> tuple[str, int]:
    """Returns what a product counts as, and how many products XLA makes of it."""
    dtype = max((v.aval.dtype for v in eqn.invars[:2]), key=lambda dtype: dtype.itemsize).name
    precision = eqn.params["precision"]  # of both operands, an algorithm, or None
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        operand, _, rest = precision.name.partition("_")
        units = {"F16": "float16", "BF16": "bfloat16", "TF32": "tensorfloat32", "F32": FULL}
        return units.get(operand, dtype), int(rest.partition("_X")[2] or 1)
    levels = [p.value for p in precision] if isinstance(precision, tuple) else [0]
    return (dtype, "float32 (high)", FULL)[max(levels) * (dtype == "float32")], 1


def inner_jaxprs(params: Mapping[str, Any]) -> list[Any]:
    """Returns the jaxprs that an equation calls: of jit, checkpoint, custom_vjp, scan, ..."""
    values = (v if isinstance(v, tuple | list) else (v,) for v in params.values())
    jaxprs = [getattr(v, "jaxpr", v) for v in itertools.chain(*values)]
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]


def _flops_of_product(eqn: Any) -> int:
    left, right = (v.aval.shape for v in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    # A complex multiplication and addition takes four real ones.
    out *= 8 if eqn.outvars[0].aval.dtype.kind == "c" else 2
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return out * math.prod(left[axis] for axis in contracted)
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        # where rows are summed, each is in one group
        groups = 1 if numbers.rhs_group_dimensions else eqn.invars[2].aval.size
        return out * math.prod(left[axis] for axis in contracted) // groups
    out_channels = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    # In the gradient of a strided convolution, one in `zeros` inputs is not zero.
    zeros = math.prod(eqn.params["lhs_dilation"])
    return out * math.prod(right) // out_channels // zeros


def _flops_of_kernel(eqn: Any) -> int:
    estimate = eqn.params.get("cost_estimate")
    if estimate is None:
        raise ValueError(
            f"pallas_call at {str(eqn.source_info.name_stack)!r} must have a cost_estimate:"
            " the FLOPs of a kernel cannot be seen from outside; pass one to pallas_call, or"
            " count the reference implementation"
        )
    return estimate.flops
