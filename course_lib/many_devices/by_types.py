"""Strategies by types: each array's type says how it is divided (JAX's explicit mode).

The loss and its gradient are traced on `Explicit` axes: JAX gives each result a sharding, from
those of its operands (https://docs.jax.dev/en/latest/201/sharding.html). Where several are
possible, this module names one:

    float32[8@data,16,64]         the batch is cut over "data"
    float32[64,256]{R:data}       reduced: whole; its gradient is left as partial sums
    float32[64,256]{U:data}       unreduced: partial sums, one per device, to be added up

A reshard is a collective: from cut to reduced an all-gather, from unreduced to whole an
all-reduce, from unreduced to cut a reduce-scatter. Its gradient is the reshard back: the types
of the forward pass say what the backward pass sends
(https://docs.jax.dev/en/latest/301/sharding-ad.html). A sharding that does not fit is an error
while tracing. XLA for CPUs compiles a reduce-scatter as an all-reduce. Stages 1 and 2 of ZeRO
are one program: gradients are cut once per minibatch, when all are there.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from course_lib import arguments, training
from course_lib.many_devices import data_parallel, expert_parallel, sharding, tensor_parallel
from course_lib.many_devices.axis import Asked, Share
from course_lib.models import attention
from course_lib.models.hooks import Hooks
from course_lib.one_device import gradient_accumulation
from course_lib.one_device.gradient_accumulation import GradFn, LossFn

PyTree = Any
DATA, EXPERT, TENSOR = data_parallel.AXIS, expert_parallel.AXIS, tensor_parallel.AXIS


def ways(share: Share) -> tuple[LossFn, Callable[[LossFn], GradFn], LossFn]:
    """Returns the loss to differentiate, a function that makes its gradient function, and the
    loss of arrays outside, where axes are Auto.
    """
    score = TENSOR in share.mesh.shape and jax.shard_map(  # four numbers a token, by hand
        tensor_parallel.cross_entropy,
        in_specs=(P(DATA, None, TENSOR), P(DATA)),
        out_specs=P(DATA),
    )
    own, rows = training.functions(share.config, hooks(share), score or None), batch_axes(share)

    def gradient_fn(loss_fn: LossFn) -> GradFn:
        grad_fn = gradient_accumulation.gradient(loss_fn)

        def typed(params: PyTree, batch: PyTree, rng: Any) -> tuple[PyTree, PyTree]:
            if share.strategy.zero < 3:  # partial sums of all layers meet here, once
                params = at_use(params, share.params, rows)
            grads, metrics = grad_fn(params, batch, rng)
            return jax.reshard(grads, share.grads), metrics

        return own.in_minibatches(on_types(typed, share))

    return own.loss_fn, gradient_fn, on_types(own.loss_fn, share)


def on_types(function: Callable[..., Any], share: Share) -> Callable[..., Any]:
    """Returns a function of (params, batch, rng) for Auto axes, whose inside has types."""
    specs = share.params, P(batch_axes(share)), P()

    def outside(*args: Any) -> Any:  # the constraint names the devices, which types do not
        args = jax.lax.with_sharding_constraint(args, sharding.place(specs, share.mesh))
        with jax.sharding.use_abstract_mesh(share.mesh.abstract_mesh):
            return jax.sharding.explicit_axes(function, in_sharding=specs)(*args)

    return outside


def batch_axes(share: Share) -> tuple[str, ...]:
    """Returns the axes that cut the batch."""
    return tuple(axis for axis in (DATA, EXPERT) if axis in share.mesh.shape)


def at_use(params: PyTree, specs: PyTree, rows: tuple[str, ...], dtype: Any = None) -> PyTree:
    """Returns parameters as a layer uses them: whole along "data". Matrices are reduced along
    the axes of the batch that do not cut them; the kernels among them are sent in `dtype`.
    """

    def of_leaf(path: Any, leaf: Array, spec: P) -> Array:
        name = arguments.name_in_tree(path)
        kernel = data_parallel.is_kernel(name)
        leaf = leaf.astype(dtype) if kernel and dtype else leaf
        # A vector is added to arrays that are cut over "data", which a reduced one cannot be.
        matrix = kernel or name.endswith("embed/embedding")
        cuts = [None if cut == DATA else cut for cut in spec]
        place = P(*cuts, reduced={*rows} - {*cuts} if matrix else set())
        return checkpoint_name(jax.reshard(leaf, place), "gathered")

    return jax.tree_util.tree_map_with_path(of_leaf, params, specs)


def hooks(share: Share) -> Hooks:
    """Returns the hooks of a model whose arrays carry their shardings."""
    model, strategy, cut = share.model, share.strategy, TENSOR in share.mesh.shape
    rows = batch_axes(share)
    own = tensor(strategy.sequence) if cut else Hooks(lookup=functools.partial(look_up, rows))
    if EXPERT in rows:
        own |= Hooks(experts=at_experts)
    if strategy.zero < 3:
        return own
    specs = data_parallel.of_layer(share.params, model.scan_layers)

    def gathers(layer: Any) -> Any:
        def gathering(params: PyTree, *args: Any) -> Any:
            return layer(at_use(params, specs, rows, model.dtype), *args)

        by_block = "Block" in model.remat and model.remat_policy == "nothing"
        scanned = model.scan_layers and model.num_layers > 1
        again = jax.checkpoint(gathering, prevent_cse=not scanned, policy=_saved)
        return again if strategy.gather_again and not by_block else gathering

    change = functools.partial(at_use, rows=rows, dtype=model.dtype)
    return own | Hooks(layer=gathers, params=data_parallel.outside(share.params, change))


def _saved(primitive: Any, *args: Any, **params: Any) -> bool:
    others = data_parallel.save_all_but_gathered(primitive, *args, **params)
    return others and primitive.name != "reshard"


def look_up(rows: Any, table: Array, tokens: Array) -> Array:
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, out_sharding=P(rows))


def at_experts(run: expert_parallel.Experts, tokens: Array) -> Array:
    """Sends tokens [E B C D] to the devices of their experts and back: two all-to-alls."""

    def send(x: Array, place: P) -> Array:
        return checkpoint_name(jax.reshard(x, place), "sent")  # which `_saved` keeps

    return send(run(send(tokens, P(EXPERT, DATA))), P(None, (DATA, EXPERT)))


def tensor(sequence: bool) -> Hooks:
    """Returns the hooks of products, token table and attention that are cut over "tensor"."""
    stream, heads = P(DATA, TENSOR if sequence else None, None), P(DATA, None, TENSOR, None)

    def column(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
        x = jax.reshard(x, P(DATA, None, None, reduced={TENSOR}))
        return jax.lax.dot_general(x, kernel, dimension_numbers, **options)

    def row(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
        sums = P(DATA, None, None, unreduced={TENSOR})
        y = jax.lax.dot_general(x, kernel, dimension_numbers, out_sharding=sums, **options)
        return jax.reshard(y, stream)

    def attend(*args: Array, **options: Any) -> Array:  # each device its own heads
        own = functools.partial(attention.attend, **options)
        return jax.shard_map(own, in_specs=heads, out_specs=heads)(*args)

    def lookup(*args: Array) -> Array:
        # JAX 0.12 computes wrong numbers for `.at[].get` with an unreduced result.
        return jax.reshard(look_up(DATA, *args), stream)

    return Hooks(column=column, row=row, lookup=lookup, attend=attend)


def errors(asked: Asked) -> Iterator[str]:
    """Yields what a model and a mesh must not ask of types."""
    model, also = asked.model, "by='types' must be 'hand' or 'compiler'"
    if not hasattr(jax, "reshard"):
        yield f"{also} with JAX {jax.__version__}, whose types have no partial sums"
    if others := [axis for axis in asked.n if axis not in (DATA, EXPERT, TENSOR)]:
        yield (
            f"{also} with a mesh axis {others[0]!r}: types divide 'data', 'expert' and 'tensor'"
        )
    needs = dict(dropout_rate=0, loss_chunks=1, flat_products=False)
    for name, needed in (needs | dict(z_loss=0) if TENSOR in asked.n else needs).items():
        if (value := getattr(model, name)) != needed:
            yield f"{name}={value} must be {needed} with by='types', which have no rule for it"
