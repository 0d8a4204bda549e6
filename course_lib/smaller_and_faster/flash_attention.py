"""Flash attention: exact attention that never stores its scores.

Attention's scores take B x H x L x L numbers. Flash attention (Dao et al., 2022,
https://arxiv.org/abs/2205.14135) computes them tile by tile. The *online softmax* (Milakov and
Gimelshein, 2018, https://arxiv.org/abs/1805.02867) rescales the sums so far whenever a later
tile has a larger score. Beside the output, the forward pass saves one number per query: the
logsumexp of its scores. From it the backward pass computes each tile of attention weights
again.

On NVIDIA GPUs `attend` runs as a kernel (`flash_kernels`). Everywhere else it runs as plain
JAX: `forward_by_tiles` and `backward_by_tiles`. In both, memory grows linearly with L.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from course_lib.measure import hardware
from course_lib.measure.hardware import Accelerator, GpuTarget

TILES = (64, 32, 16)  # positions, the best first; a GPU's matrix units want at least 16
# "either": the kernel where the program is compiled for an NVIDIA GPU, tiles in JAX elsewhere.
# "interpreter": the kernel as plain JAX (Pallas' `interpret`).
BY = ("either", "kernel", "tiles", "interpreter")
_SMALLEST = "a5000"  # has the least shared memory of the GPUs that the tests compile for


def attend(
    query: Float[Array, "B L H K"],
    key: Float[Array, "B L G K"],
    value: Float[Array, "B L G K"],
    *,
    causal: bool = True,
    tile: int | None = None,
    by: str = "either",
) -> Float[Array, "B L H K"]:
    """Computes softmax(Q K^T / sqrt(K)) V for every head, without storing the scores.

    The result has the dtype of `query`; scores and sums are float32.

    Args:
      query: B sequences of L positions, H heads of width K.
      key: G heads. Each is read by H / G consecutive heads of queries.
      value: G heads.
      causal: whether a position sees only itself and the positions before it.
      tile: positions per tile; `tile_for` if None.
      by: one of `BY`.
    """
    if by not in BY:
        raise ValueError(f"by={by!r} must be one of {BY}")
    if by == "kernel" and (reason := _why_no_triton()):
        raise ValueError(f"by='kernel' cannot be had: {reason}; by='either' takes tiles in JAX")
    check_arrays(query, key, value)
    if by == "kernel":
        _check_on_gpu(query)
    _, length, _, width = query.shape
    tile = tile_for(width, query.dtype) if tile is None else tile
    check(seq_len=length, head_dim=width, dtype=query.dtype, tile=tile)
    return _attend(query, key, value, causal, tile, by)


def check_arrays(query: Any, key: Any, value: Any) -> None:
    """Refuses arrays with which attention would silently compute wrong numbers."""
    dtypes = query.dtype, key.dtype, value.dtype
    if len(set(dtypes)) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(
            f"query, key and value must be of one floating dtype, not {list(map(str, dtypes))}:"
            " cast them to the compute dtype"
        )
    if query.ndim != 4:
        raise ValueError(f"query of shape {query.shape} must be [B, L, H, K]")
    batch, length, heads, width = query.shape
    if key.shape != value.shape or (*key.shape[:2], *key.shape[3:]) != (batch, length, width):
        raise ValueError(
            f"key of shape {key.shape} and value of shape {value.shape} must be [{batch},"
            f" {length}, G, {width}], as the query is {query.shape}: as many positions of as"
            " many sequences, and heads as wide"
        )
    if heads % key.shape[2]:
        raise ValueError(
            f"key of shape {key.shape} must have a number of heads that divides the query's"
            f" {heads}"
        )


def _check_on_gpu(array: Any) -> None:
    """Refuses an array that lies on another device. A traced one lies nowhere yet."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        platforms = sorted({device.platform for device in array.devices()})
        if platforms != ["gpu"]:
            raise ValueError(
                f"by='kernel' cannot be had: query lies on a {', '.join(platforms)}, and the"
                " kernel runs on NVIDIA GPUs; by='either' takes tiles in JAX"
            )


def tile_for(head_dim: int, dtype: Any) -> int:
    """Returns the largest tile of `TILES` that fits every GPU of `hardware` from 8.0 on."""
    gpu = hardware.get(_SMALLEST)
    for tile in TILES[:-1]:
        if shared_memory(tile, head_dim, dtype, gpu) <= shared_memory_limit(gpu):
            return tile
    check_fits(TILES[-1], head_dim, dtype, gpu)
    return TILES[-1]


def check(*, seq_len: int, head_dim: int, dtype: Any, tile: int | None = None) -> None:
    """Refuses shapes that cannot be cut into tiles (`tile_for` if None), on any device."""
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(
            f"head_dim={head_dim} must be a power of two, at least 16, for flash attention: use"
            " 'reference' or 'xla' attention"
        )
    tile = tile_for(head_dim, dtype) if tile is None else tile
    if tile < 16 or tile & (tile - 1):
        raise ValueError(f"tile={tile!r} must be a power of two, at least 16, such as 64")
    if seq_len % tile:
        raise ValueError(
            f"seq_len={seq_len} must be a multiple of {tile}, the tile of flash attention: pad"
            " the sequences"
        )


def shared_memory(tile: int, head_dim: int, dtype: Any, accelerator: Accelerator) -> int:
    """Returns the bytes of shared memory that a tile of the largest kernel takes, at most.

    The kernel for the gradient of keys and values holds four tiles: of queries, keys, values
    and of the output's gradient. It also holds a tile of attention weights, in float32 two, and
    two float32 numbers per position. On Hopper and on Blackwell in data centers, matrix units
    read operands from shared memory, and with tiles of 64 or more, more copies lie there.

    Fitted to what Triton's compiler asked for in JAX 0.12.0.1, 0.11.2 and 0.10.2, for tiles of
    16 to 128 and heads of 16 to 256: for 16-bit dtypes exactly this, in float32 between half
    and all of it. Another precision, such as "BF16_BF16_F32_X3", can take more.
    """
    capability = _gpu(accelerator).compute_capability
    size = max(2, jnp.dtype(dtype).itemsize)  # 8-bit numbers are counted as 16-bit ones
    copies, weights, more = 4, 1 if size == 2 else 2, 0
    if capability >= (9, 0) and tile >= 64:
        copies = 6
        if capability >= (10, 0) and size == 2:
            copies, more = 8, 64
    return (copies * tile * head_dim + weights * tile * tile) * size + 2 * tile * 4 + more


def check_fits(tile: int, head_dim: int, dtype: Any, accelerator: Accelerator) -> None:
    """Refuses a tile that a GPU's shared memory has no room for."""
    needed = shared_memory(tile, head_dim, dtype, accelerator)
    limit = shared_memory_limit(accelerator)
    if needed > limit:
        raise ValueError(
            f"tile={tile} needs {needed:,} bytes of shared memory for"
            f" head_dim={head_dim} in {jnp.dtype(dtype).name}, and a thread block of the"
            f" {accelerator.title} has {limit:,}: take a smaller tile or narrower heads"
        )


def shared_memory_limit(accelerator: Accelerator) -> int:
    """Returns the bytes of shared memory that one block of threads may take."""
    return _gpu(accelerator).shared_memory_per_block


def _gpu(accelerator: Accelerator) -> GpuTarget:
    hardware.check(accelerator)
    if not isinstance(accelerator.target, GpuTarget):
        raise ValueError(f"accelerator={accelerator.title!r} must be an NVIDIA GPU")
    return accelerator.target


def why_no_kernel(accelerator: Accelerator | None) -> str | None:
    """Returns why tiles in JAX stand in for the kernel on the compiler's target (None: a CPU or
    an unknown device), or None where the kernel runs.
    """
    hardware.check(accelerator)
    if accelerator is None or not isinstance(accelerator.target, GpuTarget):
        return "the kernel is for NVIDIA GPUs that course_lib.measure.hardware knows"
    return _why_no_triton()


def _why_no_triton() -> str | None:
    """Returns why this JAX cannot compile the kernel, on any GPU."""
    if jax.__version_info__ < (0, 9):
        return f"the kernel needs JAX 0.9 or newer, this is {jax.__version__}"
    if not importlib.util.find_spec("jax.experimental.pallas.triton"):
        return f"JAX {jax.__version__} has no Triton backend in Pallas"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attend(query, key, value, causal, tile, by):
    return _forward(query, key, value, causal, tile, by)[0]


def _forward(query, key, value, causal, tile, by):
    out, logsumexp = _choose("forward", by, causal, tile)(query, key, value)
    return out, (query, key, value, out, logsumexp)


def _backward(causal, tile, by, saved, d_out):
    return _choose("backward", by, causal, tile)(*saved, d_out)


_attend.defvjp(_forward, _backward)


def _choose(which: str, by: str, causal: bool, tile: int) -> Callable[..., Any]:
    """Returns the forward or the backward pass, run as `by` says."""
    in_jax: Any = forward_by_tiles if which == "forward" else backward_by_tiles
    tiles = functools.partial(in_jax, causal=causal, tile=tile)
    if by == "tiles" or (by == "either" and _why_no_triton()):
        return tiles
    from course_lib.smaller_and_faster import flash_kernels

    kernel = functools.partial(getattr(flash_kernels, which), causal=causal, tile=tile)
    if by == "interpreter":
        return functools.partial(kernel, interpret=True)
    if by == "kernel":
        return kernel
    # JAX traces both, and lowers the one for the platform that the program is compiled for.
    return lambda *arrays: lax.platform_dependent(*arrays, cuda=kernel, default=tiles)


def forward_by_tiles(
    query: Float[Array, "B L H K"],
    key: Float[Array, "B L G K"],
    value: Float[Array, "B L G K"],
    *,
    causal: bool,
    tile: int,
) -> tuple[Float[Array, "B L H K"], Float[Array, "B H L"]]:
    """Attends with one scan over all pairs of tiles that are not masked entirely; also returns
    the logsumexp of each query's scores, in float32.
    """
    groups = key.shape[2]
    q, k, v = (_cut(x, groups, tile) for x in (query, key, value))
    k, v = k[:, :, :, 0], v[:, :, :, 0]

    def step(state, pair):
        i, j = pair
        top, total, out = (x[i] for x in state)
        s = _scores(q[i], k[j], i, j, causal)
        # The online softmax: a larger score shrinks the sums so far, as if it had come first.
        new_top = jnp.maximum(top, s.max(axis=-1))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(s - new_top[..., None])
        total = total * shrink + weights.sum(axis=-1)
        out = out * shrink[..., None] + _product(
            "bgrts,bgsk->bgrtk", weights.astype(v.dtype), v[j]
        )
        new = new_top, total, out
        return tuple(_put(x, i, x_i) for x, x_i in zip(state, new, strict=True)), None

    numbers = jnp.zeros(q.shape[:-1], jnp.float32)
    state = numbers - jnp.inf, numbers, jnp.zeros(q.shape, jnp.float32)
    (top, total, out), _ = lax.scan(step, state, _pairs(len(q), causal))
    logsumexp = _join((top + jnp.log(total))[..., None])[..., 0].swapaxes(1, 2)
    return _join(out / total[..., None]).astype(query.dtype), logsumexp


def backward_by_tiles(
    query: Float[Array, "B L H K"],
    key: Float[Array, "B L G K"],
    value: Float[Array, "B L G K"],
    out: Float[Array, "B L H K"],
    logsumexp: Float[Array, "B H L"],
    d_out: Float[Array, "B L H K"],
    *,
    causal: bool,
    tile: int,
) -> tuple[Float[Array, "B L H K"], Float[Array, "B L G K"], Float[Array, "B L G K"]]:
    """Returns the gradients of query, key and value: one scan computes the weights again."""
    # The gradient of a softmax subtracts, for each query, the sum of weight times the weight's
    # gradient over all keys. It equals this product, so no pass over the tiles is needed first.
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = delta.swapaxes(1, 2)  # [B H L]
    groups = key.shape[2]
    q, k, v, d_o = (_cut(x, groups, tile) for x in (query, key, value, d_out))
    k, v = k[:, :, :, 0], v[:, :, :, 0]
    logsumexp, delta = (
        _cut(x.swapaxes(1, 2)[..., None], groups, tile)[..., 0] for x in (logsumexp, delta)
    )

    def step(gradients, pair):
        i, j = pair
        d_q, d_k, d_v = gradients
        # The forward pass dropped the weights; the logsumexp makes them again, in one go.
        weights = jnp.exp(_scores(q[i], k[j], i, j, causal) - logsumexp[i][..., None])
        d_weights = _product("bgrtk,bgsk->bgrts", d_o[i], v[j])
        d_scores = (weights * (d_weights - delta[i][..., None])).astype(q.dtype)
        to_q = _product("bgrts,bgsk->bgrtk", d_scores, k[j])
        to_k = _product("bgrts,bgrtk->bgsk", d_scores, q[i])
        to_v = _product("bgrts,bgrtk->bgsk", weights.astype(q.dtype), d_o[i])
        d_q = _put(d_q, i, d_q[i] + to_q)
        return (d_q, _put(d_k, j, d_k[j] + to_k), _put(d_v, j, d_v[j] + to_v)), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    (d_q, d_k, d_v), _ = lax.scan(step, zeros, _pairs(len(q), causal))
    scale = query.shape[-1] ** -0.5
    joined = (_join(x) for x in (d_q * scale, d_k[:, :, :, None] * scale, d_v[:, :, :, None]))
    return tuple(x.astype(query.dtype) for x in joined)


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _pairs(n: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Lists the pairs (tile of queries, tile of keys) that are not masked entirely."""
    seen = np.tri(n, dtype=bool) if causal else np.ones((n, n), bool)
    i, j = np.nonzero(seen)
    return i.astype(np.int32), j.astype(np.int32)


def _scores(q, k, i, j, causal):
    """Computes the scores of tile i of queries and tile j of keys; -inf where masked."""
    s = _product("bgrtk,bgsk->bgrts", q, k) * q.shape[-1] ** -0.5
    if not causal:
        return s
    tile = q.shape[-2]
    row, column = i * tile + jnp.arange(tile), j * tile + jnp.arange(tile)
    return jnp.where((row[:, None] >= column[None, :])[None, None, None], s, -jnp.inf)


def _cut(x, groups, tile):
    """Cuts [B, L, G R, K] into tiles [n, B, G, R, tile, K]; R heads share keys and values."""
    batch, length, heads, width = x.shape
    x = x.reshape(batch, length // tile, tile, groups, heads // groups, width)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _join(x):
    """Joins tiles [n, B, G, R, tile, K] to [B, L, G R, K]."""
    n, batch, groups, shared, tile, width = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, n * tile, groups * shared, width)


def _put(x, i, new):
    return lax.dynamic_update_index_in_dim(x, new, i, axis=0)
