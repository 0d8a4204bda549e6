"""Configurations: everything that a training run depends on, in one place, and refused before
it can do harm.

    config = get("cpu")
    config.training.steps = 100   # a misspelt field is an error, as is a value of another type
    check(config)                 # and so is a value that cannot work

A configuration is an `ml_collections.ConfigDict` (https://ml-collections.readthedocs.io) with
four parts, `model`, `optimizer`, `data` and `training`, and a `seed`. Dtypes are strings, so
that it can be printed, compared and stored.

A field's default is its value in `published_155m`. A stored configuration that is older than a
field counts as having that default, so it must be the value with which the code does what it
did before there was the field. Presets may set another one.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import optimizers
from course_lib.measure import hardware
from course_lib.measure import virtual as virtual  # must act before JAX looks for devices
from course_lib.measure.hardware import Accelerator
from course_lib.models import attention, transformer
from course_lib.one_device import gradient_accumulation, mixed_precision

DTYPES = ("float32", "bfloat16", "float16")


def published_155m() -> ConfigDict:
    """The Transformer of the series that this course builds on: 155.9 million parameters.

    155,877,376, as its published measurements start from. On an A5000 (24 GB) its author
    measured 3.9 GB and 0.91 s per step. A step on two CPU cores takes minutes.

    Source:
    https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_transformer.html
    """
    model = dict(
        num_layers=12,  # N: parameters, time and saved activations grow in proportion
        hidden_size=1024,  # D: parameters and time grow with its square, activations with it
        head_dim=128,  # K: below 64 the matrix units idle
        num_heads=8,  # H: H * K must be D
        mlp_expansion=4,  # F / D: of the activations that grow with L, the hidden MLP's lead
        vocab_size=2048,  # rows of the token table; the tokenizer's
        num_outputs=2048,  # V: the loss holds several times 4 * B * L * V bytes of logits
        max_seq_len=512,  # rows of the position table; scores take H * L * L without flash
        dropout_rate=0.1,  # with 0, no random numbers and no masks
        causal_mask=True,  # without it every position sees its own label
        dtype="bfloat16",  # of activations; float32 doubles memory, float16 needs a loss scale
        softmax_dtype="float32",  # of scores, largest without remat; bfloat16 halves it, errs
        scan_layers=True,  # compiles one block instead of N; activations are stacked arrays
        remat=("MLP", "Attn"),  # computed again in the backward pass: see rematerialization
        remat_policy="nothing",  # what is kept inside of that all the same
        remat_names=(),  # which named values the policies "names" and "offload" keep
        attention="reference",  # see course_lib.models.attention
        flat_products=False,  # B and L as one dimension: faster on a CPU, see models.hooks
        # the next six are explained in course_lib.models.layers
        qk_norm=False,  # normalizes queries and keys, so that scores stay small
        parallel_block=False,  # MLP beside attention: half as much to send along "tensor"
        num_kv_heads=0,  # G: heads of keys and values; fewer are less to keep; 0 means H
        mlp_activation="gelu",  # or "squared_relu"
        positions="learned",  # or "rotary", which has no table
        use_bias=True,  # without, products and norms add none
        num_experts=0,  # E MLPs, of which a token sees k; memory grows, FLOPs hardly
        experts_per_token=1,  # k: FLOPs of the MLP grow in proportion
        capacity_factor=1.25,  # room at an expert, in even shares; with less, more are dropped
        balance_weight=0.01,  # of the loss that keeps choices even; at 0 few experts may do all
    )
    optimizer = dict(
        name="adam",  # two more float32 numbers a parameter
        learning_rate=4e-4,  # the peak of the schedule
        schedule="warmup_exponential",  # "constant", "warmup_exponential" or "warmup_cosine"
        warmup_steps=10,  # "warmup_exponential", "warmup_cosine": from 0 to the peak
        decay_rate=0.99,  # "warmup_exponential": what is left of the rate after each step
        total_steps=1000,  # "warmup_cosine": when the rate reaches 0
        b1=0.9,  # Adam's memory of gradients, about 1 / (1 - b1) steps
        b2=0.999,  # Adam's memory of their squares
        weight_decay=0.0,  # "adamw": pulls parameters towards 0 by that share of the rate
        clip_norm=0.0,  # scales gradients down to that norm; 0 leaves them
    )
    data = dict(
        batch_size=64,  # B sequences a step
        seq_len=512,  # L tokens each
    )
    training = dict(
        steps=5,  # optimizer steps
        num_minibatches=4,  # M: activations of B / M sequences at a time
        accumulation="scan",  # "scan" compiles one minibatch, "loop" all M
        accumulator_dtype="float32",  # 4 bytes a parameter while M > 1
        loss_scale="none",  # "dynamic" for float16
        donate=True,  # without it, two states are in memory: 12 more bytes a parameter
    )
    return ConfigDict(
        dict(model=model, optimizer=optimizer, data=data, training=training, seed=42)
    )


def cpu() -> ConfigDict:
    """For two CPU cores: 1.1 million parameters. 1,000 steps take about 95 s of CPU time, 50 to
    95 s on two idle cores.

    Trained on the course's corpus it predicts better than a bigram model: notebook 05. Its step
    is the plain one, of which the notebooks speak; model.flat_products and
    model.attention="blocks" make a CPU faster (docs/benchmarks.md).
    """
    config = published_155m()
    config.model.update(
        num_layers=3, hidden_size=128, head_dim=32, num_heads=4, max_seq_len=128
    )
    # The model is so small that nothing needs to save memory.
    config.model.update(dropout_rate=0.0, dtype="float32", scan_layers=False, remat=())
    config.optimizer.update(name="adamw", learning_rate=3e-3, weight_decay=0.1, clip_norm=1.0)
    config.optimizer.update(schedule="warmup_cosine", warmup_steps=50)
    config.data.update(batch_size=4, seq_len=128)
    config.training.update(steps=1000, num_minibatches=1)
    return config


def t4() -> ConfigDict:
    """For a T4 of 16 GB, as Colab lends: `155m`, 155.9 million parameters, in float16, with
    dynamic loss scaling.

    It has no bfloat16 units. Compiled for a T4, a step needs 3.9 GiB: there is room for a batch
    that is not cut into minibatches, or for less remat.
    """
    config = published_155m()
    config.model.update(dtype="float16")
    config.optimizer.update(schedule="warmup_cosine", warmup_steps=100, clip_norm=1.0)
    config.training.update(steps=1000, loss_scale="dynamic")
    return config


def gpu_80gb() -> ConfigDict:
    """For one GPU of 80 GB: 2.5 billion parameters. Compiled for an H100, a step needs 55 GiB,
    28 of them for its state.
    """
    config = published_155m()
    config.model.update(
        num_layers=32, hidden_size=2560, num_heads=20, max_seq_len=1024, dropout_rate=0.0
    )
    config.model.update(remat=("Block",), attention="xla")
    config.optimizer.update(
        learning_rate=1.6e-4, schedule="warmup_cosine", warmup_steps=100, clip_norm=1.0
    )
    config.data.update(seq_len=1024)
    config.training.update(steps=1000)
    return config


PRESETS: dict[str, Callable[[], ConfigDict]] = {
    "155m": published_155m,
    "cpu": cpu,
    "t4": t4,
    "80gb": gpu_80gb,
}
"""Configurations by name. Their docstrings say what to expect."""


def nemotron_340b() -> ConfigDict:
    """Nemotron-4 340B: 341 billion parameters, batches of 2304 x 4096 tokens on 6,144 H100s. No
    preset: no device holds it.

    Source: https://arxiv.org/abs/2406.11704, section 2.
    """
    config = published_155m()
    config.model.update(
        num_layers=96,
        hidden_size=18_432,
        head_dim=192,
        num_heads=96,
        num_kv_heads=8,
        max_seq_len=4096,
    )
    config.model.update(
        vocab_size=256_000,
        num_outputs=256_000,
        mlp_activation="squared_relu",
        positions="rotary",
    )
    config.model.update(use_bias=False, dropout_rate=0.0, remat=("Block",))
    config.data.update(batch_size=2304, seq_len=4096)
    config.training.update(num_minibatches=1)
    return config


def get(preset: str) -> ConfigDict:
    """Returns a preset, to be changed at will: fields can be set, none can be added.

    Raises:
      ValueError: if there is no such preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} must be one of {list(PRESETS)}")
    return PRESETS[preset]().lock()


def check(config: ConfigDict, accelerator: Accelerator | None = None) -> None:
    """Refuses a configuration that cannot work. Nothing is computed or compiled.

    Args:
      config: a whole configuration.
      accelerator: what it is to run on; given, the choice of attention is checked against it.

    Raises:
      ValueError: naming the field, its value, and the fix.
    """
    if not isinstance(config, ConfigDict | FrozenConfigDict):
        raise ValueError(f"config={config!r} must be a ConfigDict, as get('cpu') returns one")
    hardware.check(accelerator)
    check_fields(config, published_155m(), "")
    _check_ranges(config)
    model, training = config.model, config.training
    for field in ("dtype", "softmax_dtype"):
        if model[field] not in DTYPES:
            raise ValueError(f"model.{field}={model[field]!r} must be one of {DTYPES}")
    transformer.check(model, config.data.seq_len)
    if accelerator and model.dtype != "float32" and accelerator.peak(model.dtype) is None:
        units = list(accelerator.peak_flops)
        raise ValueError(
            f"model.dtype={model.dtype!r} must be one of {units}: {accelerator.title} has no"
            " unit for it"
        )
    check_attention(model, accelerator)
    if model.num_outputs != model.vocab_size:
        raise ValueError(
            f"model.num_outputs={model.num_outputs} must be vocab_size={model.vocab_size}: with"
            " fewer, some labels would have no logit; with more, tokens could be sampled that"
            " have no embedding; to pad, raise both"
        )
    gradient_accumulation.check_options(
        training.num_minibatches, training.accumulation, training.accumulator_dtype
    )
    gradient_accumulation.check_divides(
        jax.ShapeDtypeStruct((config.data.batch_size,), jnp.int32), training.num_minibatches
    )
    mixed_precision.loss_scale(training.loss_scale)
    optimizers.from_config(config.optimizer)
    _check_pairs(config)


def check_attention(model: ConfigDict, accelerator: Accelerator | None) -> None:
    """Refuses an attention that does not compile for an accelerator, before a compiler does.

    Args:
      model: the `model` part of a configuration.
      accelerator: to run on; None if unknown.

    Raises:
      ValueError: naming the field, its value, and the fix.
    """
    if accelerator and (
        reason := attention.why_unavailable(model.attention, accelerator, model.dtype)
    ):
        raise ValueError(
            f"model.attention={model.attention!r} cannot be had on {accelerator.title}:"
            f" {reason}"
        )


def check_fields(
    config: Any, template: ConfigDict, path: str, *, may_lack: bool = False
) -> None:
    """Compares names and types with those of a configuration that works.

    ConfigDict's own checks let some mistakes pass: it takes None for any field, and True for
    a number; and its errors name a field without its part.

    Args:
      config: a ConfigDict or a dict.
      template: a configuration that works.
      path: the part of the configuration, with a dot behind it; "" for all of it.
      may_lack: whether fields may be missing, as in a file that is older than they are.

    Raises:
      ValueError: naming the field, behind `path`, its value, and what is close.
    """
    for field in config:
        if field not in template:
            close = difflib.get_close_matches(field, template, n=1)
            hint = (
                f"did you mean {path}{close[0]}?"
                if close
                else f"the fields are {sorted(template)}"
            )
            raise ValueError(
                f"{path}{field}={config[field]!r} is no field and would change nothing: {hint}"
            )
    for field, example in template.items():
        if field not in config:
            if may_lack:
                continue
            raise ValueError(
                f"{path}{field} must be given: start from a preset, configs.get('155m')"
            )
        value = config[field]
        if isinstance(example, ConfigDict):
            if not isinstance(value, ConfigDict | Mapping):
                raise ValueError(
                    f"{path}{field}={value!r} must have fields, as {sorted(example)}"
                )
            check_fields(value, example, f"{path}{field}.", may_lack=may_lack)
        elif isinstance(value, bool) != isinstance(example, bool) or not isinstance(
            value, _accepted(example)
        ):
            raise ValueError(
                f"{path}{field}={value!r} must be of type {type(example).__name__}, as in"
                f" {example!r}"
            )


def _accepted(example: Any) -> tuple[type, ...]:
    accepted = {float: (float, int), tuple: (tuple, list)}
    return accepted.get(type(example), (type(example),))


def _check_ranges(config: ConfigDict) -> None:
    """Refuses numbers that no training can be done with."""
    positive = {
        "model": (
            "num_layers",
            "hidden_size",
            "head_dim",
            "num_heads",
            "mlp_expansion",
            "vocab_size",
            "max_seq_len",
        ),
        "optimizer": ("learning_rate", "total_steps"),
        "data": ("batch_size", "seq_len"),
        "training": ("steps",),
    }
    shares = {"model": ("dropout_rate",), "optimizer": ("b1", "b2")}
    for part, fields in positive.items():
        for field in fields:
            if not (config[part][field] > 0 and math.isfinite(config[part][field])):
                raise ValueError(
                    f"{part}.{field}={config[part][field]!r} must be positive and finite"
                )
    for part, fields in shares.items():
        for field in fields:
            if not 0 <= config[part][field] < 1:
                raise ValueError(
                    f"{part}.{field}={config[part][field]!r} must be in [0, 1): 1 leaves"
                    " nothing"
                )
    if config.seed < 0:
        raise ValueError(
            f"seed={config.seed!r} must not be negative: NumPy's generators take none"
        )
    if config.seed >= 2**32:
        raise ValueError(
            f"seed={config.seed!r} must be under 2**32: JAX's keys keep 32 bits of it"
        )
    for field in ("warmup_steps", "weight_decay", "clip_norm"):
        if not (config.optimizer[field] >= 0 and math.isfinite(config.optimizer[field])):
            value = config.optimizer[field]
            raise ValueError(
                f"optimizer.{field}={value!r} must not be negative, infinite or NaN; 0 turns"
                " it off"
            )
    if not 0 < config.optimizer.decay_rate <= 1:
        raise ValueError(
            f"optimizer.decay_rate={config.optimizer.decay_rate!r} must be in (0, 1]: what is"
            " left of the rate after a step"
        )
    if (
        config.optimizer.schedule == "warmup_cosine"
        and not config.optimizer.warmup_steps < config.optimizer.total_steps
    ):
        raise ValueError(
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} must be under"
            f" total_steps={config.optimizer.total_steps}: the rate would never come down"
        )


def _check_pairs(config: ConfigDict) -> None:
    """Refuses fields that do not go together: one would undo the other, or change nothing."""
    optimizer = config.optimizer
    if config.model.dtype == "float16" and config.training.loss_scale == "none":
        raise ValueError(
            "training.loss_scale='none' must be 'static' or 'dynamic' for"
            " model.dtype='float16': small gradients become 0"
        )
    if optimizer.weight_decay and optimizer.name != "adamw":
        raise ValueError(
            f"optimizer.weight_decay={optimizer.weight_decay!r} must be 0 for"
            f" optimizer.name={optimizer.name!r}, which ignores it; take 'adamw'"
        )
    if optimizer.schedule == "warmup_cosine" and config.training.steps > optimizer.total_steps:
        raise ValueError(
            f"training.steps={config.training.steps} must be at most"
            f" optimizer.total_steps={optimizer.total_steps}: from there on the rate is 0;"
            " raise both, as another run if this one has begun"
        )
