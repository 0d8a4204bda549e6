"""Gradients of strategies, compared with the gradient of one device.

The notebooks of Part II compare each strategy in the same way: a small Transformer in float32
at the highest matmul precision, without dropout, and a batch whose labels have unequal weights.
With equal ones, a mean of the devices' means would not show.
"""

import math
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from course_lib import configs, measure, training
from course_lib.one_device import gradient_accumulation
from course_lib.text.data import Batch

PyTree = Any
# For programs that run once: they compile in half the time, with the same numbers and bytes.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
# A leaf whose gradient is zero in theory, such as the bias of the keys, holds only rounding. It
# is compared with this part of the whole gradient's norm.
SMALL_LEAF = 1e-2


def small(batch_size: int, seq_len: int, **changes: Any) -> ConfigDict:
    """Returns the configuration of a Transformer of two layers that compiles in seconds: width
    16, eight heads, 32 tokens in its vocabulary, and plain SGD of rate 1. Changes are
    fields of `config.model`.
    """
    config = configs.get("cpu")
    config.model.update(num_layers=2, hidden_size=16, head_dim=2, num_heads=8)
    config.model.update(vocab_size=32, num_outputs=32, max_seq_len=seq_len, scan_layers=True)
    config.model.update(changes)
    config.optimizer.update(name="sgd", learning_rate=1.0, schedule="constant", warmup_steps=0)
    config.optimizer.update(weight_decay=0.0, clip_norm=0.0)
    config.data.update(batch_size=batch_size, seq_len=seq_len)
    return config


class OneDevice:
    """The gradient that one device computes for a random batch, whose labels weigh 0, 1 or 2,
    with the initial parameters of the key 0.
    """

    def __init__(self, config: ConfigDict):
        self.config = config
        random = np.random.default_rng(0)
        shape = config.data.batch_size, config.data.seq_len
        inputs, labels = random.integers(0, config.model.vocab_size, (2, *shape), np.int32)
        self.batch = Batch(inputs, labels, random.integers(0, 3, shape).astype(np.float32))
        run = training.build(config)
        self.params = run.init(jax.random.key(0)).params
        grad_fn = jax.jit(gradient_accumulation.gradient(run.loss_fn), compiler_options=QUICK)
        with jax.default_matmul_precision("highest"):
            self.grads = jax.device_get(grad_fn(self.params, self.batch, None)[0])

    def compare(
        self, axes: dict[str, int], strategy: Any = None, **changes: Any
    ) -> "tuple[measure.Ledger, float]":
        """Computes the same gradient on a mesh of simulated devices, with other fields of
        `config.model` that leave it as it is. Returns the collectives of the compiled gradient,
        and the largest distance of a leaf from one device's, as a fraction of the leaf's norm.
        """
        # Notebook 3 compares gradients of one device, and needs none of this.
        from course_lib.many_devices import meshes, options, strategies

        strategy = strategy or options.Strategy()
        config = self.config.copy_and_resolve_references()
        config.model.update(changes)
        mesh = meshes.make(axes, meshes.devices(math.prod(axes.values())))
        state, abstract_batch = strategies.build(config, mesh, strategy).abstract()
        grad_fn = jax.jit(strategies.gradient(config, mesh, strategy))
        with jax.default_matmul_precision("highest"):
            lowered = grad_fn.lower(state.params, abstract_batch, jax.random.key(0))
            compiled = lowered.compile(QUICK)
        places = jax.tree.map(lambda leaf: leaf.sharding, (state.params, abstract_batch))
        placed = jax.device_put((self.params, self.batch), places)
        grads = jax.device_get(compiled(*placed, jax.random.key(0))[0])
        return measure.ledger(compiled, mesh), furthest(grads, self.grads)


def furthest(grads: PyTree, expected: PyTree) -> float:
    """Returns the largest distance of a leaf from the expected one, as a fraction of its norm.
    A leaf with less than a hundredth of the whole norm is compared with that hundredth.
    """
    norm = np.linalg.norm
    least = SMALL_LEAF * norm([norm(leaf) for leaf in jax.tree.leaves(expected)])
    distances = jax.tree.map(lambda a, b: norm(a - b) / max(norm(b), least), grads, expected)
    return float(max(jax.tree.leaves(distances)))
