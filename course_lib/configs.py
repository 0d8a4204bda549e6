"""Configurations: everything that a training run depends on, checked before anything runs.

    config = get("cpu")
    config.training.steps = 100   # misspelt fields and values of another type are errors
    check(config)                 # and so are values that cannot work

A configuration is an `ml_collections.ConfigDict` (https://ml-collections.readthedocs.io) with
four parts, `model`, `optimizer`, `data` and `training`, and a `seed`. Dtypes are strings, so
that it can be printed, compared and stored.

A field's default is its value in `published_155m`. A stored configuration that is older than a
field counts as having that default. The default of a new field must therefore be the value with
which the code does what it did before. Presets may set another one.
"""

import difflib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
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
from course_lib.smaller_and_faster import smallest_step

DTYPES = ("float32", "bfloat16", "float16")
PROGRAM = ("run", "mesh", "strategy")  # parts that only the program reads: program.settings


def published_155m() -> ConfigDict:
    """The Transformer of the series that this course builds on: 155.9 million parameters.

    The publication counts 155,877,376 parameters. On an A5000 (24 GB) its author measured
    3.9 GB and 0.91 s per step. A step on two CPU cores takes minutes.

    Source:
    https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_transformer.html
    """
    model = dict(
        num_layers=12,  # N: parameters, time and saved activations grow in proportion
        hidden_size=1024,  # D: parameters and time grow with its square, activations with it
        head_dim=128,  # K: below 64 the matrix units idle
        num_heads=8,  # H: H * K must be D
        mlp_expansion=4,  # F / D: most of the activations are the MLP's hidden ones
        vocab_size=2048,  # rows of the token table; at least the tokenizer's
        num_outputs=2048,  # V: the loss holds several times 4 * B * L * V bytes of logits
        max_seq_len=512,  # rows of the position table; scores take H * L * L without flash
        dropout_rate=0.1,  # with 0, no random numbers and no masks
        causal_mask=True,  # without it every position sees its own label
        dtype="bfloat16",  # of activations; float32 doubles memory, float16 needs a loss scale
        softmax_dtype="float32",  # of scores, the largest arrays; bfloat16: half, less exact
        scan_layers=True,  # compiles one block instead of N; activations are stacked arrays
        remat=("MLP", "Attn"),  # computed again in the backward pass: see rematerialization
        remat_policy="nothing",  # what a rematerialized module still saves
        remat_names=(),  # which named values the policies "names" and "offload" keep
        attention="reference",  # see course_lib.models.attention
        loss_chunks=1,  # pieces of the logits, one at a time; more take less memory
        loss_along="vocabulary",  # or "tokens": see smaller_and_faster.large_vocabulary
        flat_products=False,  # B and L as one dimension: faster on a CPU, see models.products
        # the next six are explained in course_lib.models.layers
        qk_norm=False,  # normalizes queries and keys, so that scores stay small
        parallel_block=False,  # MLP beside attention: half as much to send along "tensor"
        num_kv_heads=0,  # G: heads of keys and values; fewer take less memory; 0 means H
        mlp_activation="gelu",  # or "squared_relu"
        positions="learned",  # or "rotary", which has no table
        use_bias=True,  # False: matmuls and norms have no bias
        num_experts=0,  # E MLPs, k of them per token; memory grows, FLOPs hardly
        experts_per_token=1,  # k: FLOPs of the MLP grow in proportion
        capacity_factor=1.25,  # slots per expert / its even share; fewer drop more tokens
        balance_weight=0.01,  # of the load-balancing loss; at 0, a few experts may get all
    )
    optimizer = dict(
        name="adam",  # two more float32 numbers per parameter; see course_lib.optimizers
        param_dtype="float32",  # bfloat16: half the bytes, rounded stochastically
        learning_rate=4e-4,  # the peak of the schedule
        schedule="warmup_exponential",  # "constant", "warmup_exponential" or "warmup_cosine"
        warmup_steps=10,  # "warmup_exponential", "warmup_cosine": from 0 to the peak
        decay_rate=0.99,  # "warmup_exponential": multiplies the rate in each step
        total_steps=1000,  # "warmup_cosine": when the rate reaches 0
        b1=0.9,  # Adam's memory of gradients, about 1 / (1 - b1) steps
        b2=0.999,  # Adam's memory of their squares
        weight_decay=0.0,  # each step subtracts weight_decay * rate * parameter
        block_size=256,  # "adamw_8bit": numbers per scale; a block lies on one device
        clip_norm=0.0,  # scales gradients down to that norm; 0: no clipping
        offload=False,  # moments in the host's memory, streamed layer by layer
    )
    data = dict(
        batch_size=64,  # B sequences per step
        seq_len=512,  # L tokens each
    )
    training = dict(
        steps=5,  # optimizer steps
        num_minibatches=4,  # M: activations of B / M sequences at a time
        accumulation="scan",  # "scan" compiles one minibatch, "loop" all M
        accumulator_dtype="float32",  # 4 bytes per parameter if M > 1 or "in_place"
        backward="autodiff",  # "in_place" has one tree of gradients: see smallest_step
        loss_scale="none",  # "dynamic" for float16
        donate=True,  # without it, two states are in memory: 12 more bytes per parameter
    )
    return ConfigDict(
        dict(model=model, optimizer=optimizer, data=data, training=training, seed=42)
    )


def cpu() -> ConfigDict:
    """For two CPU cores: 1.1 million parameters. 1,000 steps take about 95 s of CPU time, 50 to
    95 s on two idle cores.

    Trained on the course's corpus it predicts better than a bigram model (notebook 05).
    model.flat_products and model.attention="blocks" make it faster on a CPU
    (docs/benchmarks.md).
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
    """For a T4 of 16 GB, which Colab has: 155.9 million parameters, as in `155m`, but in
    float16, with dynamic loss scaling.

    A T4 has no bfloat16 units. Compiled for it, a step needs 3.9 GiB, which leaves room for a
    batch without minibatches, or for less remat.
    """
    config = published_155m()
    config.model.update(dtype="float16")
    config.optimizer.update(schedule="warmup_cosine", warmup_steps=100, clip_norm=1.0)
    config.training.update(steps=1000, loss_scale="dynamic")
    return config


def gpu_80gb() -> ConfigDict:
    """For one GPU of 80 GB: 2.5 billion parameters. Compiled for an H100, a step needs 55 GiB,
    28 GiB of them for the train state.
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
"""Configurations by name."""


def nemotron_340b() -> ConfigDict:
    """Nemotron-4 340B: 341 billion parameters, batches of 2304 x 4096 tokens on 6,144 H100s.

    It is not a preset, because no single device can hold it.

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
    """Returns a preset. Its fields can be set; none can be added.

    Raises:
      ValueError: if there is no such preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r} must be one of {list(PRESETS)}")
    return PRESETS[preset]().lock()


def check(config: ConfigDict, accelerator: Accelerator | None = None) -> None:
    """Refuses a configuration that cannot work. Nothing is computed or compiled.

    Args:
      config: a configuration. The parts in `PROGRAM` are not looked at.
      accelerator: to run on; None skips the checks that depend on it.

    Raises:
      ValueError: naming the field, its value, and the fix.
    """
    if not isinstance(config, ConfigDict | FrozenConfigDict):
        raise ValueError(f"config={config!r} must be a ConfigDict, as get('cpu') returns one")
    hardware.check(accelerator)
    check_fields(
        {name: part for name, part in config.items() if name not in PROGRAM}, published_155m()
    )
    check_limits(config, LIMITS)
    model, training = config.model, config.training
    transformer.check(model, config.data.seq_len)
    if accelerator and model.dtype != "float32" and accelerator.peak(model.dtype) is None:
        units = list(accelerator.peak_flops)
        raise ValueError(
            f"model.dtype={model.dtype!r} must be one of {units}: {accelerator.title} has no"
            " unit for it"
        )
    check_attention(model, accelerator)
    gradient_accumulation.check_options(
        training.num_minibatches, training.accumulation, training.accumulator_dtype
    )
    gradient_accumulation.check_divides(
        jax.ShapeDtypeStruct((config.data.batch_size,), jnp.int32), training.num_minibatches
    )
    if training.backward not in smallest_step.BACKWARD:
        raise ValueError(
            f"training.backward={training.backward!r} must be one of {smallest_step.BACKWARD}"
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
            f"model.attention={model.attention!r} cannot run on {accelerator.title}: {reason}"
        )


def check_fields(
    config: Any, template: ConfigDict, path: str = "", *, may_lack: bool = False
) -> None:
    """Compares names and types of fields with those of a configuration that works.

    ConfigDict's own checks accept None for any field and True for a number, and their errors
    name a field without its part.

    Args:
      config: a ConfigDict or a dict.
      template: a configuration that works.
      path: the part of the configuration, with a dot behind it; "" for all of it.
      may_lack: whether fields may be missing, as in a file from before they existed.

    Raises:
      ValueError: naming the field with its part, its value, and similar names.
    """
    for name in config:
        if name not in template:
            raise no_field(f"{path}{name}", config[name], [f"{path}{n}" for n in template])
    for name, example in template.items():
        field = f"{path}{name}"
        if name not in config:
            if may_lack:
                continue
            raise ValueError(f"{field} must be given: start from a preset, configs.get('155m')")
        value = config[name]
        if isinstance(example, ConfigDict):
            if not isinstance(value, ConfigDict | FrozenConfigDict | Mapping):
                raise ValueError(f"{field}={value!r} must have fields, as {sorted(example)}")
            check_fields(value, example, f"{field}.", may_lack=may_lack)
            continue
        types = {float: (float, int), tuple: (tuple, list)}.get(type(example), type(example))
        if isinstance(value, bool) != isinstance(example, bool) or not isinstance(value, types):
            kind = type(example).__name__
            raise ValueError(f"{field}={value!r} must be of type {kind}, as in {example!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field}={value} must be a finite number")
        if isinstance(value, tuple | list) and not all(isinstance(x, str) for x in value):
            raise ValueError(f"{field}={value!r} must hold strings")


def no_field(field: str, value: Any, fields: Iterable[str]) -> ValueError:
    """Returns the error for a field that does not exist."""
    close = difflib.get_close_matches(field, fields, n=3, cutoff=0)
    return ValueError(
        f"{field}={value!r} is no field and would change nothing: did you mean"
        f" {' or '.join(close)}?"
    )


Limits = Mapping[str, tuple[Callable[[Any], bool], str]]
"""Maps a condition in words to its test and to the fields that must pass it."""

LIMITS: Limits = {
    "be positive": (
        lambda x: x > 0,
        "model.num_layers model.hidden_size model.head_dim model.num_heads model.mlp_expansion"
        " model.vocab_size model.max_seq_len optimizer.learning_rate optimizer.total_steps"
        " data.batch_size data.seq_len training.steps training.num_minibatches",
    ),
    "be at least 16: each block has a scale": (lambda x: x >= 16, "optimizer.block_size"),
    f"be one of {gradient_accumulation.METHODS}": (
        gradient_accumulation.METHODS.__contains__,
        "training.accumulation",
    ),
    "be in [0, 1): 1 leaves nothing": (
        lambda x: 0 <= x < 1,
        "model.dropout_rate optimizer.b1 optimizer.b2",
    ),
    "not be negative; 0 turns it off": (
        lambda x: x >= 0,
        "optimizer.warmup_steps optimizer.weight_decay optimizer.clip_norm",
    ),
    "be in (0, 1]: it multiplies the rate in each step": (
        lambda x: 0 < x <= 1,
        "optimizer.decay_rate",
    ),
    "be in [0, 2**32): JAX's keys keep 32 bits of it": (lambda x: 0 <= x < 2**32, "seed"),
    f"be one of {DTYPES}": (DTYPES.__contains__, "model.dtype model.softmax_dtype"),
}


def check_limits(config: ConfigDict, limits: Limits) -> None:
    """Refuses values beyond their limits.

    Raises:
      ValueError: naming the field, its value, and what it must be.
    """
    for must, (allowed, fields) in limits.items():
        for field in fields.split():
            value = functools.reduce(operator.getitem, field.split("."), config)
            if not allowed(value):
                raise ValueError(f"{field}={value!r} must {must}")


def _check_pairs(config: ConfigDict) -> None:
    """Refuses fields that do not go together: one would undo the other, or change nothing."""
    model, optimizer, steps = config.model, config.optimizer, config.training.steps
    if model.num_outputs != model.vocab_size:
        raise ValueError(
            f"model.num_outputs={model.num_outputs} must be vocab_size={model.vocab_size}: with"
            " fewer, some labels would have no logit; with more, tokens could be sampled that"
            " have no embedding; to pad, raise both"
        )
    if model.dtype == "float16" and config.training.loss_scale == "none":
        raise ValueError(
            "training.loss_scale='none' must be 'static' or 'dynamic' for"
            " model.dtype='float16': small gradients become 0"
        )
    if optimizer.weight_decay and optimizer.name not in optimizers.DECAYING:
        raise ValueError(
            f"optimizer.weight_decay={optimizer.weight_decay!r} must be 0 for"
            f" optimizer.name={optimizer.name!r}, which ignores it; take one of"
            f" {optimizers.DECAYING}"
        )
    if optimizer.param_dtype == "bfloat16" and model.dtype == "float16":
        raise ValueError(
            "optimizer.param_dtype='bfloat16' must come with model.dtype='bfloat16' or"
            " 'float32', not 'float16': most devices that compute in float16 have no bfloat16"
        )
    if optimizer.offload:
        if optimizer.name == "sgd":
            raise ValueError(
                "optimizer.offload=True must be False for optimizer.name='sgd': it has no"
                " moments that could be on the host"
            )
        if optimizer.name not in ("adam", "adamw", "lion"):
            raise ValueError(
                f"optimizer.offload=True must come with 'adam', 'adamw' or 'lion', not"
                f" optimizer.name={optimizer.name!r}, whose state has other shapes than the"
                " parameters, so that it cannot be streamed layer by layer"
            )
        if optimizer.param_dtype != "float32":
            raise ValueError(
                "optimizer.offload=True must come with optimizer.param_dtype='float32', not"
                f" {optimizer.param_dtype!r}: rounding needs the updates of all layers at once"
            )
        if not model.scan_layers:
            raise ValueError(
                "optimizer.offload=True must have model.scan_layers=True: moments are fetched"
                " layer by layer from stacked arrays, which only scan_layers makes"
            )
        if config.training.loss_scale != "none":
            raise ValueError(
                f"optimizer.offload=True must have training.loss_scale='none', not"
                f" {config.training.loss_scale!r}: a loss scale skips updates after they are"
                " computed, but by then the old moments on the host are overwritten"
            )
    if config.training.backward == "in_place":
        _check_in_place(config)
    if optimizer.schedule == "warmup_cosine" and steps > optimizer.total_steps:
        raise ValueError(
            f"training.steps={steps} must be at most"
            f" optimizer.total_steps={optimizer.total_steps}: from there on the rate is 0;"
            " raise both; a run that has begun keeps total_steps, so start another one"
        )


def _check_in_place(config: ConfigDict) -> None:
    """Refuses what `smallest_step.gradient_in_place` cannot do for the course's Transformer.

    Raises:
      ValueError: the field, its value, the one that it needs, and why.
    """
    model, training = config.model, config.training
    for field, value, needed, why in (
        ("model.scan_layers", model.scan_layers, True, "it walks through stacked layers"),
        ("model.num_experts", model.num_experts, 0, "a layer returns activations only"),
        (
            "model.remat",
            tuple(model.remat),
            ("Block",),
            "it keeps the input of each layer, and what model.remat_policy names",
        ),
        (
            "training.loss_scale",
            training.loss_scale,
            "none",
            "it begins with the loss of the head, which is not scaled",
        ),
    ):
        if value != needed:
            raise ValueError(
                f"{field}={value!r} must be {needed!r} for training.backward='in_place': {why}"
            )
