"""Training: the state, the losses, and the one train step, where the techniques of this course
meet.

    loss_fn(params, batch, rng) -> (loss, metrics)     loss: the weighted mean;
                                                       metrics: name -> (sum, count)
    grad_fn(params, batch, rng) -> (grads, metrics)    the gradient of that mean
    step(state, batch) -> (state, metrics)             rng, scale, gradients, unscale, clip,
                                                       update

A model enters as a plain function, `apply_fn(params, inputs, rng) -> logits`, where `rng=None`
means evaluation, without dropout; `as_function` makes one from a Flax model. What is trained is
what is evaluated: the same loss function, with `rng=None`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import measure, optimizers
from course_lib.configs import check
from course_lib.measure import virtual
from course_lib.models import losses
from course_lib.models.losses import ApplyFn
from course_lib.models.losses import as_function as as_function  # these belong to training
from course_lib.models.losses import classification_loss as classification_loss
from course_lib.models.losses import cross_entropy as cross_entropy
from course_lib.models.losses import next_token_loss as next_token_loss
from course_lib.models.transformer import Transformer
from course_lib.one_device import gradient_accumulation, mixed_precision
from course_lib.one_device.gradient_accumulation import LossFn, Metrics, PyTree
from course_lib.text.data import Batch


@struct.dataclass
class TrainState:
    """Everything that a step reads and writes: a pytree of arrays, so that it can be donated,
    placed and stored.

    Attributes:
      step: int32, how many batches have been seen, skipped updates included.
      params: pytree of parameters.
      opt_state: the optimizer's.
      rng: typed random key, split anew at every step.
      loss_scale: of `course_lib.one_device.mixed_precision`.
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    rng: Any
    loss_scale: Any


def init_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    rng: Key[Array, ""],
    loss_scale: mixed_precision.LossScale | None = None,
) -> TrainState:
    """Returns the state before the first step.

    It holds `params` and `rng` themselves, not copies: a step that donates its state consumes
    them.

    Args:
      params: pytree of parameters.
      optimizer: the optimizer that `make_train_step` gets.
      rng: typed random key, for dropout.
      loss_scale: how the loss is scaled; not at all if None.
    """
    scale = mixed_precision.NoLossScale() if loss_scale is None else loss_scale
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        rng=rng,
        loss_scale=jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), scale),
    )


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    num_minibatches: int = 1,
    method: str = "scan",
    accumulator_dtype: Any = jnp.float32,
    policy: mixed_precision.Policy | None = None,
    donate: bool = True,
    gradient_fn: Callable[[LossFn], gradient_accumulation.GradFn] | None = None,
    skip_not_finite: bool = False,
    out_shardings: Any = None,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """Builds the train step, `step(state, batch) -> (state, metrics)`, compiled at its first
    call.

    Where the state holds a loss scale, a step whose gradients are not all finite changes
    neither parameters nor optimizer state, and `metrics["skipped"]` counts it. Without one, and
    without `skip_not_finite`, nothing of this is in the program.

    A compiled step cannot raise an error: of a token or a label outside the vocabulary the loss
    is NaN. The batches of `data` and `loading` have none; `data.check_tokens` refuses them in a
    batch from elsewhere, before it is given to the step.

    Args:
      loss_fn: `loss_fn(params, batch, rng) -> (loss, metrics)`.
      optimizer: any of optax; a norm to clip to is part of it, so that it sees gradients that
        are unscaled.
      num_minibatches: M, into how many the batch is cut.
      method: "scan" or "loop" over the minibatches.
      accumulator_dtype: dtype that their gradients are summed in.
      policy: dtypes to compute in; as the model has it if None.
      donate: whether the state given in is overwritten by the one that comes out.
      gradient_fn: makes the gradient function of a loss function, which gets the whole batch.
        The three options of minibatches are those of the default one, which cuts the batch on
        one device.
      skip_not_finite: skips an update also if the loss, the new parameters or the optimizer's
        new state are not finite. It adds nothing to the train state, so a run can switch it on
        when it resumes.
      out_shardings: where the new state and the metrics are placed, as `jax.jit` takes it.

    Raises:
      ValueError: for options that do not exist; before it compiles, if M does not divide B or
        float16 has no loss scale.
    """
    parts = dict(
        num_minibatches=num_minibatches, method=method, accumulator_dtype=accumulator_dtype
    )
    gradient_accumulation.check_options(**parts)
    if gradient_fn and (num_minibatches != 1 or method != "scan"):
        raise ValueError(
            f"num_minibatches={num_minibatches}, method={method!r} must not come with"
            " gradient_fn, which cuts the batch itself: they would do nothing"
        )
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn={loss_fn!r} must be a function, as next_token_loss(apply_fn) returns one"
        )
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(f"optimizer={optimizer!r} must be one of optax's, as optax.adam(1e-3)")
    if not isinstance(policy, mixed_precision.Policy | None):
        raise ValueError(
            f"policy={policy!r} must be a Policy, as mixed_precision.policy('bfloat16')"
        )
    gradient_fn = gradient_fn or (
        lambda loss_fn: gradient_accumulation.in_minibatches(
            gradient_accumulation.gradient(loss_fn), **parts
        )
    )
    loss_fn = loss_fn if policy is None else policy.wrap(loss_fn)

    def train_step(state, batch):
        mixed_precision.check_loss_scale(policy, state.loss_scale)
        rng, step_rng = jax.random.split(state.rng)

        def scaled_loss_fn(params, batch, rng):
            loss, metrics = loss_fn(params, batch, rng)
            return state.loss_scale.scale(loss), metrics

        grads, metrics = gradient_fn(scaled_loss_fn)(state.params, batch, step_rng)
        with jax.named_scope("optimizer"):
            grads = state.loss_scale.unscale(grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            new = dataclasses.replace(
                state, step=state.step + 1, params=params, opt_state=opt_state, rng=rng
            )
        finite = []
        if not isinstance(state.loss_scale, mixed_precision.NoLossScale):
            finite.append(mixed_precision.all_finite(grads))
            new = dataclasses.replace(new, loss_scale=state.loss_scale.update(finite[0]))
        if skip_not_finite:
            finite.append(
                mixed_precision.all_finite((new.params, new.opt_state, metrics["loss"]))
            )
        if finite:
            new, metrics = skip_nonfinite_update(
                functools.reduce(jnp.logical_and, finite), state, new, metrics
            )
        return new, metrics

    return jax.jit(train_step, donate_argnums=0 if donate else (), out_shardings=out_shardings)


def skip_nonfinite_update(finite, old, new, metrics):
    """Keeps old parameters and optimizer state unless `finite`, and counts skipped steps."""
    # A sum that once took in a NaN stays NaN.
    metrics = jax.tree.map(lambda metric: jnp.where(finite, metric, 0), metrics)
    skipped = 1 - finite.astype(jnp.float32)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (new.params, new.opt_state),
        (old.params, old.opt_state),
    )
    new = dataclasses.replace(new, params=params, opt_state=opt_state)
    return new, metrics | {"skipped": (skipped, jnp.ones_like(skipped))}


def add_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Adds sums to sums and counts to counts."""
    return jax.tree.map(jnp.add, first, second)


def mean_metrics(metrics: Metrics) -> dict[str, float]:
    """Divides each sum by its count, once, at the end; NaN where nothing was counted."""
    metrics = jax.device_get(metrics)
    return {
        name: float(total / count) if count else float("nan")
        for name, (total, count) in metrics.items()
    }


def evaluate(loss_fn: LossFn, params: PyTree, batches: Iterable[Any]) -> dict[str, float]:
    """Returns the mean metrics over all labels of all batches, without dropout; a batch is made
    when it is its turn.

    Args:
      loss_fn: the loss function that is trained, called with `rng=None`. The same object
        compiles once.
      params: pytree of parameters.
      batches: at least one batch.

    Raises:
      ValueError: if there is no batch, or one that is in no list.
    """
    if isinstance(batches, Batch | jax.Array | np.ndarray):
        raise ValueError(
            f"batches={type(batches).__name__} must be several batches, or a list of one:"
            " [batch]"
        )
    each = (_metrics(loss_fn, params, batch) for batch in batches)
    if (late := next(each, None)) is None:
        raise ValueError(
            "batches must hold at least one batch: a mean over nothing is undefined"
        )
    total: dict[str, list[float]] = {}
    # The following batch is computed while those before it are read.
    for following in itertools.chain(each, [None]):
        # A sum in float32 would lose what a batch adds to many.
        for name, pair in jax.device_get(late).items():
            total[name] = [
                old + float(new)
                for old, new in zip(total.get(name, [0.0, 0.0]), pair, strict=True)
            ]
        late = following
    return {
        name: of_all / count if count else float("nan")
        for name, (of_all, count) in total.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def _metrics(loss_fn, params, batch):
    return loss_fn(params, batch, None)[1]


ONE_DEVICE = AbstractMesh((1,), ("data",))
"""The mesh of a run on one device that is not named: the one on which its arguments lie."""


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a training run needs, built from one configuration.

    Attributes:
      config: a frozen copy of that configuration.
      apply_fn: the Transformer as a function of its parameters.
      loss_fn: its next-token loss.
      train_step: `train_step(state, batch) -> (state, metrics)`.
      init: `init(rng) -> state`, parameters, optimizer and loss scale before the first step.
      mesh: of the devices that it runs on.
      specs: who holds what, a `TrainState` of PartitionSpecs; None where no device is named.
    """

    config: ConfigDict
    apply_fn: ApplyFn
    loss_fn: LossFn
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    init: Callable[[Key[Array, ""]], TrainState]
    mesh: Mesh | AbstractMesh = ONE_DEVICE
    specs: Any = None

    def abstract(self) -> tuple[TrainState, Batch]:
        """Returns the shapes of the state and of a batch, to lower the step with; nothing is
        computed or allocated.

        They are placed on the mesh, if it names devices.
        """
        state = jax.eval_shape(self.init, jax.random.key(0))
        batch = _abstract_batch(self.config)
        if self.mesh is ONE_DEVICE:
            return state, batch
        place = functools.partial(NamedSharding, self.mesh)
        placed = jax.tree.map(
            lambda spec, part: virtual.abstract(part, place(spec)),
            self.specs,
            state,
            is_leaf=lambda leaf: isinstance(leaf, P),
        )
        return placed, virtual.abstract(batch, place(P("data")))


def _abstract_batch(config: ConfigDict) -> Batch:
    shape = (config.data.batch_size, config.data.seq_len)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    return Batch(inputs=tokens, labels=tokens, weights=jax.ShapeDtypeStruct(shape, jnp.float32))


def functions(config: ConfigDict) -> tuple[ApplyFn, LossFn, Callable[..., TrainState]]:
    """Returns the Transformer of a configuration as `apply_fn`, its loss, and `init(rng) ->
    state`.

    Args:
      config: a whole configuration, frozen and checked.
    """
    model = Transformer(config.model)
    loss_fn = losses.of_model(
        config.model, as_function(model, balance=config.model.num_experts > 0)
    )
    optimizer = optimizers.from_config(config.optimizer)
    scale = mixed_precision.loss_scale(config.training.loss_scale)

    def init(rng):
        param_rng, state_rng = jax.random.split(rng)
        tokens = jnp.zeros((1, config.data.seq_len), jnp.int32)
        params = model.init(param_rng, tokens, train=False)["params"]
        return init_state(params, optimizer, state_rng, scale)

    return as_function(model), loss_fn, init


def minibatches(config: ConfigDict) -> dict[str, Any]:
    """Returns into what a configuration cuts a batch, as `gradient_accumulation.in_minibatches`
    takes it.
    """
    options = config.training
    parts = dict(num_minibatches=options.num_minibatches, method=options.accumulation)
    return parts | dict(accumulator_dtype=options.accumulator_dtype)


def build(config: ConfigDict) -> Run:
    """Builds a training run of the Transformer on one device. Nothing is computed yet.

    The device is the one on which its arguments lie. `strategies.build` names one or more; on a
    mesh of one device its run compiles to the same program.

    Args:
      config: a whole configuration (`course_lib.configs`).

    Raises:
      ValueError: if it cannot work: the field, its value and the fix.
    """
    check(config)
    return of_checked(config)


def of_checked(config: ConfigDict) -> Run:
    """Builds a training run as `build` does, from a configuration that is checked already."""
    config = FrozenConfigDict(config)  # what is changed later does not reach into this run
    apply_fn, loss_fn, init = functions(config)
    optimizer, donate = optimizers.from_config(config.optimizer), config.training.donate
    train_step = make_train_step(loss_fn, optimizer, donate=donate, **minibatches(config))
    return Run(config, apply_fn, loss_fn, train_step, jax.jit(init))


def step_flops(config: ConfigDict) -> measure.Flops:
    """Counts the FLOPs of the matrix products in one step, attention written out.

    Also where attention is a kernel, whose insides cannot be counted, and which leaves out what
    causality makes superfluous: so that like is compared with like.

    Args:
      config: a whole configuration, checked.
    """
    written_out = ConfigDict(config)
    written_out.model.attention = "reference"
    run = of_checked(written_out)
    return measure.flops(run.train_step, *run.abstract())
