"""The gradient noise scale: the batch size above which a larger batch saves few steps.

The gradient of B examples is that of all examples plus noise, whose variance falls with B:

    E |g_B|^2 = |G|^2 + tr(Sigma) / B

with the true gradient G and the covariance Sigma of one example's gradient. Square norms at two
batch sizes give both unknowns. Their ratio, the noise scale tr(Sigma) / |G|^2, is the batch
size at which noise is as large as the gradient: far below it, twice the batch saves almost half
of the steps, far above nearly none (McCandlish et al., 2018, https://arxiv.org/abs/1812.06162,
appendix A).
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
    """Signal and noise of gradients."""

    signal: float  # estimate of |G|^2; below 0 where too few batches were averaged
    noise: float  # estimate of tr(Sigma), for one example

    @property
    def scale(self) -> float:
        """The noise scale in examples; infinite where noise hides the gradient."""
        return self.noise / self.signal if self.signal > 0 else float("inf")

    def square_norm(self, batch_size: int) -> float:
        """Returns the mean square norm of a gradient of `batch_size` examples."""
        return self.signal + self.noise / batch_size


def from_norms(small: float, large: float, batch_size: int, larger: int) -> Noise:
    """Solves for signal and noise, from means of |g|^2 at two sizes of batches."""
    if not 0 < batch_size < larger:
        raise ValueError(
            f"batch_size={batch_size} must be from 1 to less than larger={larger}: two sizes"
            " give two unknowns"
        )
    signal = (larger * large - batch_size * small) / (larger - batch_size)
    return Noise(signal, (small - large) / (1 / batch_size - 1 / larger))


def measure(grad_fn: GradFn, params: PyTree, batches: Sequence[Any]) -> Noise:
    """Measures signal and noise at fixed parameters.

    The mean of the batches' gradients is the gradient of one large batch. An example is a row
    of a batch; for a language model, a sequence.

    Args:
      grad_fn: `grad_fn(params, batch, rng) -> (grads, metrics)`; called with `rng=None`.
        Each such function is compiled once.
      params: pytree of parameters.
      batches: at least two pytrees of arrays [B, ...], all with the same B and sum of weights.
        More batches give a better estimate; 32 are few.
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
