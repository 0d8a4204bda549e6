"""Checks of notebook 16's exercises."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import (
    WrongAnswer,
    call,
    close,
    equations,
    exercise,
    predicted,
    require,
)
from course_lib.measure import hardware
from course_lib.smaller_and_faster import flash_attention


@exercise
def window_pairs(your_pairs):
    """Checks `your_pairs(n, tile, window)`: the pairs of tiles (queries i, keys j) that
    attention needs if each position sees only itself and the `window - 1` positions before it.
    """
    for n, tile, window in ((8, 4, 8), (6, 4, 5), (6, 4, 7), (5, 2, 3), (4, 4, 1)):
        hint = (
            "Draw the mask for n=4, tile=4, window=5, and mark the tiles with anything in them."
        )
        yours = call(your_pairs, n, tile, window, hint=hint)
        yours = _as_pairs(yours)
        position = np.arange(n * tile)
        age = position[:, None] - position[None, :]
        seen = ((age >= 0) & (age < window)).reshape(n, tile, n, tile).any((1, 3))
        needed = sorted((int(i), int(j)) for i, j in np.argwhere(seen))
        at = f"With n={n}, tile={tile}, window={window}"
        missing, extra = sorted(set(needed) - set(yours)), sorted(set(yours) - set(needed))
        require(len(yours) == len(set(yours)), f"{at}, a pair is listed twice.")
        diagonal = [pair for pair in missing if pair[0] == pair[1]]
        require(
            not diagonal,
            f"{at}, the pair {diagonal[:1]} is missing: each position sees itself.",
        )
        future = [pair for pair in extra if pair[1] > pair[0]]
        require(not future, f"{at}, the pair {future[:1]} lies in the future: j <= i.")
        require(
            not missing,
            f"{at}, the pair {missing[:1]} is missing: its first query still sees its last key."
            " Write down the positions of these two.",
        )
        require(
            not extra,
            f"{at}, the pair {extra[:1]} is masked entirely: the result is right, and nothing"
            " is saved by skipping too little.",
        )
    return "the number of pairs grows with L times the window, no longer with L squared."


def _as_pairs(yours: Any) -> list[tuple[int, int]]:
    """Returns the pairs (i, j), sorted; two arrays of i and of j, as `np.nonzero` returns them,
    become pairs.
    """
    if isinstance(yours, tuple) and len(yours) == 2 and all(np.ndim(one) == 1 for one in yours):
        if any(isinstance(one, np.ndarray | jax.Array) for one in yours):
            yours = np.transpose(yours)
    try:
        return sorted((int(i), int(j)) for i, j in yours)
    except (TypeError, ValueError):
        raise WrongAnswer(
            f"Return a list of pairs (i, j), such as [(0, 0), (1, 0)], not {yours!r}."
        ) from None


@exercise
def query_gradient(your_gradient):
    """Checks `your_gradient(q, k, v, out, logsumexp, d_out)`: the gradient of the queries, with
    the weights computed again from the logsumexp. One head, not causal, arrays [L K] and [L].
    """
    q, k, v, d_out = jax.random.normal(jax.random.key(0), (4, 8, 4))

    def attend(q):
        return jax.nn.softmax(q @ k.T / 2) @ v  # sqrt(4) = 2

    with jax.default_matmul_precision("highest"):
        out, pull = jax.vjp(attend, q)
        (right,) = pull(d_out)
        logsumexp = jax.nn.logsumexp(q @ k.T / 2, axis=1)
        hint = "Which weight does a score have, if the logsumexp of its row is known?"
        yours = call(your_gradient, q, k, v, out, logsumexp, d_out, hint=hint)
        # With another logsumexp the weights are others: who computes them anew does not see it.
        other = call(your_gradient, q, k, v, out, logsumexp + 1, d_out, hint=hint)
        weights = jnp.exp(q @ k.T / 2 - logsumexp[:, None])
        without_delta = (weights * (d_out @ v.T)) @ k / 2
    require(
        jnp.shape(yours) == q.shape, f"The gradient has shape {jnp.shape(yours)}, not [L K]."
    )
    require(bool(jnp.all(jnp.isfinite(yours))), "Some numbers are not finite.")
    require(
        not close(yours, 2 * right),
        "Twice too large: the scores were divided by sqrt(K), and so is their gradient.",
    )
    require(
        not close(yours, without_delta),
        "The softmax's own derivative is missing: a score that grows takes weight from all"
        " others of its row.",
    )
    require(
        close(yours, right),
        "Not the gradient of the queries. Are scores divided by sqrt(K), is delta one number"
        " per row, and is the logsumexp subtracted from the scores of its own row?",
    )
    require(
        not close(other, right),
        "Right numbers, but not from the logsumexp: with another one they stay the same. Take"
        " the weights from it, without a softmax.",
    )
    return "the weights were never stored, only one number per row."


@exercise
def gradient_kernel(your_gradient):
    """Checks `your_gradient(q, k, v, d_out, logsumexp, delta, tile)`: the gradient of the
    queries of one causal head, by a Pallas kernel with one cell per tile of queries, run by the
    interpreter. q, k, v and d_out are [L K], logsumexp and delta [L], all float32.
    """
    length, width, tile = 24, 4, 8
    q, k, v, d_out = jax.random.normal(jax.random.key(0), (4, length, width))
    past = jnp.tri(length, dtype=bool)
    whole_tiles = jnp.kron(jnp.tri(length // tile), jnp.ones((tile, tile))) > 0

    def scores(q, seen):
        return jnp.where(seen, q @ k.T / width**0.5, -jnp.inf)

    def with_mask(seen, delta):
        weights = jnp.exp(scores(q, seen) - logsumexp[:, None])
        return (weights * (d_out @ v.T - delta[:, None])) @ k / width**0.5

    with jax.default_matmul_precision("highest"):
        out, pull = jax.vjp(lambda q: jax.nn.softmax(scores(q, past)) @ v, q)
        (right,) = pull(d_out)
        logsumexp = jax.nn.logsumexp(scores(q, past), axis=1)
        delta = jnp.sum(out * d_out, axis=1)
        hint = "Begin with `attend_one_tile` and its `pl.pallas_call`: which loops stay?"
        arrays = q, k, v, d_out, logsumexp, delta
        yours = call(your_gradient, *arrays, tile, hint=hint)
        # Whoever visits a tile of the future multiplies its zeros by these.
        unseen = [x.at[-tile:].set(jnp.nan) for x in (k, v)]
        skips = call(your_gradient, q, *unseen, d_out, logsumexp, delta, tile, hint=hint)
        no_mask = with_mask(jnp.ones_like(past), delta)
        whole_diagonal = with_mask(whole_tiles, delta)
        without_diagonal = with_mask(whole_tiles & ~whole_tiles.T, delta)
        without_delta = with_mask(past, 0 * delta)
    program = jax.make_jaxpr(lambda *a: your_gradient(*a, tile))(*arrays).jaxpr
    kernels = [eqn for eqn in equations(program) if eqn.primitive.name == "pallas_call"]
    require(
        len(kernels) == 1,
        f"Your function calls {len(kernels)} kernels; it should call one, by `pl.pallas_call`.",
    )
    (kernel,) = kernels
    grid = kernel.params["grid_mapping"].grid
    require(
        grid == (length // tile,),
        f"With L={length} and tile={tile} the grid is {grid}, not ({length // tile},): one cell"
        " per tile of queries.",
    )
    require(
        jnp.shape(yours) == q.shape, f"The gradient has shape {jnp.shape(yours)}, not [L K]."
    )
    empty = [int(i) for i in jnp.flatnonzero(jnp.isnan(yours).all(1))]
    require(
        not empty,
        f"{len(empty)} rows of the gradient are NaN, the first is row {(empty or [0])[0]}."
        " Which cell writes it, and what does `dq_ref[...] = ...` get?",
    )
    require(
        any(eqn.primitive.name == "dot_general" for eqn in equations(kernel.params["jaxpr"])),
        "The kernel multiplies no matrices: the tiles of scores are to be made inside.",
    )
    require(
        not close(yours, width**0.5 * right),
        "sqrt(K) times too large: the scores were divided by it, and so is their gradient.",
    )
    require(
        not close(yours, no_mask),
        "Each query sees all keys: stop at the diagonal, and mask the tile on it.",
    )
    require(
        not close(yours, whole_diagonal),
        "In the tile on the diagonal, queries see keys after them: it needs the mask.",
    )
    require(
        not close(yours, without_diagonal),
        "The tile on the diagonal is missing. `fori_loop(0, n, ...)` ends before n.",
    )
    require(
        not close(yours, without_delta),
        "The softmax's own derivative is missing: subtract delta, one number per query.",
    )
    right_rows = [close(yours[i : i + tile], right[i : i + tile]) for i in range(0, 24, tile)]
    require(
        all(right_rows),
        f"The tile of queries {[*right_rows, False].index(False)} is wrong."
        " Are the positions in the mask those of the whole sequence, and do q, d_out, logsumexp"
        " and delta come as the cell's own tile?",
    )
    require(
        bool(jnp.all(jnp.isfinite(skips[:-tile]))),
        "Right numbers, but the loop visits tiles that are masked entirely. End it at the"
        " diagonal, which is another tile for each cell.",
    )
    return "each tile of scores is made, used and forgotten, and no cell waits for another."


@exercise
def largest_tiles(on_a5000, on_h100):
    """Checks the predicted largest tiles, powers of two, for heads of 256 in bfloat16."""
    head_dim = 256
    predicted(
        on_a5000,
        on_h100,
        hint="The A5000 has 99 KiB of shared memory per block, the H100 227 KiB.",
    )
    for name, yours in (("a5000", on_a5000), ("h100", on_h100)):
        gpu = hardware.get(name)
        fits = [
            tile
            for tile in (16, 32, 64, 128, 256)
            if flash_attention.shared_memory(tile, head_dim, jnp.bfloat16, gpu)
            <= flash_attention.shared_memory_limit(gpu)
        ]
        require(
            yours == int(yours) > 0 and int(yours).bit_count() == 1,
            "A tile is a power of two.",
        )
        needed = flash_attention.shared_memory(int(yours), head_dim, jnp.bfloat16, gpu)
        limit = flash_attention.shared_memory_limit(gpu)
        require(
            yours <= fits[-1],
            f"{gpu.title}: a tile of {yours} needs {needed:,} bytes, too many for {limit:,}.",
        )
        require(
            yours == fits[-1],
            f"{gpu.title}: a tile of {yours} needs only {needed:,} of {limit:,} bytes; a larger"
            " one fits.",
        )
    return "the tile follows from the shared memory; a larger one reads keys less often."
