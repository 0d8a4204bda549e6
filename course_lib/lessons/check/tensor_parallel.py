"""Checks of notebook 10's exercises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from course_lib.lessons import tiny_transformer as tiny
from course_lib.lessons.check.answers import (
    call,
    close,
    exercise,
    predicted,
    require,
    run,
    same_shapes,
)
from course_lib.lessons.check.many_devices import (
    compiled,
    gradient,
    normal,
    row_of_devices,
    spread,
)


@exercise
def gated_mlp(your_mlp):
    """Checks `your_mlp(x, gate, up, down)`, one device's share of a SwiGLU MLP.

    It runs on four devices along "tensor": x [6 8] is whole, gate and up [8 16] are cut by
    columns, down [16 8] by rows. The check compares result, gradient and the bytes sent.
    """
    mesh = row_of_devices("tensor")
    x, gate, up, down, weights = normal(1, (6, 8), (8, 16), (8, 16), (16, 8), (6, 8))
    columns = P(None, "tensor")
    divided = spread(
        your_mlp,
        mesh,
        (P(), columns, columns, P("tensor")),
        P(),
        hint="Decide first: which of the three products is complete on a device, and which is"
        " one term of a sum?",
    )
    yours, ledger = compiled(divided, mesh, x, gate, up, down)

    def whole(x, gate, up, down, activation=jax.nn.silu):
        return (activation(x @ gate) * (x @ up)) @ down

    with jax.default_matmul_precision("highest"):
        right = whole(x, gate, up, down)
        right_gradient = gradient(whole, weights)(x, gate, up, down)
    same_shapes(yours, right, "the result")
    require(
        not close(yours, right / 4),
        "A quarter of the right result. The devices' results are parts of one sum: add them,"
        " take no mean.",
    )
    with jax.default_matmul_precision("highest"):
        exchanged = whole(x, up, gate, down)
        others = [
            whole(x, gate, up, down, other)
            for other in (jnp.asarray, jax.nn.gelu, jax.nn.relu, jax.nn.sigmoid)
        ]
    require(
        not close(yours, exchanged),
        "Gate and up are exchanged: SiLU acts on the other product.",
    )
    require(
        not any(close(yours, other) for other in others),
        "The sum is right, but the gate does not go through SiLU.",
    )
    require(
        close(yours, right),
        "Not (silu(x @ gate) * (x @ up)) @ down. Which of the three products is a sum over"
        " devices, and is it the one that you add up?",
    )
    require(
        ledger.payload("all-gather") == 0,
        "Right numbers, but you gather an array. Nothing has to be gathered: each device can"
        " multiply its own columns and rows.",
    )
    require(
        ledger.payload() <= right.nbytes,
        f"Right numbers, but {ledger.payload()} bytes are sent forward. One all-reduce of the"
        f" result has {right.nbytes}.",
    )
    grads, both = compiled(gradient(divided, weights), mesh, x, gate, up, down)
    require(
        close(grads, right_gradient),
        "The result is right, the gradient is not. Is something hidden from `jax.grad`?",
    )
    return (
        f"{right.nbytes} bytes all-reduced forward, and {both.payload()} backward, for the"
        " gradient of x."
    )


@exercise
def padded_vocabulary(your_padded):
    """Checks `your_padded(V, n, multiple)`, the smallest vocabulary of at least V entries that
    gives each of n devices a multiple of `multiple` entries.
    """
    hint = (
        "50,304 is the next multiple of 128. Compute first how many of these entries each of 8"
        " devices gets."
    )
    yours = call(your_padded, 50_257, 8, 128, hint=hint)
    require(yours == int(yours), f"A vocabulary is an integer, not {yours}.")
    require(
        yours != 50_264,
        "50,264 divides among eight devices, but each gets 6,283 entries: no multiple of 128.",
    )
    require(
        yours != 50_304,
        "50,304 is a multiple of 128, but each of eight devices gets 6,288: divide first.",
    )
    require(yours != 6_400, "6,400 entries are one device's part. Return the whole vocabulary.")
    require(yours >= 50_257, f"{yours:,} entries: some of the 50,257 tokens have none.")
    require(
        yours == 51_200,
        f"{yours} is not the least that is large enough and gives each of 8 devices a multiple"
        " of 128.",
    )
    require(
        run(your_padded, 51_200, 8, 128) == 51_200,
        "51,200 fits as it is, and should stay.",
    )
    for size, n, multiple, right in ((50_257, 1, 128, 50_304), (32_000, 3, 64, 32_064)):
        yours = run(your_padded, size, n, multiple)
        require(
            yours == right,
            f"{size:,} tokens, {n} devices, multiples of {multiple}: {right:,}, not {yours}.",
        )
    return "51,200 for GPT-2 on eight GPUs, as in Megatron-LM."


@exercise
def divided_embedding(your_lookup):
    """Checks `your_lookup(table, tokens)`, the embedding from a table cut along the vocabulary.

    It runs on four devices along "tensor": each has 8 rows of the table [32 6], and all tokens
    [2 5]. The check compares result, gradient and the bytes sent.
    """
    mesh, size = row_of_devices("tensor"), 8
    table, weights = normal(2, (32, 6), (2, 5, 6))
    tokens = jnp.array([[0, 7, 8, 9, 31], [17, 17, 24, 3, 15]])
    divided = spread(
        your_lookup,
        mesh,
        (P("tensor"), P()),
        P(),
        hint="Decide first: at which token do the rows of this device begin?"
        ' `jax.lax.axis_index("tensor")` says which device runs.',
    )
    yours, ledger = compiled(divided, mesh, table, tokens)
    right = table[tokens]
    same_shapes(yours, right, "the embedding")
    require(
        np.isfinite(yours).all(),
        "The embedding has NaN: `jnp.take` fills in NaN outside of the table. Mask those rows"
        " before the sum.",
    )
    clipped = sum(
        table[size * d : size * d + size][jnp.clip(tokens - size * d, 0, size - 1)]
        for d in range(4)
    )
    wrapped = sum(table[size * d : size * d + size][tokens - size * d] for d in range(4))
    require(
        not close(yours, clipped) and not close(yours, wrapped),
        "Devices add rows of other tokens: an index outside of the table is moved inside. Put"
        " zeros where a token is not this device's.",
    )
    first = sum(
        jnp.where(tokens[..., None] < size, table[size * d :][jnp.minimum(tokens, size - 1)], 0)
        for d in range(4)
    )
    require(
        not close(yours, first),
        "Each device looks up tokens 0 to 7. Its rows begin at its index times the number of"
        " its rows.",
    )
    require(
        not close(yours, right / 4),
        "A quarter of the embedding: one device has the row and the others add zeros, so add"
        " them up and take no mean.",
    )
    require(
        close(yours, right),
        "Not table[tokens]. One device has a token's row. What do the others contribute, and"
        " which collective joins them?",
    )
    require(
        ledger.payload("all-gather") == 0,
        f"Right numbers, but the table is gathered: {ledger.payload('all-gather')} bytes, and"
        " with a real vocabulary gigabytes.",
    )
    require(
        ledger.payload() == right.nbytes,
        f"Right numbers, but {ledger.payload()} bytes are sent; one all-reduce of the embedding"
        f" has {right.nbytes}.",
    )

    def whole_gradient(table):
        return jnp.vdot(table[tokens], weights)

    grads, _ = compiled(
        jax.grad(lambda table: jnp.vdot(divided(table, tokens), weights)), mesh, table
    )
    require(
        close(grads, jax.grad(whole_gradient)(table)),
        "The embedding is right, the gradient of the table is not.",
    )
    return f"one all-reduce of {right.nbytes} bytes, and each device keeps its rows."


@exercise
def missing_sum(wrong_leaves):
    """Checks how many of ten parameters get a wrong gradient if the gradient of the MLP's input
    is not summed over devices, in a Transformer of one layer.
    """
    predicted(
        wrong_leaves, hint="Which parameters get their gradient through the input of the MLP?"
    )
    wrong = sorted(_wrong_without_the_sum())
    require(
        wrong_leaves != 10,
        "Not all ten: the gradients of `up` and `down`, and of what comes behind the MLP, do"
        " not pass through its input.",
    )
    require(
        wrong_leaves not in (1, 2),
        "More: the gradient goes on from the norm in front of the MLP to all that lies in front"
        " of it.",
    )
    require(
        wrong_leaves not in (7, 8),
        "Fewer: `up` and `down` see the right input and the right gradient of their output.",
    )
    require(
        wrong_leaves == len(wrong),
        f"Not {wrong_leaves}. Go through the ten, from the loss to the tokens: does this"
        " parameter's gradient pass through the input of the MLP?",
    )
    return f"measured, wrong are {', '.join(wrong)}; the loss is right."


@functools.cache
def _wrong_without_the_sum() -> list[str]:
    """Returns the parameters whose gradient is wrong if only the first device's share of the
    gradient of the MLP's input arrives.
    """
    mesh = row_of_devices("tensor")
    params = tiny.init(jax.random.key(0), N=1, D=8, H=4, V=16, L=4)
    tokens = jax.random.randint(jax.random.key(1), (2, 2, 4), 0, 16)

    def loss(params, inputs, labels, sums=True):
        x = params["token"][inputs] + params["position"]
        layer = {name: params[name][0] for name in ("qkv", "out", "norm1", "norm2")}
        x += tiny.mix_positions(tiny.rms_norm(x, layer["norm1"]), layer)

        def mlp(x, up, down):
            if not sums:
                first = jax.lax.axis_index("tensor") == 0
                x = jnp.where(first, x, jax.lax.stop_gradient(x))
            return jax.lax.psum(jax.nn.gelu(x @ up) @ down, "tensor")

        cut = (P(), P(None, "tensor"), P("tensor"))
        divided = jax.shard_map(mlp, mesh=mesh, in_specs=cut, out_specs=P())
        h = tiny.rms_norm(x, layer["norm2"])
        x += divided(h, params["up"][0], params["down"][0])
        logits = tiny.rms_norm(x, params["norm"]) @ params["output"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    with jax.default_matmul_precision("highest"):
        right = jax.jit(jax.grad(tiny.mean_loss))(params, *tokens)
        yours = jax.jit(jax.grad(functools.partial(loss, sums=False)))(params, *tokens)
    return [name for name in params if not close(yours[name], right[name])]
