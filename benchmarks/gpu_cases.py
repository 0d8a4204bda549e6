"""The programs that `benchmarks.gpu` predicts and measures: training steps, attention, the
loss, and the rates of the GPU itself.

Each case is one compiled program. `lower` gives it for a real or a virtual GPU.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from course_lib import configs, measure, training
from course_lib.lessons import ladder
from course_lib.measure import virtual
from course_lib.models import attention, losses
from course_lib.smaller_and_faster import flash_attention, large_vocabulary, offload

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of one GPU."""

    function: Any  # jitted; a training step is `step(state, batch) -> (state, metrics)`
    shapes: tuple[PyTree, ...]  # of its arguments
    arguments: Callable[[], tuple[PyTree, ...]]  # makes them on the default device
    flops: dict[str, int]  # by dtype of the operands, recomputed ones included
    model_flops: measure.Flops | None = None  # those that count for MFU, of a training step
    tokens: int | None = None  # in a call

    @property
    def is_step(self) -> bool:
        """Whether each call takes the state that the call before returned."""
        return self.model_flops is not None

    def lower(self, device: jax.Device) -> jax.stages.Lowered:
        """Lowers it for a device, real or virtual."""
        return self.function.lower(*virtual.abstract(self.shapes, device))


def step(changes: Mapping[str, Any], preset: str = "155m") -> Program:
    """Returns the training step of a preset with changes. It trains on a batch of ones."""
    config = configs.get(preset)
    config.update_from_flattened_dict(dict(changes))
    configs.check(config)
    return step_of(config)


def step_of(config: ConfigDict) -> Program:
    """Returns the training step of a configuration."""
    run = training.build(config)
    state, batch = run.abstract()

    def arguments():
        ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), batch)
        return run.init(jax.random.key(config.seed)), ones

    return Program(
        run.train_step,
        (state, batch),
        arguments,
        ladder.flops_of(config),
        training.step_flops(config),
        config.data.batch_size * config.data.seq_len,
    )


def rung(name: str) -> Program:
    """Returns the step of a rung of notebook 19's ladder."""
    return step_of(ladder.config_of(name))


TOKENS, HEADS, HEAD_DIM = 32_768, 8, 128  # of the attention that is measured


def mosaic(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> jax.Array:
    """Computes attention by the kernel for Hopper that JAX ships; not causal."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    if causal:
        raise NotImplementedError("the backward pass of JAX's kernel has no causal mask")
    sizes: Any = {f"block_{part}": 64 for part in ("q_dkv", "kv_dkv", "q_dq", "kv_dq")}
    tuning = attention_mgpu.TuningConfig(64, 64, max_concurrent_steps=2, **sizes)
    return attention_mgpu.attention(query, key, value, tuning)


MOSAIC = "flash, JAX's kernel for Hopper"
# Ways to compute attention: (query, key, value, causal=) [B L H K] -> [B L H K].
ATTENTIONS: dict[str, Callable[..., jax.Array]] = {
    "written out": functools.partial(attention.attend, implementation="reference"),
    "xla": functools.partial(attention.attend, implementation="xla"),
    "cudnn": functools.partial(attention.attend, implementation="cudnn"),
    "flash, our kernel": flash_attention.attend,
    "flash, tiles in JAX": functools.partial(flash_attention.attend, by="tiles"),
    MOSAIC: mosaic,
}


def attention_gradient(way: str, length: int, causal: bool = True) -> Program:
    """Returns a gradient of attention, forward and backward pass, over `TOKENS` tokens in
    sequences of `length`, in bfloat16 (JAX's kernel for Hopper: float16).
    """
    dtype = jnp.float16 if way == MOSAIC else jnp.bfloat16
    shape = (TOKENS // length, length, HEADS, HEAD_DIM)

    def gradient(qkv):
        return jax.grad(
            lambda qkv: ATTENTIONS[way](*qkv, causal=causal).astype(jnp.float32).sum()
        )(qkv)

    # 2 products of the forward and 4 of the backward pass, over the scores that the mask leaves
    scores = TOKENS * (length + 1) // 2 if causal else TOKENS * length
    return Program(
        jax.jit(gradient),
        ((jax.ShapeDtypeStruct(shape, dtype),) * 3,),
        lambda: (tuple(jax.random.normal(jax.random.key(i), shape, dtype) for i in range(3)),),
        {jnp.dtype(dtype).name: 6 * 2 * scores * HEADS * HEAD_DIM},
        tokens=TOKENS,
    )


def loss_gradient(chunks: int, along: str = "vocabulary") -> Program:
    """Returns loss and gradient of the output layer of Gemma 2 2B, as in notebook 15: 8,192
    tokens, D = 2304, V = 256000, in bfloat16. One chunk: all logits at once.
    """
    tokens, width, vocabulary = 8_192, 2_304, 256_000

    def loss(x, head, labels):
        if chunks == 1:
            logits = (x @ head).astype(jnp.float32)
            per_label, _ = losses.cross_entropy(logits, labels)
        else:
            per_label, _ = large_vocabulary.linear_cross_entropy(
                x, head, labels, chunks=chunks, along=along
            )
        return per_label.mean()

    def arguments():
        x, head = (
            jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
            for i, shape in enumerate([(tokens, width), (width, vocabulary)])
        )
        labels = jax.random.randint(jax.random.key(2), (tokens,), 0, vocabulary)
        return x, head / width**0.5, labels

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    shapes = jax.eval_shape(arguments)
    products = 3 if chunks == 1 else 4  # a chunked loss computes the logits twice
    return Program(
        gradient,
        shapes,
        arguments,
        {"bfloat16": products * 2 * tokens * width * vocabulary},
        tokens=tokens,
    )


def matmuls(dtype: str, size: int = 8_192, times: int = 10) -> Program:
    """Returns products of square matrices, one after the other."""
    shape = (size, size)

    def run(x, y):
        return jax.lax.fori_loop(0, times, lambda _, x: x @ y, x)

    def arguments():
        x, y = (jax.random.normal(jax.random.key(i), shape, dtype) for i in range(2))
        return x, y / size**0.5

    return Program(
        jax.jit(run),
        (jax.ShapeDtypeStruct(shape, dtype),) * 2,
        arguments,
        {dtype: times * 2 * size**3},
    )


def copy(function: Callable[[jax.Array], jax.Array], gibibytes: int = 4) -> Program:
    """Returns a program that reads a float32 array and writes one of the same size."""
    shape = (gibibytes * measure.GIB // 4,)
    return Program(
        jax.jit(function),
        (jax.ShapeDtypeStruct(shape, jnp.float32),),
        lambda: (jnp.ones(shape),),
        {},
    )


# The cases of the group "techniques", each with its changes to the preset. Where the preset has
# them already, the case measures the preset again.
CHANGES: dict[str, dict[str, Any]] = {
    "the preset": {},
    "float32": {"model.dtype": "float32", "training.loss_scale": "none"},
    "no remat": {"model.remat": ()},
    "remat MLP": {"model.remat": ("MLP",)},
    "remat Attn": {"model.remat": ("Attn",)},
    "remat Block": {"model.remat": ("Block",)},
    "unrolled layers": {"model.scan_layers": False},
    "one minibatch": {"training.num_minibatches": 1},
    "no donation": {"training.donate": False},
    "attention xla": {"model.attention": "xla"},
    "attention cudnn": {"model.attention": "cudnn"},
    "attention flash": {"model.attention": "flash"},
}
# The preset's step as one writes it for speed where memory is no concern.
LIKE_PYTORCH: dict[str, Any] = {
    "model.remat": (),
    "model.dropout_rate": 0.0,
    "model.scan_layers": False,
    "model.attention": "cudnn",
    "training.num_minibatches": 1,
}


def groups(preset: str = "155m") -> dict[str, dict[str, Callable[[], Program]]]:
    """Returns all cases: group -> case -> the function that makes its program. The group
    "techniques" changes this preset.
    """
    partial: Any = functools.partial
    return {
        "rates": {
            "products in bfloat16": partial(matmuls, "bfloat16"),
            "products in float32": partial(matmuls, "float32"),
            "read and write": partial(copy, lambda x: x + 1),
            "copy to the host": partial(copy, offload.to_host, 1),
        },
        "techniques": {
            case: partial(step, changes, preset) for case, changes in CHANGES.items()
        },
        "ladder": {name: partial(rung, name) for name in ladder.BY_NAME},
        "one step for speed": {"this library": partial(step, LIKE_PYTORCH)},
        "2.5 billion parameters": {
            f"2.5B, attention {by}": partial(step, {"model.attention": by}, "80gb")
            for by in ("xla", "cudnn", "flash")
        },
        "attention": {
            f"{way}, {length:,}": partial(attention_gradient, way, length, way != MOSAIC)
            for length in (2_048, 8_192)
            for way in ATTENTIONS
        }
        | {
            f"{way}, 2,048, not causal": partial(attention_gradient, way, 2_048, False)
            for way in ("flash, our kernel", "cudnn")
        },
        "loss": {
            "all logits": partial(loss_gradient, 1),
            "8 chunks of the vocabulary": partial(loss_gradient, 8),
            "128 chunks of the vocabulary": partial(loss_gradient, 128),
            "8 chunks of tokens": partial(loss_gradient, 8, "tokens"),
        },
    }
