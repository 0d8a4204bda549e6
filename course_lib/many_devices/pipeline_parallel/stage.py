"""The work of a pipeline's device in one slot of time: one branch per kind of op, from which
the schedule chooses (`pipeline`).

    F    runs the stage on its input, from the embedding or the inbox, and stashes that input;
         the last stage adds to the loss
    B    runs the stage again from the stash, and back to the gradient of its input
    W    the same, to the gradient of its weights, which is added up on the device
    BW   both at once

Only inputs of stages are stored from F to W. W repeats the recomputation and the gradients of
B: storing them would cost memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from course_lib.many_devices.meshes import vary, varying
from course_lib.one_device.gradient_accumulation import LossFn

PyTree = Any
State = dict[str, Any]
# The new state; values for the own "stash", the next "inbox", the previous "gradient".
Result = tuple[State, dict[str, Array]]

PARTS = {
    "embed": ("embed", "pos_emb"),
    "layers": ("block",),
    "head": ("post_norm", "output_layer"),
}
"""The parameters of each part of the model (`transformer.PARTS`)."""


@dataclasses.dataclass(frozen=True)
class Device:
    """Model and data of one device, inside `jax.shard_map`: the same in all slots of a step.

    Its methods take a state, the buffers ("inbox": activations that arrived, "stash": inputs to
    recompute from, "gradient": gradients that arrived), and an op, a column of `slots.Program`.
    They read the buffers, and `pipeline` writes them.

    Attributes:
      apply_part: the model in parts, `apply_part(part, params, x, rng)`; its layers are those
        of one stage.
      loss_fn: of the head's parameters, on a batch whose inputs are activations.
      params: by part. Layers have the device's chunks in front, [v, n, ...].
      batch: the device's share, in microbatches [M, b, ...].
      total: the summed weights of the labels of all devices.
      rng: key for dropout, of this device's share; None without dropout.
      last: the number of the last stage.
    """

    apply_part: Callable[..., Any]
    loss_fn: LossFn
    params: PyTree
    batch: PyTree
    total: Array
    rng: Any
    last: int

    def activation(self) -> Array:
        """Returns zeros like the activation between stages: [b, L, D], or this device's part of
        it along "tensor".
        """
        return zeros_like(
            lambda: self.apply_part("embed", self.params["embed"], self.batch.inputs[0], None)
        )

    def state(self, stash: int) -> State:
        """Returns the state before the first slot, for a stash of that many slots."""
        empty = self.activation()
        return {
            "live": vary(jnp.zeros(stash, bool), "pipe"),  # whether a slot of it is in use
            "peak": vary(jnp.zeros((), jnp.int32), "pipe"),  # most slots in use so far
            "grads": zeros_like(lambda: self.params),
            "metrics": zeros_like(
                lambda: self._loss(self.params["head"], take(self.batch, 0), empty)[1]
            ),
        }

    def forward(self, state: State, waiting: dict[str, Array], op: PyTree) -> Result:
        """Runs F: returns the stage's input, for the stash, and its output."""
        microbatch, layers, rng = self._of(op)
        x = jax.lax.cond(
            op["stage"] == 0,
            lambda: self.apply_part("embed", self.params["embed"], microbatch.inputs, None),
            lambda: take(waiting["inbox"], op["inbox"]),
        )
        y = self.apply_part("layers", layers, x, rng)
        metrics = jax.lax.cond(
            op["stage"] == self.last,
            lambda: add(state["metrics"], self._loss(self.params["head"], microbatch, y)[1]),
            lambda: state["metrics"],
        )
        live = state["live"].at[op["stash"]].set(True)
        peak = jnp.maximum(state["peak"], live.sum())
        return state | {"live": live, "peak": peak, "metrics": metrics}, {
            "stash": x,
            "inbox": y,
        }

    def backward(self, wrt: str, state: State, waiting: dict[str, Array], op: PyTree) -> Result:
        """Runs B, W or BW, as `wrt` says: adds the gradients of weights to the state, and
        returns the gradient of the input.
        """
        microbatch, layers, rng = self._of(op)
        x, grads = take(waiting["stash"], op["stash"]), dict(state["grads"])
        inputs = ({"x": x} if "B" in wrt else {}) | ({"layers": layers} if "W" in wrt else {})
        y, pull_back = jax.vjp(
            lambda inputs: self.apply_part(
                "layers", inputs.get("layers", layers), inputs.get("x", x), rng
            ),
            inputs,
        )
        gradient, grads["head"] = jax.lax.cond(
            op["stage"] == self.last,
            lambda: self._from_loss(wrt, grads["head"], microbatch, y),
            lambda: (take(waiting["gradient"], op["gradient"]), grads["head"]),
        )
        (of_inputs,) = pull_back(gradient)
        # The embedding's weights need only the gradient of its output, which B has computed.
        if "B" in wrt:
            grads["embed"] = jax.lax.cond(
                op["stage"] == 0,
                lambda: self._from_embedding(grads["embed"], microbatch.inputs, of_inputs["x"]),
                lambda: grads["embed"],
            )
        if "W" in wrt:
            grads["layers"] = jax.tree.map(
                lambda sum, x: sum.at[op["chunk"]].add(x), grads["layers"], of_inputs["layers"]
            )
            state = state | {"live": state["live"].at[op["stash"]].set(False)}
        return state | {"grads": grads}, {"gradient": of_inputs["x"]} if "B" in wrt else {}

    def idle(self, state: State, waiting: dict[str, Array], op: PyTree) -> Result:
        """Does nothing: an idle slot, or the first slot of a BW, which runs in its second."""
        return state, {}

    def _of(self, op: PyTree) -> tuple[PyTree, PyTree, Any]:
        """Returns an op's microbatch, parameters and key: the same ones in its F, B and W."""
        rng = self.rng
        if rng is not None:
            rng = jax.random.fold_in(jax.random.fold_in(rng, op["microbatch"]), op["stage"])
        return take(self.batch, op["microbatch"]), take(self.params["layers"], op["chunk"]), rng

    def _loss(
        self, head: PyTree, microbatch: PyTree, activations: Array
    ) -> tuple[Array, PyTree]:
        return self.loss_fn(head, dataclasses.replace(microbatch, inputs=activations), None)

    def _from_loss(
        self, wrt: str, grads: PyTree, microbatch: PyTree, y: Array
    ) -> tuple[Array, PyTree]:
        """Returns the gradient of the last stage's output, and the head's gradients plus those
        of this microbatch.

        It differentiates the microbatch's share of the mean over the whole batch, so that the
        gradients of microbatches add up.
        """

        def share_of_mean(inputs: PyTree) -> Array:
            mean, metrics = self._loss(
                inputs.get("head", self.params["head"]), microbatch, inputs["y"]
            )
            return mean * metrics["loss"][1] / jnp.where(self.total != 0, self.total, 1)

        of_inputs = jax.grad(share_of_mean)(
            {"y": y} | ({"head": self.params["head"]} if "W" in wrt else {})
        )
        return of_inputs["y"], add(grads, of_inputs["head"]) if "W" in wrt else grads

    def _from_embedding(self, grads: PyTree, tokens: Array, gradient: Array) -> PyTree:
        """Adds this microbatch's gradients of the embedding."""
        _, pull_back = jax.vjp(
            lambda embed: self.apply_part("embed", embed, tokens, None), self.params["embed"]
        )
        return add(grads, pull_back(gradient)[0])


def take(tree: PyTree, index: Any) -> PyTree:
    """Takes one index of the first axis of each leaf."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(buffer: Array, slot: Array, value: Array) -> Array:
    """Puts a value into a slot of the buffer; a slot past the end changes nothing."""
    return buffer.at[slot].set(value, mode="drop")


def add(first: PyTree, second: PyTree) -> PyTree:
    """Adds two trees, leaf by leaf."""
    return jax.tree.map(jnp.add, first, second)


def zeros_like(function: Callable[[], PyTree]) -> PyTree:
    """Returns zeros like a function's result, varying over the same mesh axes, without
    computing the result.
    """
    axes: list[list[str]] = []

    def traced() -> PyTree:
        result = function()
        axes.extend(sorted(varying(leaf)) for leaf in jax.tree.leaves(result))
        return result

    leaves, tree = jax.tree.flatten(jax.eval_shape(traced))
    zeros = [
        vary(jnp.zeros(leaf.shape, leaf.dtype), over)
        for leaf, over in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(tree, zeros)
