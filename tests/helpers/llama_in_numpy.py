"""Llama, Mistral, Qwen2 and Qwen3 in NumPy, from their papers and from the fields and names of
tensors that the Hub has: nothing of this library is used.
"""

import numpy as np


def rms_norm(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def angle(config, pair, size):
    """Returns the angle by which a pair of dimensions turns from one position to the next."""
    wavelength = 2 * np.pi * config.get("rope_theta", 10000.0) ** (2 * pair / size)
    scaling = config.get("rope_scaling") or {}
    factor, kind = scaling.get("factor"), scaling.get("rope_type")
    if kind == "linear":
        wavelength = wavelength * factor
    if kind == "llama3":
        length = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if wavelength > length / low:
            wavelength = wavelength * factor
        elif wavelength >= length / high:
            smooth = (length / wavelength - low) / (high - low)
            wavelength = wavelength / ((1 - smooth) / factor + smooth)
    return 2 * np.pi / wavelength


def turn(x, config):
    """Multiplies dimensions k and k + K/2 of x [L, H, K], a complex number, by e^(i angle)."""
    length, _, size = x.shape
    half = size // 2
    angles = np.array([angle(config, pair, size) for pair in range(half)])
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * np.arange(length)[:, None, None] * angles
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


def logits(config, tensors, tokens):
    """Returns float64 logits [L, V] of one sequence of tokens."""
    tensors = {name: array.astype(np.float64) for name, array in tensors.items()}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    epsilon, window = config["rms_norm_eps"], config.get("sliding_window") or len(tokens)
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): array
            for name, array in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }

        def linear(x, name, own=own):
            return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)

        y = rms_norm(x, own["input_layernorm.weight"], epsilon)
        q, k, v = (
            linear(y, f"self_attn.{name}_proj").reshape(len(tokens), count, size)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        if config["model_type"] == "qwen3":
            q = rms_norm(q, own["self_attn.q_norm.weight"], epsilon)
            k = rms_norm(k, own["self_attn.k_norm.weight"], epsilon)
        q, k = turn(q, config), turn(k, config)
        result = np.empty_like(q)
        for at in range(len(tokens)):
            seen = slice(max(0, at - window + 1), at + 1)
            for head in range(heads):
                group = head // (heads // groups)
                scores = np.exp(k[seen, group] @ q[at, head] / np.sqrt(size))
                result[at, head] = scores / scores.sum() @ v[seen, group]
        x = x + linear(result.reshape(len(tokens), heads * size), "self_attn.o_proj")
        y = rms_norm(x, own["post_attention_layernorm.weight"], epsilon)
        gate = linear(y, "mlp.gate_proj")
        gate = gate / (1 + np.exp(-gate))
        x = x + linear(gate * linear(y, "mlp.up_proj"), "mlp.down_proj")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return rms_norm(x, tensors["model.norm.weight"], epsilon) @ head.T
