"""Configurations: everything that a training run depends on, checked before anything runs.

    config = get("cpu")
    config.training.steps = 100   # misspelt fields and values of another type are errors
    check(config)                 # and so are values that cannot work

A configuration is an `ml_collections.ConfigDict` (https://ml-collections.readthedocs.io) with
four parts, `model`, `optimizer`, `data` and `training`, and a `seed`. Dtypes are strings, so
that it can be printed, compared and stored.

A line of `FIELDS` declares a field. A stored configuration that is older than a field counts as
having its default. The default of a new field must therefore be the value with which the code
does what it did before. Presets may set another one.
"""

from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from course_lib import arguments, fields, optimizers
from course_lib.fields import Field, Free, Rounding, Rule
from course_lib.measure import hardware  # `measure` acts before JAX looks for devices
from course_lib.measure.hardware import Accelerator
from course_lib.models import attention, configuration
from course_lib.models.configuration import MODEL
from course_lib.one_device import gradient_accumulation, mixed_precision
from course_lib.optimizers import OPTIMIZER

PROGRAM = ("run", "mesh", "strategy")  # parts that only the program reads: program.settings

SEED = Rule(lambda x: 0 <= x < 2**32, "be in [0, 2**32): JAX's keys keep 32 bits of it")
DATA = dict(batch_size=64, seq_len=512)  # B sequences per step of L tokens each
TRAINING = dict(
    steps=Free(5),  # optimizer steps
    num_minibatches=4,  # M: activations of B / M sequences at a time
    accumulation=Rounding("scan", gradient_accumulation.METHODS),  # "loop" compiles all M
    accumulator_dtype=Field("float32", gradient_accumulation.ACCUMULATOR_DTYPES),
    backward=Rounding("autodiff", ("autodiff", "in_place")),  # "in_place": one tree of them
    loss_scale=Field("none", mixed_precision.LOSS_SCALES),  # "dynamic" for float16
    donate=Free(True),  # without it, two states are in memory: 12 more bytes per parameter
)
FIELDS = dict(
    model=MODEL, optimizer=OPTIMIZER, data=DATA, training=TRAINING, seed=Field(42, SEED)
)
"""All fields. Their defaults make `published_155m`."""


PRESETS: dict[str, Callable[[], ConfigDict]] = {}
"""Configurations by name."""


def preset(name: str) -> Callable[[Callable[[], ConfigDict]], Callable[[], ConfigDict]]:
    """Puts a function into `PRESETS`."""

    def enter(make: Callable[[], ConfigDict]) -> Callable[[], ConfigDict]:
        if name in PRESETS:
            raise ValueError(f"name={name!r} must be new: it is {PRESETS[name].__name__}")
        PRESETS[name] = make
        return make

    return enter


@preset("155m")
def published_155m() -> ConfigDict:
    """The Transformer of the series that this course builds on: 155.9 million parameters.

    The publication counts 155,877,376 parameters. On an A5000 (24 GB) its author measured
    3.9 GB and 0.91 s per step. A step on two CPU cores takes minutes.

    Source:
    https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_transformer.html
    """
    return fields.template(FIELDS)


@preset("cpu")
def cpu() -> ConfigDict:
    """For two CPU cores: 1.1 million parameters. 1,000 steps take about 95 s of CPU time, 50 to
    95 s on two idle cores.

    Trained on the course's corpus it predicts better than a bigram model (notebook 05).
    The program adds model.flat_products and model.attention="blocks", which are faster on a
    CPU (docs/benchmarks.md).
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


@preset("llama")
def small_llama() -> ConfigDict:
    """As `cpu`, in Llama's shape, which other programs can read: 1.1 million parameters."""
    config = cpu()
    config.model.update(mlp_size=352, mlp_gate=True, mlp_activation="silu", norm="rms")
    config.model.update(positions="rotary", use_bias=False, attention_first=True)
    config.optimizer.decayed = "matrices"
    return config


@preset("t4")
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


@preset("80gb")
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


def nemotron_340b() -> ConfigDict:
    """Nemotron-4 340B: 341 billion parameters, batches of 2304 x 4096 tokens on 6,144 H100s.

    It is not a preset, because no single device can hold it.

    Source: https://arxiv.org/abs/2406.11704, section 2.
    """
    config = published_155m()
    config.model.update(num_layers=96, hidden_size=18_432, head_dim=192, num_heads=96)
    config.model.update(num_kv_heads=8, max_seq_len=4096, positions="rotary")
    config.model.update(vocab_size=256_000, num_outputs=256_000, mlp_activation="squared_relu")
    config.model.update(use_bias=False, dropout_rate=0.0, remat=("Block",))
    config.data.update(batch_size=2304, seq_len=4096)
    config.training.update(num_minibatches=1)
    return config


def llama2_7b() -> ConfigDict:
    """Llama 2 7B: 6.7 billion parameters, batches of 1024 x 4096 tokens.

    It is not a preset, because its train state takes 75 GiB.

    Source: https://arxiv.org/abs/2307.09288, section 2.2, and
    https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json.
    """
    config = published_155m()
    config.model.update(num_layers=32, hidden_size=4096, head_dim=128, num_heads=32)
    config.model.update(max_seq_len=4096, vocab_size=32_000, num_outputs=32_000)
    config.model.update(mlp_size=11_008, mlp_gate=True, mlp_activation="silu")
    config.model.update(norm="rms", norm_epsilon=1e-5, positions="rotary", use_bias=False)
    config.model.update(attention_first=True, dropout_rate=0.0, remat=("Block",))
    config.data.update(batch_size=1024, seq_len=4096)
    config.training.update(num_minibatches=1)
    return config


def get(preset: str) -> ConfigDict:
    """Returns a preset. Its fields can be set; none can be added."""
    arguments.one_of("preset", preset, PRESETS)
    return PRESETS[preset]().lock()


def check(config: ConfigDict, accelerator: Accelerator | None = None) -> None:
    """Refuses a configuration that cannot work, on an accelerator if one is given. Nothing is
    computed or compiled, and the parts in `PROGRAM` are not looked at.
    """
    hardware.check(accelerator)
    own = {name: part for name, part in config.items() if name not in PROGRAM}
    fields.check(own, published_155m(), fields.by_name(FIELDS))
    check_pairs(config)
    if not accelerator:
        return
    if config.model.dtype != "float32" and accelerator.peak(config.model.dtype) is None:
        raise ValueError(
            f"model.dtype={config.model.dtype!r} must be one of {list(accelerator.peak_flops)}:"
            f" {accelerator.title} has no unit for it"
        )
    check_attention(config.model, accelerator)


def check_attention(model: ConfigDict, accelerator: Accelerator | None) -> None:
    """Refuses an attention that does not compile for an accelerator, before a compiler does."""
    if accelerator and (
        why := attention.why_unavailable(model.attention, accelerator, model.dtype)
    ):
        raise ValueError(
            f"model.attention={model.attention!r} cannot run on {accelerator.title}: {why}"
        )


def check_pairs(config: ConfigDict) -> None:
    """Refuses fields that do not go together: one would undo the other, or change nothing."""
    arguments.refuse(configuration.errors(config.model, config.data.seq_len))
    arguments.refuse(_errors(config))


def _errors(c: ConfigDict) -> Iterator[str]:
    """Yields an error for each rule between fields of several parts that is broken."""
    m, o, t = c.model, c.optimizer, c.training
    row = optimizers.OPTIMIZERS[o.name]
    if m.num_outputs != m.vocab_size:
        yield (
            f"model.num_outputs={m.num_outputs} must be vocab_size={m.vocab_size}: with fewer,"
            " some labels would have no logit; with more, tokens could be sampled that have no"
            " embedding; to pad, raise both"
        )
    if c.data.batch_size % t.num_minibatches:
        size = c.data.batch_size
        yield f"training.num_minibatches={t.num_minibatches} must divide data.batch_size={size}"
    if m.dtype == "float16" and t.loss_scale == "none":
        yield (
            "training.loss_scale='none' must be 'static' or 'dynamic' for"
            " model.dtype='float16': small gradients become 0"
        )
    if o.weight_decay and not row.decays:
        decaying = [name for name, row in optimizers.OPTIMIZERS.items() if row.decays]
        yield (
            f"optimizer.weight_decay={o.weight_decay!r} must be 0 for"
            f" optimizer.name={o.name!r}, which ignores it; take one of {decaying}"
        )
    if o.param_dtype == "bfloat16" and m.dtype == "float16":
        yield (
            "optimizer.param_dtype='bfloat16' must come with model.dtype='bfloat16' or"
            " 'float32', not 'float16': most devices that compute in float16 have no bfloat16"
        )
    if o.schedule in optimizers.ENDING:
        stable = o.schedule == "warmup_stable_decay"
        last = o.total_steps - round(o.cooldown * o.total_steps) if stable else o.total_steps
        if o.warmup_steps >= last:
            then = "begins to fall" if stable else "reaches 0"
            yield (
                f"optimizer.warmup_steps={o.warmup_steps} must be under {last}, where the rate"
                f" {then} (total_steps={o.total_steps})"
            )
        if t.steps > o.total_steps:
            yield (
                f"training.steps={t.steps} must be at most"
                f" optimizer.total_steps={o.total_steps}: from there on the rate is 0; raise"
                " both; a run that has begun keeps total_steps: another one may begin with its"
                " weights (--from)"
            )
    streamed = [name for name, row in optimizers.OPTIMIZERS.items() if row.streams]
    offload = o.offload and "optimizer.offload=True"
    in_place = t.backward == "in_place" and "training.backward='in_place'"
    for chosen, field, value, possible, why in (
        (offload, "optimizer.name", o.name, streamed, "it streams the moments of a layer"),
        (offload, "optimizer.param_dtype", o.param_dtype, ["float32"], "rounding needs all"),
        (offload, "optimizer.decayed", o.decayed, ["all"], "a layer comes without names"),
        (offload, "model.scan_layers", m.scan_layers, [True], "it streams stacked layers"),
        (offload, "training.loss_scale", t.loss_scale, ["none"], "no update may be skipped"),
        (in_place, "model.scan_layers", m.scan_layers, [True], "it walks stacked layers"),
        (in_place, "model.num_experts", m.num_experts, [0], "a layer has activations only"),
        (in_place, "model.remat", tuple(m.remat), [("Block",)], "it keeps inputs of layers"),
        (in_place, "training.loss_scale", t.loss_scale, ["none"], "its loss is not scaled"),
    ):
        if chosen and value not in possible:
            needed = " or ".join(map(repr, possible))
            yield f"{field}={value!r} must be {needed} for {chosen}: {why}"
