"""The optimizer's memory: how many bytes per parameter its state takes, and ways to take fewer.

AdamW keeps two float32 moments, 8 bytes per parameter. This module has three ways to use fewer:

    adamw_bf16            both moments in bfloat16, rounded stochastically: 4 bytes
    adamw_8bit            both moments in 8 bits, with one float32 scale per block of numbers:
                          2.03 bytes with blocks of 256 (Dettmers et al., 2022,
                          https://arxiv.org/abs/2110.02861)
    round_stochastically  around any optimizer: the parameters themselves in bfloat16, 2 bytes
                          fewer

They are Optax transformations (https://optax.readthedocs.io). Optax itself has Lion, Muon and
Adafactor, which keep 4, 4 and nearly 0 bytes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key, UInt8

from course_lib import arguments
from course_lib.fields import FRACTION

PyTree = Any
with_path = jax.tree_util.tree_map_with_path
ByName = Callable[[str], Any]  # of a parameter: `arguments.name_in_tree`

# Arrays with fewer numbers keep float32 moments: biases and norms save nothing, and are
# sensitive. The limit is `min_8bit_size` of bitsandbytes. Each of stacked layers counts alone.
SMALLEST = 4096
NARROWEST = 16  # likewise rows of fewer numbers, such as a router's: each would be a block


def is_stack(path: Any, stacks: ByName | None = None) -> bool:
    """Returns whether a parameter has a first axis of layers: `stacks(name)`, and if that is
    None, whether it is one of the Transformer's scanned layers, in "block".
    """
    name = arguments.name_in_tree(path)
    return bool(stacks(name)) if stacks else name.startswith("block/")


def bytes_per_parameter(optimizer: optax.GradientTransformation, params: PyTree) -> float:
    """Returns the bytes of an optimizer's state for each parameter; shapes are enough."""
    arguments.optimizer(optimizer)
    state = jax.eval_shape(optimizer.init, params)
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return state_bytes / sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def stochastic_round(key: Key[Array, ""], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds float32 numbers to one of their two bfloat16 neighbours, without bias: a number a
    quarter of the way up, with probability 1/4. What is not finite stays as it is.
    """
    _check_float32(x)
    # bfloat16 is the upper half of a float32: adding a random number to the lower half carries
    # into the upper half with this probability.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


class RoundedState(NamedTuple):
    key: Any  # for the rounding
    inner: Any  # of the optimizer inside


def round_stochastically(
    optimizer: optax.GradientTransformation, seed: ArrayLike = 0
) -> optax.GradientTransformationExtraArgs:
    """Lets an optimizer train bfloat16 parameters that have no float32 copy.

    Near 1, bfloat16 numbers are 2^-7 apart. An update of 1e-4 is lost each time if the sum is
    rounded to the nearest one. Rounded stochastically, it is right on average (Gupta et al.,
    2015, https://arxiv.org/abs/1502.02551).

    The optimizer sees gradients and parameters in float32, so its state is what it is for
    float32 parameters. The updates are float32 differences of bfloat16 numbers:
    `optax.apply_updates` rounds nothing after that.
    """
    arguments.optimizer(optimizer)
    inside = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> RoundedState:
        _check_bfloat16(params)
        return RoundedState(jax.random.key(seed), inside.init(_float32(params)))

    def update(grads: PyTree, state: RoundedState, params: PyTree = None, **extra: Any) -> Any:
        if params is None:
            raise ValueError("params=None must be the parameters: update(grads, state, params)")
        key, noise = jax.random.split(state.key)
        wide = _float32(params)
        updates, inner = inside.update(_float32(grads), state.inner, wide, **extra)

        def between_neighbours(key: Any, update: Array, param: Array) -> Array:
            return stochastic_round(key, param + update).astype(jnp.float32) - param

        keys = optax.tree.split_key_like(noise, params)
        updates = jax.tree.map(between_neighbours, keys, updates, wide)
        return updates, RoundedState(key, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_float32(x: Any) -> None:
    if x.dtype != jnp.float32:
        raise ValueError(f"x of dtype {x.dtype} must be float32: take x.astype(jnp.float32)")


def _float32(tree: PyTree) -> PyTree:
    return optax.tree.cast(tree, jnp.float32)


def _check_bfloat16(params: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype != jnp.bfloat16:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"params{name} is {leaf.dtype} and must be bfloat16")


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """Returns the 256 numbers that 8 bits stand for, in increasing order (float32).

    Seven decades from 1e-7 to 1 (Dettmers et al., section 1.3). Each has twice as many numbers
    as the one below it, so large numbers are precise to a few percent (3% in the largest, 6% if
    `signed`, as first moments are), and small ones still differ from 0.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = 10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2
        values += [*middles, *-middles] if signed else [*middles]
    return np.sort(np.array(values, np.float32))


class Quantized(NamedTuple):
    """An array in 8 bits per number."""

    codes: UInt8[Array, "..."]  # of the array's shape
    # the largest absolute number of each block: the last dimension is divided by its size
    scales: Float[Array, "..."]


def block_length(width: int, block_size: int) -> int:
    """Returns the numbers per block: the largest divisor of `width` up to `block_size`."""
    if block_size < 16:
        raise ValueError(f"block_size={block_size} must be at least 16: each block has a scale")
    length = max(d for d in range(1, min(width, block_size) + 1) if width % d == 0)
    if length < 16:  # the scales would take more than 2 bits per number
        raise ValueError(
            f"block_size={block_size} must have a divisor of the last dimension {width} between"
            f" 16 and itself, but only {length} divides it; pad that dimension"
        )
    return length


def quantize(
    x: Float[Array, "..."], *, signed: bool = True, block_size: int = 256
) -> Quantized:
    """Stores an array in 8 bits per number: scaled to [-1, 1] in each block, then rounded to
    the nearest number of `dynamic_map`.

    Blocks are runs along the last dimension, of `block_length`. A block with a number that is
    not finite becomes NaN. Unless `signed`, a negative number becomes 0, without an error: a
    compiled function cannot look at its values.
    """
    _check_float32(x)
    length = block_length(x.shape[-1], block_size)
    blocks = x.reshape(*x.shape[:-1], -1, length)
    # The largest as whole numbers, of which a NaN's bits make the largest: on CPUs, JAX 0.12's
    # `max` of floats may leave out a NaN (docs/versions.md).
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32).max(axis=-1)
    tops = jax.lax.bitcast_convert_type(bits, jnp.float32)
    scales = jnp.where(jnp.isfinite(tops), tops, jnp.nan)
    units = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    numbers = dynamic_map(signed)
    middles = jnp.asarray((numbers[1:] + numbers[:-1]) / 2)
    codes = jnp.zeros(units.shape, jnp.int32)
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):  # a binary search
        codes = codes + jnp.where(units > _look_up(middles, codes + (bit - 1)), bit, 0)
    if not signed:  # a positive number must not become 0: Adam divides by its root
        codes = jnp.where(units > 0, jnp.maximum(codes, 1), codes)
    return Quantized(codes.astype(jnp.uint8).reshape(x.shape), scales)


def dequantize(quantized: Quantized, *, signed: bool = True) -> Float[Array, "..."]:
    """Returns the float32 array that 8 bits per number stand for."""
    codes, scales = quantized
    units = _look_up(jnp.asarray(dynamic_map(signed)), jnp.asarray(codes, jnp.int32))
    blocks = units.reshape(*scales.shape, -1) * scales[..., None]
    return blocks.reshape(codes.shape)


def _look_up(numbers: Array, places: Array) -> Array:
    # On a mesh with explicit axes, JAX asks how the result is divided.
    return numbers.at[places].get(out_sharding=jax.typeof(places).sharding)


class AdamState(NamedTuple):
    count: Any  # int32, steps so far
    key: Any  # typed random key, if moments are rounded stochastically
    mu: PyTree  # means of the gradients, one entry per parameter, as they are stored
    nu: PyTree  # means of their squares


def scale_by_adam_bf16(
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.999, eps: ArrayLike = 1e-8, seed: ArrayLike = 0
) -> optax.GradientTransformation:
    """Adam's update, with both moments stored in bfloat16: 4 bytes per parameter.

    With b2=0.999 a second moment falls by at most a thousandth per step, and neighbouring
    bfloat16 numbers differ by 1/256 to 1/128: rounded to the nearest one, it would never fall.
    So moments are rounded stochastically.
    """

    def zeros(path: Any, param: Any) -> Array:
        dtype = _wide(param) if jnp.iscomplexobj(param) else jnp.bfloat16
        return jnp.zeros_like(param, dtype=dtype)

    def pack(moment: Array, old: Array, signed: bool, key: Any) -> Array:
        return moment if jnp.iscomplexobj(moment) else stochastic_round(key, moment)

    def unpack(moment: Array, signed: bool) -> Array:
        return moment.astype(_wide(moment))

    return _adam(b1, b2, eps, zeros, pack, unpack, seed)


def scale_by_adam_8bit(
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    block_size: int = 256,
    stacks: ByName | None = None,
) -> optax.GradientTransformation:
    """Adam's update, with both moments stored in 8 bits: 2 + 8 / block bytes per parameter.

    Each step unpacks the moments of an array to float32, computes Adam's update from them, and
    packs them again. Arrays of less than `SMALLEST` numbers, or with rows of less than
    `NARROWEST`, keep float32 moments. Blocks are those of `quantize`; bitsandbytes takes 256
    numbers, the paper 2048. `stacks` is that of `is_stack`.
    """

    def zeros(path: Any, param: Any) -> Any:
        size = math.prod(param.shape[is_stack(path, stacks) :])
        if size < SMALLEST or param.shape[-1] < NARROWEST or jnp.iscomplexobj(param):
            return jnp.zeros_like(param, dtype=_wide(param))
        return _zeros_in_8_bits(param, block_size)

    def pack(moment: Array, old: Any, signed: bool, key: Any) -> Any:
        if not isinstance(old, Quantized):
            return moment
        size = moment.shape[-1] // old.scales.shape[-1]
        return quantize(moment, signed=signed, block_size=size)

    def unpack(moment: Any, signed: bool) -> Array:
        if isinstance(moment, Quantized):
            return dequantize(moment, signed=signed)
        return moment

    return _adam(b1, b2, eps, zeros, pack, unpack, None)


def _zeros_in_8_bits(param: Any, block_size: int) -> Quantized:
    """Returns zeros where a parameter lies. With explicit axes, each block is on one device."""
    # what explicit axes divide, also while a function is traced
    explicit = jax.eval_shape(lambda x: x, param).sharding
    own = explicit.shard_shape(param.shape)[-1] if explicit else param.shape[-1]
    blocks = param.shape[-1] // block_length(own, block_size)
    place = getattr(param, "sharding", None) or explicit
    if isinstance(place, NamedSharding):
        spec = (*place.spec, *[None] * param.ndim)[: param.ndim]
        parts = param.shape[-1] // place.shard_shape(param.shape)[-1]
        spec = spec if blocks % parts == 0 else spec[:-1]
        place = NamedSharding(place.mesh, P(*spec), memory_kind=place.memory_kind)
    else:
        place = None
    scales = jax.lax.full_like(param, 0, jnp.float32, (*param.shape[:-1], blocks), place)
    return Quantized(jnp.zeros_like(param, dtype=jnp.uint8), scales)


def _wide(x: Any) -> Any:
    """Returns the dtype in which an array's moments are computed."""
    return jnp.complex64 if jnp.iscomplexobj(x) else jnp.float32


def _adam(
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    zeros: Callable[[Any, Any], Any],
    pack: Callable[[Array, Any, bool, Any], Any],
    unpack: Callable[[Any, bool], Array],
    seed: ArrayLike | None,
) -> optax.GradientTransformation:
    """Adam with moments that start as `zeros` of a path and a parameter. `pack` stores a new
    one as the old one is stored, and `unpack` returns it as float32.
    """
    for name, value in dict(b1=b1, b2=b2).items():
        if isinstance(value, int | float) and not FRACTION.holds(value):
            raise ValueError(f"{name}={value} must {FRACTION.must}")

    def init(params: PyTree) -> AdamState:
        key = None if seed is None else jax.random.key(seed)
        mu, nu = (with_path(zeros, params) for _ in range(2))
        return AdamState(jnp.zeros((), jnp.int32), key, mu, nu)

    def update(grads: PyTree, state: AdamState, params: PyTree = None) -> Any:
        count = optax.safe_increment(state.count)
        structure: Any
        leaves, structure = jax.tree.flatten(grads)
        moments = (structure.flatten_up_to(tree) for tree in (state.mu, state.nu))
        keys: list[Any] = [None] * (2 * len(leaves) + 1)
        if state.key is not None:
            keys = list(jax.random.split(state.key, 2 * len(leaves) + 1))
        corrections = 1 - jnp.float32(b1) ** count, 1 - jnp.float32(b2) ** count

        def of_leaf(leaf: Array, mu: Any, nu: Any, pair: Any) -> tuple[Array, Any, Any]:
            grad = leaf.astype(_wide(leaf))
            mean: Any = b1 * unpack(mu, True) + (1 - b1) * grad
            square: Any = b2 * unpack(nu, False) + (1 - b2) * (grad * grad.conj())
            root = jnp.sqrt(square / corrections[1])
            update = mean / corrections[0] / (root + eps)
            stored = pack(mean, mu, True, pair[0]), pack(square, nu, False, pair[1])
            return update.astype(leaf.dtype), *stored

        pairs = zip(keys[1::2], keys[2::2], strict=True)
        results = list(map(of_leaf, leaves, *moments, pairs))
        columns = ([result[i] for result in results] for i in range(3))
        updates, mu, nu = map(structure.unflatten, columns)
        return updates, AdamState(count, keys[0], mu, nu)

    return optax.GradientTransformation(init, update)


def adamw_bf16(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    weight_decay: ArrayLike = 1e-4,
    mask: Any = None,
    seed: ArrayLike = 0,
) -> optax.GradientTransformation:
    """Returns `optax.adamw` with the moments of `scale_by_adam_bf16`."""
    adam = scale_by_adam_bf16(b1, b2, eps, seed)
    return _with_decay(adam, learning_rate, weight_decay, mask)


def adamw_8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    weight_decay: ArrayLike = 1e-4,
    mask: Any = None,
    block_size: int | Array = 256,
    stacks: ByName | None = None,
) -> optax.GradientTransformation:
    """Returns `optax.adamw` with the moments of `scale_by_adam_8bit`."""
    if isinstance(block_size, jax.Array):
        raise ValueError(
            f"block_size={block_size} must be a number of Python: take"
            " optax.inject_hyperparams(adamw_8bit, static_args='block_size')"
        )
    adam = scale_by_adam_8bit(b1, b2, eps, block_size, stacks)
    return _with_decay(adam, learning_rate, weight_decay, mask)


def _with_decay(
    adam: optax.GradientTransformation, rate: Any, weight_decay: Any, mask: Any
) -> optax.GradientTransformation:
    return optax.chain(
        adam,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(rate),
    )
