"""Optimizers and learning rate schedules by name. The mathematics is Optax's
(https://optax.readthedocs.io).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib
from jax.typing import ArrayLike
from ml_collections import ConfigDict
from optax.contrib import MuonDimensionNumbers

from course_lib import arguments, fields
from course_lib.fields import FRACTION, NOT_NEGATIVE, Field, Rule, at_least

PyTree = Any
ByName = Callable[[str], Any]  # of a parameter: `arguments.name_in_tree`
_with_path = jax.tree_util.tree_map_with_path


def _falling(config: ConfigDict, first: int) -> optax.Schedule:
    """Rises to the peak, stays there up to a step, and falls in a line to `total_steps`."""
    peak = config.learning_rate
    rise = optax.linear_schedule(0.0, peak, config.warmup_steps)
    fall = optax.linear_schedule(peak, 0.0, config.total_steps - first)
    parts = [rise, optax.constant_schedule(peak), fall]
    return optax.join_schedules(parts, [config.warmup_steps, first])


SCHEDULES = {
    "constant": lambda config: optax.constant_schedule(config.learning_rate),
    "warmup_exponential": lambda config: optax.warmup_exponential_decay_schedule(
        0.0,
        config.learning_rate,
        config.warmup_steps,
        transition_steps=1,
        decay_rate=config.decay_rate,
    ),
    "warmup_cosine": lambda config: optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.total_steps
    ),
    "warmup_linear": lambda config: _falling(config, config.warmup_steps),
    "warmup_stable_decay": lambda config: _falling(
        config, config.total_steps - round(config.cooldown * config.total_steps)
    ),
}
"""Learning rates: constant, or rising from 0 over `warmup_steps` and then falling, by the
factor `decay_rate` per step, or to 0 at `total_steps`: along a cosine, in a line, or in a line
over the last `cooldown` of all steps (WSD, Hu et al., 2024, https://arxiv.org/abs/2404.06395).

A configuration has the fields of all of them, so that changing `schedule` is enough. A schedule
ignores the fields that it does not name above.
"""


ENDING = ("warmup_cosine", "warmup_linear", "warmup_stable_decay")
"""Schedules that reach 0."""


def _memory() -> Any:
    """Returns the module of notebook 17, which most runs do not need."""
    from course_lib.smaller_and_faster import optimizer_memory

    return optimizer_memory


class Optimizer(NamedTuple):
    """An optimizer that a configuration can name."""

    make: Callable[..., optax.GradientTransformation]  # (config, schedule, *of `reads`)
    about: str  # for --help
    decays: bool = False  # whether it reads `weight_decay`
    streams: bool = False  # whether its state has the shapes of the parameters: see `offload`
    whole: bool = False  # whether a device needs whole matrices: `many_devices.muon` moves them
    # ||update on many devices - update on one|| / ||update||: 0 if no sum runs over devices
    tolerance: float = 0.0
    reads: tuple[str, ...] = ()  # which of `get`'s functions of a parameter's name
    fields: Mapping[str, Any] = {}  # that it alone has, as in `OPTIMIZER`


OPTIMIZERS = {
    "sgd": Optimizer(lambda c, rate: optax.sgd(rate), "gradient descent"),
    "adam": Optimizer(
        lambda c, rate: optax.adam(rate, b1=c.b1, b2=c.b2),
        "arXiv 1412.6980",
        streams=True,
    ),
    "adamw": Optimizer(
        lambda c, rate: optax.adamw(rate, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay),
        "decoupled weight decay, arXiv 1711.05101",
        decays=True,
        streams=True,
    ),
    "adamw_bf16": Optimizer(
        lambda c, rate: _memory().adamw_bf16(rate, c.b1, c.b2, weight_decay=c.weight_decay),
        "AdamW with moments in bfloat16",
        decays=True,
    ),
    "adamw_8bit": Optimizer(
        lambda c, rate, stacks: _memory().adamw_8bit(
            rate,
            c.b1,
            c.b2,
            weight_decay=c.weight_decay,
            block_size=c.block_size,
            stacks=stacks,
        ),
        "AdamW with moments in 8 bits",
        decays=True,
        reads=("stacks",),
        # numbers per scale; a block lies on one device
        fields=dict(block_size=Field(256, at_least(16, ": each block has a scale"))),
    ),
    "lion": Optimizer(
        lambda c, rate: optax.lion(rate, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay),
        "one moment, and updates of one size, arXiv 2302.06675",
        decays=True,
        streams=True,
    ),
    "muon": Optimizer(
        lambda c, rate, *where: muon(rate, c.b1, c.b2, c.weight_decay, *where),
        "one moment, made orthogonal, https://kellerjordan.github.io/posts/muon; AdamW for"
        " embeddings, output layer, norms and biases",
        decays=True,
        whole=True,
        tolerance=1e-4,
        reads=("matrices", "stacks"),
    ),
    "adafactor": Optimizer(
        lambda c, rate, stacks: adafactor(rate, stacks),
        "no first moment, the second one as its row and column means"
        ", arXiv 1804.04235; the rate is relative to a parameter's size",
        tolerance=1e-5,
        reads=("stacks",),
    ),
}
"""Optimizers by name. `configs`, --help and the tests of optimizers follow this table."""

PARAM_DTYPES = ("float32", "bfloat16")
"""Dtypes of the stored parameters. bfloat16 ones are rounded stochastically."""

RATE = Rule(lambda x: 0 < x <= 1, "be in (0, 1]")
OPTIMIZER = dict(
    name=Field("adam", OPTIMIZERS),  # two more float32 numbers per parameter
    param_dtype=Field("float32", PARAM_DTYPES),  # bfloat16: half the bytes
    learning_rate=4e-4,  # the peak of the schedule
    schedule=Field("warmup_exponential", SCHEDULES),
    warmup_steps=Field(10, NOT_NEGATIVE),  # from 0 to the peak
    decay_rate=Field(0.99, RATE),  # "warmup_exponential": multiplies the rate in each step
    total_steps=1000,  # of `ENDING`: when the rate reaches 0
    cooldown=Field(0.2, RATE),  # "warmup_stable_decay": the share of steps that it falls in
    b1=Field(0.9, FRACTION),  # Adam, Lion: memory of gradients, about 1 / (1 - b1) steps
    b2=Field(0.999, FRACTION),  # Adam: of their squares; Lion: of gradients, and wants 0.99
    weight_decay=0.0,  # each step subtracts weight_decay * rate * parameter
    clip_norm=0.0,  # scales gradients down to that norm; 0: no clipping
    offload=False,  # moments in the host's memory, streamed layer by layer
) | {name: field for row in OPTIMIZERS.values() for name, field in row.fields.items()}
"""The fields of a configuration's `optimizer` part."""


def muon(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    weight_decay: ArrayLike = 0.0,
    matrices: ByName | None = None,
    stacks: ByName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon for the parameters that `matrices` chooses (`matrix_axes`), AdamW with `b1` and `b2`
    for the rest. Updates are as large as AdamW's, so a learning rate means the same for both.
    """
    return optax.contrib.muon(
        learning_rate,
        adam_b1=b1,
        adam_b2=b2,
        weight_decay=weight_decay,
        adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=lambda params: matrix_axes(params, matrices, stacks),
        consistent_rms=0.2,
    )


def adafactor(
    learning_rate: optax.ScalarOrSchedule, stacks: ByName | None = None
) -> optax.GradientTransformationExtraArgs:
    """`optax.adafactor` of parameters of which some are stacks of layers (`per_layer`)."""
    return per_layer(optax.adafactor(learning_rate, min_dim_size_to_factor=32), stacks)


def per_layer(
    optimizer: optax.GradientTransformation, stacks: ByName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Lets an optimizer treat each layer of a stack (`is_stack`) as parameters of its own.

    Adafactor takes means over a whole array: it would make other updates of stacked layers than
    of single ones.
    """
    inside = optax.with_extra_args_support(optimizer)

    def over_layers(function: Callable[..., Any], params: PyTree, *rest: PyTree) -> Any:
        trees = params, *rest
        leaves = jax.tree_util.tree_leaves_with_path(params)
        stacked = {path: _memory().is_stack(path, stacks) for path, _ in leaves}

        def axis(path: Any) -> int | None:
            # An array of the state has the path of its parameter at the end.
            ends = (path[i:] for i in range(len(path)))
            param = next((end for end in ends if end in stacked), None)
            return 0 if stacked.get(param) else None  # None: shared, as counts of steps

        def axes(tree: PyTree) -> PyTree:
            return _with_path(lambda path, _: axis(path), tree)

        def one_layer(path: Any, x: Any) -> Any:
            return x if axis(path) is None else jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        if not any(stacked.values()):
            return function(*trees)
        result = axes(jax.eval_shape(function, *_with_path(one_layer, trees)))
        return jax.vmap(function, axes(trees), result)(*trees)

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> Any:
        return over_layers(functools.partial(inside.update, **extra), grads, state, params)

    init = functools.partial(over_layers, inside.init)
    return optax.GradientTransformationExtraArgs(init, update)


def matrix_axes(
    params: PyTree, where: ByName | None = None, stacks: ByName | None = None
) -> PyTree:
    """Returns which parameters are matrices for Muon, and their axes.

    For the Transformer, they are the kernels inside the layers; each scanned layer, and each
    expert, has one of its own. All else is left to Adam, as Muon's author does (Jordan et al.,
    2024, https://kellerjordan.github.io/posts/muon): it has None in the tree that is returned.
    Parameters with matrices of which none is in a layer are refused: Adam would train them all.

    For any other model, `where(name)`, with a name as "blocks/0/up/kernel", says True for those
    that have two axes, or three in a stack (`is_stack`), and the `MuonDimensionNumbers` of
    those with more. Arrays with fewer axes are Adam's, whatever it says.
    """

    def of_leaf(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        if where is not None:
            chosen = where(name := arguments.name_in_tree(path))
            if isinstance(chosen, MuonDimensionNumbers):
                return chosen
            first = int(_memory().is_stack(path, stacks))
            if chosen and leaf.ndim > first + 2:
                raise ValueError(
                    f"where({name!r})={chosen!r} must be MuonDimensionNumbers for an array of"
                    f" shape {leaf.shape}: which axes are a matrix's inputs, which its outputs?"
                    " If the first one is that of layers, `stacks` can say so"
                )
            is_matrix = chosen and leaf.ndim == first + 2
            return MuonDimensionNumbers(first, first + 1) if is_matrix else None
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        if not names or not names[0].startswith("block") or names[-1] != "kernel":
            return None
        module = names[-2]
        batch = (names[0] == "block") + module.startswith("expert")  # layers, experts
        axes = tuple(range(batch, leaf.ndim))
        inputs = axes[:-1] if module == "output_layer" else axes[:1]
        return MuonDimensionNumbers(inputs, axes[len(inputs) :])

    chosen = _with_path(of_leaf, params)
    if not jax.tree.leaves(chosen) and any(x.ndim > 1 for x in jax.tree.leaves(params)):
        raise ValueError(
            "params must have a kernel in a layer, as params['block_0']['mlp']['kernel'], or"
            " `optimizers.get('muon', rate, matrices=where)` chooses others: Muon would leave"
            " all to Adam"
        )
    return chosen


def cast_params(config: ConfigDict, params: Any) -> Any:
    """Returns float32 parameters in `param_dtype` of a configuration's `optimizer` part."""
    if config.param_dtype == "float32":
        return params
    return jax.tree.map(lambda leaf: leaf.astype(config.param_dtype), params)


def get(
    name: str,
    learning_rate: Any,
    *,
    matrices: ByName | None = None,
    stacks: ByName | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """Returns an optimizer by name, for any model.

        get("muon", 0.02, matrices=lambda name: name.endswith("kernel"))

    Args:
      name: one of `OPTIMIZERS`.
      learning_rate: a number, or a schedule.
      matrices: which parameters Muon trains, by names as "blocks/0/up/kernel"
        (`matrix_axes`). None: those of the Transformer.
      stacks: likewise, which arrays have a first axis of layers, each of which gets the update
        of a single one. None: those in the Transformer's "block".
      options: other fields of `OPTIMIZER`.
    """
    arguments.one_of("name", name, OPTIMIZERS)
    if matrices is not None and "matrices" not in OPTIMIZERS[name].reads:
        raise ValueError(f"matrices={matrices!r} must be None for {name!r}, which reads none")
    unread = set("schedule warmup_steps decay_rate total_steps cooldown".split())
    unread |= set() if OPTIMIZERS[name].decays else {"weight_decay"}
    unread |= {n for row in OPTIMIZERS.values() for n in row.fields} - {
        *OPTIMIZERS[name].fields
    }
    if wrong := sorted(unread & options.keys()):
        raise ValueError(
            f"{wrong[0]}={options[wrong[0]]!r} must be left out: get({name!r}, ...) reads none"
        )
    config = fields.template(dict(optimizer=OPTIMIZER)).optimizer
    schedule = learning_rate if callable(learning_rate) else None
    if isinstance(learning_rate, jax.Array):  # a configuration holds no arrays
        schedule = optax.constant_schedule(learning_rate)
    rate = {} if schedule else dict(learning_rate=learning_rate)
    with config.unlocked():
        config.update(dict(schedule="constant", name=name, **rate, **options))
    return from_config(config, schedule, matrices=matrices, stacks=stacks)


def from_config(
    config: ConfigDict,
    schedule: optax.Schedule | None = None,
    around: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    | None = None,
    **by_name: ByName | None,
) -> optax.GradientTransformation:
    """Returns the optimizer of the `optimizer` part of a configuration; with `clip_norm` it
    clips the gradient first. `schedule`: the learning rate by step, in place of the
    configuration's. `around`: wraps what turns float32 gradients into updates. `by_name`:
    `matrices` and `stacks`, as in `get`; an optimizer that does not read them ignores them.
    """
    known = dict(optimizer=OPTIMIZER)
    fields.check(dict(optimizer=config), fields.template(known), fields.by_name(known))
    rate = SCHEDULES[config.schedule](config) if schedule is None else schedule
    row = OPTIMIZERS[config.name]
    update = row.make(config, rate, *map(by_name.get, row.reads))
    if around is not None:
        update = around(update)
    if config.offload:
        from course_lib.smaller_and_faster import offload

        update = offload.streamed(update)  # after the norm, which needs all gradients
    if config.clip_norm:
        update = optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
    if config.param_dtype == "bfloat16":
        # Not the seed of the moments' rounding.
        update = _memory().round_stochastically(update, seed=1)
    return update
