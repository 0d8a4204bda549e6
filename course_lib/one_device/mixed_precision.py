"""Mixed precision: floating-point formats, policies, and loss scaling.

Mixed precision (Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740) keeps a float32
master copy of the parameters and computes in 16 bits. bfloat16 has float32's range, and needs
nothing more. float16 has a narrow one: small gradients become zero. *Loss scaling* multiplies
the loss, and by the chain rule every gradient, by a large number, and divides it out in
float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float

from course_lib import arguments
from course_lib.one_device.gradient_accumulation import change_entry

PyTree = Any

# From wide to narrow.
FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Format:
    """The range and precision of a floating-point format."""

    name: str  # in JAX
    bits: int  # of one number: the sign, the exponent and the mantissa
    exponent_bits: int  # they set the range
    mantissa_bits: int  # they set the precision; the leading one is not stored, and not counted
    largest: float  # finite number
    smallest_normal: float  # positive number at full precision
    # positive number; some hardware, and XLA in places, rounds subnormal numbers to zero
    smallest_subnormal: float
    epsilon: float  # distance from 1 to the next larger number


def describe(dtype: Any, argument: str = "dtype") -> Format:
    """Returns the properties of a floating dtype, named `argument` in errors."""
    try:
        # NumPy takes None for float64, and has an info of complex dtypes, too.
        is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # there is no such dtype
        is_floating = False
    if not is_floating:
        raise ValueError(
            f"{argument}={dtype!r} must be a floating dtype, such as {list(FORMATS)}"
        )
    info = jnp.finfo(dtype)
    return Format(
        name=jnp.dtype(dtype).name,
        bits=int(info.bits),
        exponent_bits=int(info.nexp),
        mantissa_bits=int(info.nmant),
        largest=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        epsilon=float(info.eps),
    )


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of computation and output. Casts change floating arrays only. Parameters, their
    gradients and the optimizer state keep the dtype in which `init` made them.
    """

    compute_dtype: Any  # of parameters and activations inside the model
    output_dtype: Any  # of the loss, and of all sums and means after the model

    def __post_init__(self):
        describe(self.compute_dtype, "compute_dtype")
        describe(self.output_dtype, "output_dtype")

    def wrap(self, loss_fn: Callable) -> Callable:
        """Returns the loss function `loss_fn(params, batch, rng) -> (loss, metrics)`, computed
        under this policy. It casts the parameters, and `inputs` of the batch, which is a dict,
        or a tuple or dataclass with names. The weights of labels are summed: they stay as they
        are.

        A model with a compute dtype of its own (Flax's `dtype=`) overrides the policy: leave it
        None there (of an `nnx.Embed`, once it is made: `embed.dtype = None`).
        """

        def cast(tree, dtype):
            return jax.tree.map(lambda x: x.astype(dtype) if _is_floating(x) else x, tree)

        def in_policy(params, batch, rng):
            batch, has_inputs = change_entry(
                batch, "inputs", lambda x: cast(x, self.compute_dtype)
            )
            if not has_inputs and any(map(_is_floating, jax.tree.leaves(batch))):
                raise ValueError(
                    f"batch={jax.tree.map(jnp.shape, batch)} must have an entry 'inputs', which"
                    " the policy casts: other floating arrays, such as weights of labels, stay"
                    " as they are, and would make the model compute in their dtype"
                )
            # The cast is differentiated, so a gradient has its parameter's dtype.
            return cast(
                loss_fn(cast(params, self.compute_dtype), batch, rng), self.output_dtype
            )

        return in_policy


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


POLICIES = {
    "float32": Policy(jnp.float32, jnp.float32),
    "bfloat16": Policy(jnp.bfloat16, jnp.float32),
    "float16": Policy(jnp.float16, jnp.float32),  # needs a loss scale
}


def policy(name: str) -> Policy:
    """Returns the policy named after its compute dtype; parameters and outputs are float32."""
    arguments.one_of("policy", name, POLICIES)
    return POLICIES[name]


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Returns whether no floating number in the tree is infinite or NaN."""
    leaves = filter(_is_floating, jax.tree.leaves(tree))
    return jnp.all(jnp.array([jnp.isfinite(leaf).all() for leaf in leaves], jnp.bool_))


@struct.dataclass
class NoLossScale:
    """No loss scaling: for float32 and bfloat16. Costs nothing, and no step is skipped."""

    def scale(self, loss: Array) -> Array:
        return loss

    def unscale(self, grads: PyTree) -> PyTree:
        return grads

    def update(self, finite: Array) -> "NoLossScale":
        return self


@struct.dataclass
class StaticLossScale:
    """A loss scale that never changes."""

    # float32, multiplies the loss. A power of two only shifts exponents: no digit is lost
    value: Any = 2.0**15

    def __post_init__(self):
        is_number = isinstance(self.value, float | int | np.generic)
        if isinstance(self.value, str) or is_number and not 0 < float(self.value) < math.inf:
            raise ValueError(f"value={self.value!r} must be positive and finite, as 2.0**15")

    def scale(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        return loss * jnp.asarray(self.value, loss.dtype)

    def unscale(self, grads: PyTree) -> PyTree:
        # In float32: float16 would underflow, which is what the scale prevents.
        return jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.float32(self.value), grads)

    def update(self, finite: Bool[Array, ""]) -> "StaticLossScale":
        return self  # after a skipped step the next one is tried with the same scale


@struct.dataclass
class DynamicLossScale(StaticLossScale):
    """A loss scale that backs off when gradients overflow, and grows again after a while.

    Defaults as in
    https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html
    """

    good_steps: Any = 0  # int32, with finite gradients, since the scale last changed
    # after so many good steps the scale grows
    growth_interval: int = struct.field(pytree_node=False, default=2000)
    # multiplies the scale to grow it, divides it to back off
    factor: float = struct.field(pytree_node=False, default=2.0)
    smallest: float = struct.field(pytree_node=False, default=1.0)  # bounds of `value`
    largest: float = struct.field(pytree_node=False, default=2.0**24)

    def __post_init__(self):
        super().__post_init__()
        if not self.growth_interval >= 1:
            raise ValueError(f"growth_interval={self.growth_interval} must be at least 1 step")
        if not 1 < self.factor < math.inf:
            raise ValueError(f"factor={self.factor} must be above 1 and finite: 2.0 is usual")
        if not 0 < self.smallest <= self.largest < math.inf:
            bounds = f"smallest={self.smallest}, largest={self.largest}"
            raise ValueError(f"{bounds} must be 0 < smallest <= largest < infinity")
        # A number, not an array of a state. An int would change its dtype at the first update.
        if isinstance(self.value, float | int | np.number):
            object.__setattr__(self, "value", float(self.value))
            if not self.smallest <= self.value <= self.largest:
                raise ValueError(
                    f"value={self.value} must be from smallest={self.smallest} to"
                    f" largest={self.largest}: the next update would clip it to these bounds"
                )

    def update(self, finite: Bool[Array, ""]) -> "DynamicLossScale":
        """Returns the scale for the next step. If a gradient of this step was not finite, its
        update is skipped.
        """
        value, good_steps = jnp.float32(self.value), jnp.int32(self.good_steps) + 1
        grows = finite & (good_steps >= self.growth_interval)
        value = jnp.where(
            finite, jnp.where(grows, value * self.factor, value), value / self.factor
        )
        value = jnp.clip(value, self.smallest, self.largest)
        return dataclasses.replace(
            self, value=value, good_steps=jnp.where(finite & ~grows, good_steps, 0)
        )


LossScale = NoLossScale | StaticLossScale  # a DynamicLossScale is a StaticLossScale

LOSS_SCALES = {"none": NoLossScale, "static": StaticLossScale, "dynamic": DynamicLossScale}


def check_value(loss_scale: LossScale) -> None:
    """Refuses what is no loss scale, and one whose array no update would make positive."""
    if not hasattr(loss_scale, "unscale"):
        raise ValueError(
            f"loss_scale={loss_scale!r} must be a loss scale, as DynamicLossScale()"
        )
    value = getattr(loss_scale, "value", 1.0)  # a number was looked at when it was made
    if isinstance(value, jax.Array | np.ndarray) and not isinstance(value, jax.core.Tracer):
        StaticLossScale(np.asarray(value)[()])


def check_loss_scale(policy: Policy | None, loss_scale: LossScale) -> None:
    """Refuses to compute in float16 without a loss scale: small gradients would become 0."""
    in_float16 = policy and jnp.dtype(policy.compute_dtype) == jnp.float16
    if in_float16 and isinstance(loss_scale, NoLossScale):
        raise ValueError(
            f"loss_scale={loss_scale!r} must scale the loss for a policy that computes in"
            " float16: small gradients would become 0; use init_state(...,"
            " loss_scale=mixed_precision.DynamicLossScale())"
        )


def loss_scale(name: str) -> LossScale:
    """Returns a loss scale by name, with its defaults."""
    arguments.one_of("loss_scale", name, LOSS_SCALES)
    return LOSS_SCALES[name]()
