"""The work of a pipeline's device in one slot of time. The schedule chooses one of three ops
(`pipeline`):

    F   runs the layers of the stage on its input, from the embedding or the inbox, and stashes
        what B and W will read
    B   runs back through the layers to the gradient of the input, which the previous stage
        waits for; on the last stage, it begins with the head and the loss
    W   adds the gradients of the layers' weights to those of earlier microbatches

No op computes anything that an earlier one has computed (`split`), unless the model
rematerializes its layers. Logits never wait: the loss, its gradient and the head's gradients
are computed together.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from course_lib.many_devices.meshes import vary, varying
from course_lib.many_devices.pipeline_parallel.split import Split
from course_lib.one_device.gradient_accumulation import LossFn, nonzero

PyTree = Any

PARTS = {
    "embed": ("embed", "pos_emb"),
    "layers": ("block",),
    "head": ("post_norm", "output_layer"),
}
"""The parameters of each part of the model."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A device's carry from one slot of time to the next. Buffers have a slot for each
    value that waits (`slots`).
    """

    grads: PyTree  # float32 sums, by part
    metrics: PyTree
    activation: Array  # made by the last F
    input_gradient: Array  # made by the last B
    inbox: Array  # buffer of activations that have arrived
    gradient: Array  # buffer of gradients that have arrived
    taken: Array  # how often each kind of op ran
    live: Array  # which slots of the stash are in use
    peak: Array  # the most of them at once so far
    # None in a program without backwards: buffers of what F saves, layer by layer, of outputs,
    # and of what B passes on to W
    stash: PyTree = None
    output: Array | None = None
    passed: PyTree = None

    def replace(self, **changes: Any) -> "State":
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Device:
    """Model and data of one device, inside `jax.shard_map`: the same in all slots of a step.

    Its methods take a state and an op, and return the new state. An op is a dict: what each
    column of `slots.Program` says for this device and slot.
    """

    embed: Callable[..., Any]  # (params, tokens) -> x
    layer: Callable[..., Any]  # (params, x, i, rng) -> x, the i-th layer of a chunk
    loss_fn: LossFn  # of the head's parameters, on a batch whose inputs are activations
    split: Split  # the gradient of one layer in three programs
    params: PyTree  # by part; layers are the device's, one chunk after the other
    per_chunk: int  # number of layers in a chunk
    batch: PyTree  # the device's share, in microbatches [M, b, ...]
    total: Array  # the summed weights of the labels of all devices
    rng: Any  # key for dropout, of this device's share; None without dropout
    last: int  # the number of the last stage

    def forward(self, state: State, op: PyTree) -> State:
        """Runs F: stashes what B and W will read, and the output, for the head."""
        rng = self._rng(op)

        def layer(i: Array, carry: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
            x, stash = carry
            x, saved = self.split.forward(self._weights(op, i), x, i, rng)
            return x, put_all(stash, self._place(op["stash"], i), saved)

        y, stash = jax.lax.fori_loop(
            0, self.per_chunk, layer, (self._input(state, op), state.stash)
        )
        live = state.live.at[op["stash"]].set(True)
        return state.replace(
            stash=stash,
            output=put_all(state.output, op["stash"], y),
            activation=y,
            live=live,
            peak=jnp.maximum(state.peak, live.sum()),
        )

    def backward(self, state: State, op: PyTree) -> State:
        """Runs B, and on the last stage the head and the loss first, on the first stage the
        embedding's gradient last.
        """
        rng, grads = self._rng(op), dict(state.grads)
        arrived = take(state.gradient, op["gradient"]), grads["head"], state.metrics
        gradient, grads["head"], metrics = only_if(
            op["stage"] == self.last,
            lambda carry, turn: self._from_loss(at(turn, op), state.output, *carry[1:]),
            arrived,
        )

        def layer(back: Array, carry: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
            gradient, waiting = carry
            i = self.per_chunk - 1 - back
            saved = take(state.stash, self._place(op["stash"], i))
            gradient, passed = self.split.backward(
                self._weights(op, i), saved, gradient, i, rng
            )
            return gradient, put_all(waiting, self._place(op["passed"], i), passed)

        gradient, passed = jax.lax.fori_loop(0, self.per_chunk, layer, (gradient, state.passed))
        grads["embed"] = only_if(
            op["stage"] == 0,
            lambda sums, turn: self._from_embedding(at(turn, op), sums, gradient),
            grads["embed"],
        )
        made = {"passed": passed, "input_gradient": gradient}
        return state.replace(grads=grads, metrics=metrics, **made)

    def weight_gradient(self, state: State, op: PyTree) -> State:
        """Runs W: adds the gradients of the stage's weights, in place."""
        rng = self._rng(op)

        def layer(i: Array, sums: PyTree) -> PyTree:
            saved = take(state.stash, self._place(op["stash"], i))
            passed = take(state.passed, self._place(op["passed"], i))
            new = self.split.weight_gradient(self._weights(op, i), saved, passed, i, rng)
            place = self._place(op["chunk"], i)
            return put_all(sums, place, add(take(sums, place), new))

        sums = jax.lax.fori_loop(0, self.per_chunk, layer, state.grads["layers"])
        live = state.live.at[op["stash"]].set(False)
        return state.replace(grads=state.grads | {"layers": sums}, live=live)

    def evaluate(self, state: State, op: PyTree) -> State:
        """Runs F of a program without backwards, which keeps nothing: on the last stage, it
        adds the loss to the metrics.
        """
        rng = self._rng(op)
        y = jax.lax.fori_loop(
            0,
            self.per_chunk,
            lambda i, x: self.layer(self._weights(op, i), x, i, rng),
            self._input(state, op),
        )

        def with_loss(sums: PyTree, turn: Array) -> PyTree:
            microbatch, x = self._microbatch(at(turn, op)), y + turn.astype(y.dtype)
            return add(sums, self._loss(self.params["head"], microbatch, x)[1])

        metrics = only_if(op["stage"] == self.last, with_loss, state.metrics)
        return state.replace(metrics=metrics, activation=y)

    def _microbatch(self, op: PyTree) -> PyTree:
        return take(self.batch, op["microbatch"])

    def _rng(self, op: PyTree) -> Any:
        """Returns the key of a microbatch in a stage: the same one in its F, B and W."""
        if self.rng is None:
            return None
        return jax.random.fold_in(jax.random.fold_in(self.rng, op["microbatch"]), op["stage"])

    def _place(self, slot: Array, layer: Array) -> Array:
        return slot * self.per_chunk + layer

    def _weights(self, op: PyTree, layer: Array) -> PyTree:
        return take(self.params["layers"], self._place(op["chunk"], layer))

    def _input(self, state: State, op: PyTree) -> Array:
        def embedded(_: Array, turn: Array) -> Array:
            tokens = self._microbatch(at(turn, op)).inputs
            return self.embed(self.params["embed"], tokens)

        return only_if(op["stage"] == 0, embedded, take(state.inbox, op["inbox"]))

    def _loss(
        self, head: PyTree, microbatch: PyTree, activations: Array
    ) -> tuple[Array, PyTree]:
        return self.loss_fn(head, dataclasses.replace(microbatch, inputs=activations), None)

    def _from_loss(
        self, op: PyTree, outputs: Array, grads: PyTree, metrics: PyTree
    ) -> tuple[Array, PyTree, PyTree]:
        """Returns the gradient of the last stage's output, and adds this microbatch's share to
        the head's gradients and to the metrics: its share of the mean over the whole batch.
        """

        microbatch = self._microbatch(op)

        def share_of_mean(head: PyTree, y: Array) -> tuple[Array, PyTree]:
            mean, metrics = self._loss(head, microbatch, y)
            return mean * metrics["loss"][1] / nonzero(self.total), metrics

        (of_head, of_y), new = jax.grad(share_of_mean, argnums=(0, 1), has_aux=True)(
            self.params["head"], take(outputs, op["stash"])
        )
        return of_y, add(grads, of_head), add(metrics, new)

    def _from_embedding(self, op: PyTree, grads: PyTree, gradient: Array) -> PyTree:
        """Adds this microbatch's gradients of the embedding."""
        tokens = self._microbatch(op).inputs
        _, pull_back = jax.vjp(lambda embed: self.embed(embed, tokens), self.params["embed"])
        return add(grads, pull_back(gradient)[0])


def only_if(
    wanted: Array, run: Callable[[PyTree, Array], PyTree], carry: PyTree, name: str = ""
) -> PyTree:
    """Returns `run(carry, turn)` if wanted, else the carry, by a loop of one turn or none: XLA
    updates its carry in place, but copies what a conditional returns. What does not depend on
    `turn` (0) may run always, in front of the loop. `measure.ledger` reads the scope's `name`.
    """
    with jax.named_scope(f"only_if_{name}"):
        return jax.lax.fori_loop(
            0, wanted.astype(jnp.int32), lambda turn, carry: run(carry, turn), carry
        )


def at(turn: Array, op: PyTree) -> PyTree:
    """Returns an op that depends on the turn of `only_if`."""
    return jax.tree.map(lambda index: index + turn, op)


def take(tree: PyTree, index: Any) -> PyTree:
    """Takes one index of the first axis of each leaf."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(buffer: Array, slot: Array, value: Array) -> Array:
    """Puts a value into a slot of the buffer; a slot past the end changes nothing."""
    return buffer.at[slot].set(value, mode="drop")


def put_all(buffers: PyTree, slot: Array, values: PyTree) -> PyTree:
    """Puts each leaf of the values into a slot of its buffer, in place; the slot must exist."""
    return jax.tree.map(
        lambda buffer, value: jax.lax.dynamic_update_index_in_dim(buffer, value, slot, 0),
        buffers,
        values,
    )


def add(first: PyTree, second: PyTree) -> PyTree:
    """Adds two trees, leaf by leaf."""
    return jax.tree.map(jnp.add, first, second)


def zeros_like(function: Callable[[], PyTree], slots: int = 0) -> PyTree:
    """Returns zeros like a function's result, varying over the same mesh axes, without
    computing the result. With slots, each leaf is a buffer [slots, ...] of such values.
    """
    axes: list[list[str]] = []

    def traced() -> PyTree:
        result = function()
        axes.extend(sorted(varying(leaf)) for leaf in jax.tree.leaves(result))
        return result

    leaves, tree = jax.tree.flatten(jax.eval_shape(traced))
    lead = (slots,) if slots else ()
    zeros = [
        vary(jnp.zeros((*lead, *leaf.shape), leaf.dtype), over)
        for leaf, over in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(tree, zeros)
