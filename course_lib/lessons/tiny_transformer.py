"""The Transformer of notebook 5 in plain JAX: Part II spreads it over devices by hand.

The functions are those that notebook 5 shows. Parameters are a dict of float32 arrays; those of
a layer are stacked over the N layers. The letters behind a name are its shape: batch B, length
L, width D, H heads of width K, vocabulary V, width F = 4 D inside the MLP.
"""

import jax
import jax.numpy as jnp
import optax


def init(key, N, D, H, V, L):
    """A dict of parameters; those of a layer are stacked over the N layers."""
    K = D // H  # width of a head
    shapes = {"qkv": (N, D, 3, H, K), "out": (N, H, K, D)}
    shapes |= {"up": (N, D, 4 * D), "down": (N, 4 * D, D)}
    shapes |= {"token": (V, D), "position": (L, D), "output": (D, V)}
    keys = jax.random.split(key, len(shapes))
    params = {
        name: 0.02 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"norm1": jnp.ones((N, D)), "norm2": jnp.ones((N, D)), "norm": jnp.ones(D)}


def rms_norm(x_BxLxD, scale_D):
    """Divides each position by its root mean square, and scales it."""
    return scale_D * x_BxLxD * jax.lax.rsqrt(jnp.mean(x_BxLxD**2, -1, keepdims=True) + 1e-6)


def mix_positions(x_BxLxD, layer):
    """Causal self-attention."""
    K = layer["qkv"].shape[-1]
    q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = jnp.einsum("bld,dshk->sblhk", x_BxLxD, layer["qkv"])
    att_BxHxLxL = jnp.einsum("blhk,bmhk->bhlm", q_BxLxHxK, k_BxLxHxK) / K**0.5
    att_BxHxLxL = jnp.where(jnp.tri(x_BxLxD.shape[1], dtype=bool), att_BxHxLxL, -jnp.inf)
    out_BxLxHxK = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(att_BxHxLxL), v_BxLxHxK)
    return jnp.einsum("blhk,hkd->bld", out_BxLxHxK, layer["out"])


def add_layer(x_BxLxD, layer):
    """Adds what attention and MLP compute. Returns x and None, as `lax.scan` wants."""
    x_BxLxD += mix_positions(rms_norm(x_BxLxD, layer["norm1"]), layer)
    h_BxLxF = jax.nn.gelu(rms_norm(x_BxLxD, layer["norm2"]) @ layer["up"])
    return x_BxLxD + h_BxLxF @ layer["down"], None


def forward(params, tokens_BxL):
    """Returns the logits of the next token, [B, L, V]."""
    x_BxLxD = params["token"][tokens_BxL] + params["position"][: tokens_BxL.shape[1]]
    layers = {name: params[name] for name in ("qkv", "out", "up", "down", "norm1", "norm2")}
    x_BxLxD, _ = jax.lax.scan(add_layer, x_BxLxD, layers)
    return rms_norm(x_BxLxD, params["norm"]) @ params["output"]


def mean_loss(params, inputs_BxL, labels_BxL):
    """The mean cross-entropy, in nats per token."""
    logits_BxLxV = forward(params, inputs_BxL)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, labels_BxL).mean()
