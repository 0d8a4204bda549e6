"""The optimizer's memory: how many bytes per parameter its state takes, and ways to take fewer.

AdamW keeps two float32 moments, 8 bytes per parameter. This module has three ways to use fewer:

    scale_by_adam_bf16    both moments in bfloat16, rounded stochastically: 4 bytes
    scale_by_adam_8bit    both moments in 8 bits, with one float32 scale per block of numbers:
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
from jaxtyping import Array, Float, Key, UInt8
from optax.contrib import MuonDimensionNumbers

from course_lib import arguments
from course_lib.fields import FRACTION

PyTree = Any
with_path = jax.tree_util.tree_map_with_path
ByName = Callable[[str], Any]  # of a parameter: `arguments.name_in_tree`

# Arrays with fewer numbers keep float32 moments: biases and norms save nothing, and are
# sensitive. The limit is that of bitsandbytes, https://huggingface.co/docs/bitsandbytes.
# Each of stacked layers counts by itself.
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
    optimizer: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformation:
    """Lets an optimizer train bfloat16 parameters that have no float32 copy.

    Near 1, bfloat16 numbers are 2^-7 apart. An update of 1e-4 is lost each time if the sum is
    rounded to the nearest one. Rounded stochastically, it is right on average (Gupta et al.,
    2015, https://arxiv.org/abs/1502.02551).

    The optimizer sees gradients and parameters in float32, so its state is what it is for
    float32 parameters. The updates are float32 differences of bfloat16 numbers:
    `optax.apply_updates` rounds nothing after that.
    """
    arguments.optimizer(optimizer)

    def init(params: PyTree) -> RoundedState:
        _check_bfloat16(params)
        return RoundedState(jax.random.key(seed), optimizer.init(_float32(params)))

    def update(grads: PyTree, state: RoundedState, params: PyTree = None) -> Any:
        if params is None:
            raise ValueError("params=None must be the parameters: update(grads, state, params)")
        key, noise = jax.random.split(state.key)
        wide = _float32(params)
        updates, inner = optimizer.update(_float32(grads), state.inner, wide)

        def between_neighbours(key: Any, update: Array, param: Array) -> Array:
            return stochastic_round(key, param + update).astype(jnp.float32) - param

        keys = optax.tree.split_key_like(noise, params)
        updates = jax.tree.map(between_neighbours, keys, updates, wide)
        return updates, RoundedState(key, inner)

    return optax.GradientTransformation(init, update)


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
        codes = codes + jnp.where(units > middles[codes + (bit - 1)], bit, 0)
    if not signed:  # a positive number must not become 0: Adam divides by its root
        codes = jnp.where(units > 0, jnp.maximum(codes, 1), codes)
    return Quantized(codes.astype(jnp.uint8).reshape(x.shape), scales)


def dequantize(quantized: Quantized, *, signed: bool = True) -> Float[Array, "..."]:
    """Returns the float32 array that 8 bits per number stand for."""
    codes, scales = quantized
    units = jnp.asarray(dynamic_map(signed))[codes.astype(jnp.int32)]
    blocks = units.reshape(*scales.shape, -1) * scales[..., None]
    return blocks.reshape(codes.shape)


class AdamState(NamedTuple):
    count: Any  # int32, steps so far
    key: Any  # typed random key, if moments are rounded stochastically
    mu: PyTree  # means of the gradients, one entry per parameter, as they are stored
    nu: PyTree  # means of their squares


def scale_by_adam_bf16(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, seed: int = 0
) -> optax.GradientTransformation:
    """Adam's update, with both moments stored in bfloat16: 4 bytes per parameter.

    With b2=0.999 a second moment falls by at most a thousandth per step, and neighbouring
    bfloat16 numbers differ by 1/256 to 1/128: rounded to the nearest one, it would never fall.
    So moments are rounded stochastically.
    """
    return _adam(
        b1,
        b2,
        eps,
        pack=lambda moment, signed, key, size: stochastic_round(key, moment),
        unpack=lambda moment, signed: moment.astype(jnp.float32),
        seed=seed,
    )


def scale_by_adam_8bit(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    block_size: int = 256,
    stacks: ByName | None = None,
) -> optax.GradientTransformation:
    """Adam's update, with both moments stored in 8 bits: 2 + 8 / block bytes per parameter.

    Each step unpacks the moments of an array to float32, computes Adam's update from them, and
    packs them again. Arrays of less than `SMALLEST` numbers, or with rows of less than
    `NARROWEST`, keep float32 moments. Blocks are those of `quantize`; bitsandbytes takes 256
    numbers, the paper 2048. `stacks` is that of `is_stack`.
    """

    def pack(moment: Array, signed: bool, key: Any, size: int) -> Any:
        if size < SMALLEST or moment.shape[-1] < NARROWEST:
            return moment
        return quantize(moment, signed=signed, block_size=block_size)

    def unpack(moment: Any, signed: bool) -> Array:
        if isinstance(moment, Quantized):
            return dequantize(moment, signed=signed)
        return moment

    return _adam(b1, b2, eps, pack, unpack, None, stacks)


def _adam(
    b1: float,
    b2: float,
    eps: float,
    pack: Callable[[Array, bool, Any, int], Any],
    unpack: Callable[[Any, bool], Array],
    seed: int | None,
    stacks: ByName | None = None,
) -> optax.GradientTransformation:
    """Adam with moments that `pack` stores and `unpack` returns as float32."""
    for name, value in dict(b1=b1, b2=b2).items():
        if isinstance(value, int | float) and not FRACTION.holds(value):
            raise ValueError(f"{name}={value} must {FRACTION.must}")

    def size_of(path: Any, leaf: Any) -> int:
        """Returns how many numbers an array has, or a layer of a stack."""
        return math.prod(leaf.shape[is_stack(path, stacks) :])

    def init(params: PyTree) -> AdamState:
        key = None if seed is None else jax.random.key(seed)

        def packed_zeros(path: Any, param: Any) -> Any:
            # All-zero codes with scales of 0 are 0.
            moment, size = jax.ShapeDtypeStruct(param.shape, jnp.float32), size_of(path, param)
            packed = jax.eval_shape(lambda x: pack(x, True, jax.random.key(0), size), moment)
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), packed)

        mu, nu = (with_path(packed_zeros, params) for _ in range(2))
        return AdamState(jnp.zeros((), jnp.int32), key, mu, nu)

    def update(grads: PyTree, state: AdamState, params: PyTree = None) -> Any:
        count = state.count + 1
        structure: Any
        leaves, structure = jax.tree_util.tree_flatten_with_path(grads)
        moments = (structure.flatten_up_to(tree) for tree in (state.mu, state.nu))
        keys: list[Any] = [None] * (2 * len(leaves) + 1)
        if state.key is not None:
            keys = list(jax.random.split(state.key, 2 * len(leaves) + 1))
        corrections = 1 - jnp.float32(b1) ** count, 1 - jnp.float32(b2) ** count

        def of_leaf(leaf: Any, mu: Any, nu: Any, pair: Any) -> tuple[Array, Any, Any]:
            size, grad = size_of(*leaf), leaf[1].astype(jnp.float32)
            mean = b1 * unpack(mu, True) + (1 - b1) * grad
            square = b2 * unpack(nu, False) + (1 - b2) * grad**2
            root = jnp.sqrt(square / corrections[1])
            update = mean / corrections[0] / (root + eps)
            return update, pack(mean, True, pair[0], size), pack(square, False, pair[1], size)

        pairs = zip(keys[1::2], keys[2::2], strict=True)
        results = map(of_leaf, leaves, *moments, pairs)
        updates, mu, nu = map(structure.unflatten, zip(*results, strict=True))
        return updates, AdamState(count, keys[0], mu, nu)

    return optax.GradientTransformation(init, update)


def per_layer(
    optimizer: optax.GradientTransformation, stacks: ByName | None = None
) -> optax.GradientTransformation:
    """Lets an optimizer treat each layer of a stack (`is_stack`) as parameters of its own.

    Adafactor takes means over a whole array: it would make other updates of stacked layers than
    of single ones.
    """

    def over_layers(function: Callable[..., Any], params: PyTree, *rest: PyTree) -> Any:
        trees = params, *rest
        leaves = jax.tree_util.tree_leaves_with_path(params)
        stacked = {path: is_stack(path, stacks) for path, _ in leaves}

        def axis(path: Any) -> int | None:
            # An array of the state has the path of its parameter at the end.
            ends = (path[i:] for i in range(len(path)))
            param = next((end for end in ends if end in stacked), None)
            return 0 if stacked.get(param) else None  # None: shared, as counts of steps

        def axes(tree: PyTree) -> PyTree:
            return with_path(lambda path, _: axis(path), tree)

        def of_one_layer(*trees: PyTree) -> Any:
            return function(
                *with_path(lambda path, x: x if axis(path) is None else x[0], trees)
            )

        if not any(stacked.values()):
            return function(*trees)
        result = axes(jax.eval_shape(of_one_layer, *trees))
        return jax.vmap(function, axes(trees), result)(*trees)

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> Any:
        return over_layers(optimizer.update, grads, state, params)

    init = functools.partial(over_layers, optimizer.init)
    return optax.GradientTransformation(init, update)


def matrices(
    params: PyTree, where: ByName | None = None, stacks: ByName | None = None
) -> PyTree:
    """Returns which parameters are matrices for Muon, and their axes.

    For the Transformer, they are the kernels inside the layers; each scanned layer, and each
    expert, has one of its own. All else is left to Adam, as Muon's author does (Jordan et al.,
    2024, https://kellerjordan.github.io/posts/muon): it has None in the tree that is returned.
    Parameters with matrices of which none is in a layer are refused: Adam would train them all.

    For any other model, `where(name)`, with a name as "blocks/0/up/kernel", says True for those
    that have two axes, or three in a stack (`is_stack`), and the `MuonDimensionNumbers` of
    those with more. Arrays with fewer axes are Adam's, whatever it says.
    """

    def of_leaf(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        if where is not None:
            chosen = where(name := arguments.name_in_tree(path))
            if isinstance(chosen, MuonDimensionNumbers):
                return chosen
            first = int(is_stack(path, stacks))
            if chosen and leaf.ndim > first + 2:
                raise ValueError(
                    f"where({name!r})={chosen!r} must be MuonDimensionNumbers for an array of"
                    f" shape {leaf.shape}: which axes are a matrix's inputs, which its outputs?"
                    " If the first one is that of layers, `stacks` can say so"
                )
            is_matrix = chosen and leaf.ndim == first + 2
            return MuonDimensionNumbers(first, first + 1) if is_matrix else None
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        if not names or not names[0].startswith("block") or names[-1] != "kernel":
            return None
        module = names[-2]
        batch = (names[0] == "block") + module.startswith("expert")  # layers, experts
        axes = tuple(range(batch, leaf.ndim))
        inputs = axes[:-1] if module == "output_layer" else axes[:1]
        return MuonDimensionNumbers(inputs, axes[len(inputs) :])

    chosen = with_path(of_leaf, params)
    if not jax.tree.leaves(chosen) and any(x.ndim > 1 for x in jax.tree.leaves(params)):
        raise ValueError(
            "params must have a kernel in a layer, as params['block_0']['mlp']['kernel'], or"
            " `optimizers.get('muon', rate, matrices=where)` chooses others: Muon would leave"
            " all to Adam"
        )
    return chosen
