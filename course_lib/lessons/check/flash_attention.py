"""Checks of notebook 16's exercises."""

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import call, close, exercise, predicted, require
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
        yours = sorted((int(i), int(j)) for i, j in yours)
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
        require(
            not missing,
            f"{at}, the pair {missing[:1]} is missing: its first query still sees its last key."
            " Write down the positions of these two.",
        )
        future = [pair for pair in extra if pair[1] > pair[0]]
        require(not future, f"{at}, the pair {future[:1]} lies in the future: j <= i.")
        require(
            not extra,
            f"{at}, the pair {extra[:1]} is masked entirely: the result is right, and nothing"
            " is saved by skipping too little.",
        )
    return "the number of pairs grows with L times the window, no longer with L squared."


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
        "Not the gradient of the queries. Is delta one number per row, and is the logsumexp"
        " subtracted from the scores of its own row?",
    )
    require(
        not close(other, right),
        "Right numbers, but not from the logsumexp: with another one they stay the same. Take"
        " the weights from it, without a softmax.",
    )
    return "the weights were never stored, only one number per row."


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
