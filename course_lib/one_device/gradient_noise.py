"""Gradient noise scale: up to which batch size a larger batch saves steps.

A gradient of B examples is the gradient of all of them plus noise, whose variance falls with B:

    E |g_B|^2 = |G|^2 + tr(Sigma) / B

with the true gradient G and the covariance Sigma of one example's. Square norms at two batch
sizes give both unknowns. Their ratio, the noise scale tr(Sigma) / |G|^2, is the batch size at
which noise is as large as the gradient: far below it, twice the batch saves half of the steps,
far above nearly none (McCandlish et al., 2018, https://arxiv.org/abs/1812.06162, appendix A).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from course_lib.one_device.gradient_accumulation import GradFn, PyTree


@dataclasses.dataclass(frozen=True)
class Noise:
    """What two square norms say.

    Attributes:
      signal: estimate of |G|^2; below 0 where there was too little to average.
      noise: estimate of tr(Sigma), of one example.
    """

    signal: float
    noise: float

    @property
    def scale(self) -> float:
        """The noise scale, in examples; infinite where no gradient is seen in the noise."""
        return self.noise / self.signal if self.signal > 0 else float("inf")

    def square_norm(self, batch_size: int) -> float:
        """Returns the square norm that a gradient of that many examples has on average."""
        return self.signal + self.noise / batch_size


def from_norms(small: float, large: float, batch_size: int, larger: int) -> Noise:
    """Returns what the mean square norms of gradients at two batch sizes say.

    Args:
      small: mean of |g|^2 over batches of `batch_size` examples.
      large: mean of |g|^2 over batches of `larger`.
      batch_size: the smaller one.
      larger: the larger one.

    Raises:
      ValueError: if the one is not the smaller one.
    """
    if not 0 < batch_size < larger:
        raise ValueError(
            f"batch_size={batch_size} must be from 1 to less than larger={larger}: two sizes"
            " give two unknowns"
        )
    signal = (larger * large - batch_size * small) / (larger - batch_size)
    return Noise(signal, (small - large) / (1 / batch_size - 1 / larger))


def measure(grad_fn: GradFn, params: PyTree, batches: Sequence[Any]) -> Noise:
    """Measures it at one point of a training, where nothing is changed.

    The mean of the batches' gradients is the gradient of one large batch. An example is a row
    of a batch, for a language model a sequence.

    Args:
      grad_fn: `grad_fn(params, batch, rng) -> (grads, metrics)`; called without dropout. The
        same object compiles once.
      params: pytree of parameters.
      batches: at least two pytrees of arrays [B, ...], all of the same B and with the same sum
        of weights. The estimate errs by less the more there are: 32 are few.

    Raises:
      ValueError: if there are fewer than two, or they are not of one size.
    """
    sizes = {leaf.shape[0] for batch in batches for leaf in jax.tree.leaves(batch)}
    if len(batches) < 2 or len(sizes) != 1:
        raise ValueError(
            f"batches must be at least two of one size: there are {len(batches)}, of sizes"
            f" {sorted(sizes)}"
        )
    (size,) = sizes
    total, small = jax.tree.map(jnp.zeros_like, params), 0.0
    for batch in batches:
        total, norm = _add(grad_fn, total, params, batch)
        small += float(norm)
    count = len(batches)
    return from_norms(small / count, float(_square_norm(total)) / count**2, size, size * count)


@functools.partial(jax.jit, static_argnums=0)
def _add(grad_fn, total, params, batch):
    grads, _ = grad_fn(params, batch, None)
    return jax.tree.map(jnp.add, total, grads), _square_norm(grads)


@jax.jit
def _square_norm(tree):
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))
