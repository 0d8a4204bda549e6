"""A small classifier in Flax: notebook 3 accumulates its gradients.

One hidden layer on vectors of features, as in the tutorial series that this course builds on
(https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_techniques.html).
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float


class MLPClassifier(nn.Module):
    """Dense, LayerNorm, SiLU, Dropout, Dense. Parameters are float32, whatever `dtype` is."""

    dtype: Any = None  # of the computation; None: that of inputs and parameters
    hidden_size: int = 256
    num_classes: int = 100  # C
    dropout_rate: float = 0.1

    @nn.compact
    def __call__(self, inputs: Float[Array, "B D"], *, train: bool) -> Float[Array, "B C"]:
        """Returns float32 logits. With `train` dropout takes `rngs={"dropout": key}`."""
        x = nn.Dense(self.hidden_size, dtype=self.dtype, name="input_layer")(inputs)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        x = nn.silu(x)
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        x = nn.Dense(self.num_classes, dtype=self.dtype, name="output_layer")(x)
        return x.astype(jnp.float32)
