"""Flash attention: exact attention that never stores its scores.

Attention's scores take B x H x L x L numbers. Flash attention (Dao et al., 2022,
https://arxiv.org/abs/2205.14135) computes them tile by tile. The *online softmax* (Milakov and
Gimelshein, 2018, https://arxiv.org/abs/1805.02867) rescales the sums so far whenever a later
tile has a larger score. Beside the output, the forward pass saves one number per query: the
logsumexp of its scores. From it the backward pass computes each tile of attention weights
again.

On NVIDIA GPUs `attend` runs as a kernel (`flash_kernels`). Everywhere else it runs as plain
JAX: `forward_by_tiles` and `backward_by_tiles`. In both, memory grows linearly with L.

Each query sees an interval of keys. The causal mask, sliding windows and several documents in a
row are all intervals, so two numbers per query describe them (`spans`).
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from course_lib.measure import hardware
from course_lib.measure.hardware import Accelerator, GpuTarget

TILES = (64, 32, 16)  # positions, the best first; a GPU's matrix units want at least 16
# "either": the kernel where the program is compiled for an NVIDIA GPU, tiles in JAX elsewhere.
# "interpreter": the kernel as plain JAX (Pallas' `interpret`). "cudnn": NVIDIA's kernel.
BY = ("either", "kernel", "tiles", "interpreter", "cudnn")
# A score that is masked. With -inf, a tile that a query sees nothing of gives exp(-inf + inf).
HIDDEN = -1e30


class Tiling(NamedTuple):
    """How the scores are cut into tiles, and which of them are skipped."""

    tile: int  # positions
    scale: float  # of the products of queries and keys
    causal: bool = True
    window: int | None = None  # positions that one sees, its own included

    def pairs(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Lists the pairs (tile of queries, tile of keys) that causal mask and window leave."""
        n = -(-length // self.tile)
        i, j = np.ogrid[:n, :n]
        seen = (i >= j) | (not self.causal)
        if self.window is not None:  # between the two nearest positions of the tiles
            seen &= abs(i - j) * self.tile - (self.tile - 1) < self.window
        i, j = np.nonzero(seen)
        return i.astype(np.int32), j.astype(np.int32)


def attend(
    query: Float[Array, "B L H K"],
    key: Float[Array, "B L G K"],
    value: Float[Array, "B L G K"],
    *,
    causal: bool = True,
    window: int | None = None,
    documents: Int[Array, "B L"] | None = None,
    tile: int | None = None,
    by: str = "either",
) -> Float[Array, "B L H K"]:
    """Computes softmax(Q K^T / sqrt(K)) V for every head, without storing the scores.

    The result has the dtype of `query`; scores and sums are float32.

    Args:
      query: B sequences of L positions, H heads of width K. Any L works: the last tile is
        filled up.
      key: G heads. Each is read by H / G consecutive heads of queries.
      value: G heads.
      causal: whether a position sees only itself and the positions before it.
      window: a position sees itself and `window - 1` positions before it (without `causal`,
        also after it); all if None.
      documents: neighbours with equal numbers are one document (*segment ids*). No position
        sees another document.
      tile: positions per tile; `tile_for` if None.
      by: one of `BY`.
    """
    if by not in BY:
        raise ValueError(f"by={by!r} must be one of {BY}")
    check_arrays(query, key, value)
    _check_mask(query.shape[:2], window, documents)
    reason = {"kernel": _why_no_triton(), "cudnn": why_no_cudnn(query)}.get(by)
    if reason:
        raise ValueError(f"by={by!r} cannot be had: {reason}; by='either' works here")
    if by == "cudnn" or (by == "either" and _why_no_triton() and not why_no_cudnn(query)):
        return by_library(query, key, value, causal, window, documents)
    batch, length, _, width = query.shape
    tile = tile_for(width, query.dtype) if tile is None else tile
    if not isinstance(tile, int) or tile < 16 or tile & (tile - 1):
        raise ValueError(f"tile={tile!r} must be a power of two, at least 16, such as 64")
    more = -length % tile
    if documents is None and (window is not None or (more and not causal)):
        documents = jnp.zeros((batch, length), jnp.int32)
    if more and documents is not None:  # what fills up the last tile is a document of its own
        filled = jnp.repeat(documents[:, -1:] + 1, more, axis=1)
        documents = jnp.concatenate([documents, filled], axis=1)
    if more:
        fill = functools.partial(jnp.pad, pad_width=[(0, 0), (0, more), (0, 0), (0, 0)])
        query, key, value = map(fill, (query, key, value))
    span = None if documents is None else spans(documents, causal, window)
    tiling = Tiling(tile, width**-0.5, causal, window)
    return _attend(query, key, value, span, tiling, by)[:, :length]


def spans(documents: Int[Array, "B L"], causal: bool, window: int | None) -> Any:
    """Returns the first and last key that each query sees [B L 2], and the first and last query
    that sees each key [B L 2].
    """
    position = jnp.broadcast_to(jnp.arange(documents.shape[1]), documents.shape)
    change = documents[:, 1:] != documents[:, :-1]
    begins = jnp.pad(change, [(0, 0), (1, 0)], constant_values=True)
    ends = jnp.pad(change, [(0, 0), (0, 1)], constant_values=True)
    first = lax.cummax(jnp.where(begins, position, 0), axis=1)
    last = lax.cummin(jnp.where(ends, position, position[0, -1]), axis=1, reverse=True)
    if window is not None:
        first = jnp.maximum(first, position - window + 1)
        last = jnp.minimum(last, position + window - 1)
    keys, queries = (first, position if causal else last), (position if causal else first, last)
    return jnp.stack(keys, axis=-1), jnp.stack(queries, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(query, key, value, span, tiling, by):
    return _forward(query, key, value, span, tiling, by)[0]


def _forward(query, key, value, span, tiling, by):
    out, logsumexp = _choose("forward", by, tiling)(query, key, value, span)
    return out, (query, key, value, span, out, logsumexp)


def _backward(tiling, by, saved, d_out):
    *arrays, out, logsumexp = saved
    # The gradient of a softmax subtracts, for each query, the sum of weight times the weight's
    # gradient over all keys. It equals this product, so no pass over the tiles is needed first.
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    run = _choose("backward", by, tiling)
    return *run(*arrays, logsumexp, delta.swapaxes(1, 2), d_out), None


_attend.defvjp(_forward, _backward)


def _choose(which: str, by: str, tiling: Tiling) -> Callable[..., Any]:
    """Returns the forward or the backward pass, run as `by` says."""
    in_jax: Any = forward_by_tiles if which == "forward" else backward_by_tiles
    tiles = functools.partial(in_jax, tiling=tiling)
    if by == "tiles" or (by == "either" and _why_no_triton()):
        return tiles
    from course_lib.smaller_and_faster import flash_kernels

    kernel = functools.partial(getattr(flash_kernels, which), tiling=tiling)
    if by in ("kernel", "interpreter"):
        return functools.partial(kernel, interpret=by == "interpreter")
    # JAX traces both, and lowers the one for the platform that the program is compiled for.
    return lambda *arrays: lax.platform_dependent(*arrays, cuda=kernel, default=tiles)


def forward_by_tiles(query, key, value, span=None, *, tiling):
    """Attends with one scan over pairs of tiles; also returns the scores' logsumexp [B H L]."""
    groups, tile = key.shape[2], tiling.tile
    q, k, v = (_cut(x, groups, tile) for x in (query, key, value))
    k, v, keys = k[:, :, :, 0], v[:, :, :, 0], span and _cut(span[0][:, :, None], 1, tile)

    def step(state, pair):
        i, j = pair
        top, total, out = (x[i] for x in state)
        s = _scores(q[i], k[j], i, j, tiling, keys)
        # The online softmax: a larger score shrinks the sums so far, as if it had come first.
        new_top = jnp.maximum(top, s.max(axis=-1))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(s - new_top[..., None])
        total = total * shrink + weights.sum(axis=-1)
        out = out * shrink[..., None] + _product(
            "bgrts,bgsk->bgrtk", weights.astype(v.dtype), v[j]
        )
        new = new_top, total, out
        return tuple(_put(x, x_i, i) for x, x_i in zip(state, new, strict=True)), None

    numbers = jnp.zeros(q.shape[:-1], jnp.float32)
    state = numbers - jnp.inf, numbers, jnp.zeros(q.shape, jnp.float32)
    (top, total, out), _ = lax.scan(step, state, tiling.pairs(query.shape[1]))
    logsumexp = _join((top + jnp.log(total))[..., None])[..., 0].swapaxes(1, 2)
    return _join(out / total[..., None]).astype(query.dtype), logsumexp


def backward_by_tiles(query, key, value, span, logsumexp, delta, d_out, *, tiling):
    """Returns the gradients of query, key and value: one scan computes the weights again."""
    groups, tile = key.shape[2], tiling.tile
    q, k, v, d_o = (_cut(x, groups, tile) for x in (query, key, value, d_out))
    k, v, keys = k[:, :, :, 0], v[:, :, :, 0], span and _cut(span[0][:, :, None], 1, tile)
    logsumexp, delta = (
        _cut(x.swapaxes(1, 2)[..., None], groups, tile)[..., 0] for x in (logsumexp, delta)
    )

    def step(gradients, pair):
        i, j = pair
        d_q, d_k, d_v = gradients
        # The forward pass dropped the weights; the logsumexp makes them again, in one go.
        weights = jnp.exp(_scores(q[i], k[j], i, j, tiling, keys) - logsumexp[i][..., None])
        d_weights = _product("bgrtk,bgsk->bgrts", d_o[i], v[j])
        d_scores = (weights * (d_weights - delta[i][..., None])).astype(q.dtype)
        to_q = _product("bgrts,bgsk->bgrtk", d_scores, k[j])
        to_k = _product("bgrts,bgrtk->bgsk", d_scores, q[i])
        to_v = _product("bgrts,bgrtk->bgsk", weights.astype(q.dtype), d_o[i])
        d_q = _put(d_q, d_q[i] + to_q, i)
        return (d_q, _put(d_k, d_k[j] + to_k, j), _put(d_v, d_v[j] + to_v, j)), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    (d_q, d_k, d_v), _ = lax.scan(step, zeros, tiling.pairs(query.shape[1]))
    d_q, d_k, d_v = tiling.scale * d_q, tiling.scale * d_k[:, :, :, None], d_v[:, :, :, None]
    return tuple(_join(x).astype(query.dtype) for x in (d_q, d_k, d_v))


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
_put = functools.partial(lax.dynamic_update_index_in_dim, axis=0)


def hide(scores: Any, i: Any, j: Any, tiling: Tiling, keys=None, queries=None) -> Any:
    """Hides what queries of tile i (rows) do not see of the keys of tile j (columns): by the
    span of keys of each query, or of queries of each key, or else by the causal mask alone.
    """
    ones, tile, span = (1,) * (scores.ndim - 2), tiling.tile, keys or queries
    rows = i * tile + jnp.arange(tile).reshape(*ones, tile, 1)
    columns = j * tile + jnp.arange(tile).reshape(*ones, 1, tile)
    if span:
        (first, last), others = span, columns if keys else rows
        return jnp.where((first <= others) & (others <= last), scores, HIDDEN)
    return jnp.where(rows >= columns, scores, HIDDEN) if tiling.causal else scores


def _scores(q, k, i, j, tiling, keys):
    """Computes the scores of tile i of queries and tile j of keys; `HIDDEN` where masked."""
    s = _product("bgrtk,bgsk->bgrts", q, k) * tiling.scale
    return hide(s, i, j, tiling, keys is not None and (keys[i][..., :1], keys[i][..., 1:]))


def _cut(x, groups, tile):
    """Cuts [B, L, G R, K] into tiles [n, B, G, R, tile, K]; R heads share keys and values."""
    batch, length, heads, width = x.shape
    x = x.reshape(batch, length // tile, tile, groups, heads // groups, width)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _join(x):
    """Joins tiles [n, B, G, R, tile, K] to [B, L, G R, K]."""
    n, batch, groups, shared, tile, width = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, n * tile, groups * shared, width)


def by_library(query, key, value, causal, window, documents, implementation="cudnn"):
    """Attends by `jax.nn.dot_product_attention`, with the arguments of `attend`.

    It has no argument for documents in a row: they become a mask [B 1 L L], squared in L.
    """
    mask, side = None, None if window is None else (window - 1, 0 if causal else window - 1)
    if documents is not None:
        begin = spans(documents, False, None)[0][..., 0]  # of each position's document
        mask = begin[:, None, :, None] == begin[:, None, None, :]
    options: Any = dict(is_causal=causal, local_window_size=side, implementation=implementation)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, **options)


def why_no_cudnn(query: Any) -> str | None:
    """Returns why cuDNN's kernel does not run on this machine, for these queries, or None."""
    row = hardware.recognize(jax.local_devices()[0])
    target = None if row is None else row.target
    if not isinstance(target, GpuTarget) or target.compute_capability < (9, 0):
        return "it is for GPUs from Hopper on (compute capability 9.0), and here is none"
    if query.dtype not in (jnp.float16, jnp.bfloat16) or query.shape[-1] % 8:
        return "it is for float16 and bfloat16, and heads whose width 8 divides"
    return None


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


def _check_mask(shape: tuple[int, ...], window: Any, documents: Any) -> None:
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window={window!r} must be a number of positions, at least 1")
    integers = documents is None or jnp.issubdtype(documents.dtype, jnp.integer)
    if not integers or (documents is not None and documents.shape != shape):
        raise ValueError(
            f"documents of shape {documents.shape} and dtype {documents.dtype} must be integers"
            f" of shape {shape}, the number of each position's document"
        )


def tile_for(head_dim: int, dtype: Any) -> int:
    """Returns the largest tile of `TILES` that fits every GPU of `hardware` from 8.0 on."""
    gpu = hardware.get("a5000")  # has the least shared memory of them
    limit = _gpu(gpu).shared_memory_per_block
    needed = {tile: shared_memory(tile, head_dim, dtype, gpu) for tile in TILES}
    tile = next((tile for tile in TILES if needed[tile] <= limit), TILES[-1])
    check_fits(tile, head_dim, dtype, gpu)
    return tile


def width_in_kernel(head_dim: int) -> int:
    """Returns the width of a head in the kernel, whose arrays are powers of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


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
    capability, head_dim = _gpu(accelerator).compute_capability, width_in_kernel(head_dim)
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
    limit = _gpu(accelerator).shared_memory_per_block
    if needed > limit:
        raise ValueError(
            f"tile={tile} needs {needed:,} bytes of shared memory for"
            f" head_dim={head_dim} in {jnp.dtype(dtype).name}, and a thread block of the"
            f" {accelerator.title} has {limit:,}: take a smaller tile or narrower heads"
        )


def _gpu(accelerator: Accelerator) -> GpuTarget:
    hardware.check(accelerator)
    if not isinstance(accelerator.target, GpuTarget):
        raise ValueError(f"accelerator={accelerator.title!r} must be an NVIDIA GPU")
    return accelerator.target


def why_no_kernel(accelerator: Accelerator | None) -> str | None:
    """Returns why tiles in JAX stand in for the kernel on a target (None: a CPU), or None."""
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
