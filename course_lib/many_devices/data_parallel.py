"""Data parallelism: every device computes the gradient of its share of the batch. Written by
hand, and at the end as shardings for the compiler.

Plain data parallelism and the three stages of ZeRO (Rajbhandari et al., 2020,
https://arxiv.org/abs/1910.02054) differ only in the state that a device keeps, and therefore in
what it sends. P parameters, n devices:

    stage  parameters  gradients  optimizer  sent per step per device, in parameters
    0      all         all        all        all-reduce of gradients: 2 (n - 1) / n P
    1      all         all        1/n        reduce-scatter of gradients, all-gather of new
                                             parameters: the same
    2      all         1/n        1/n        the same; with accumulation, a reduce-scatter per
                                             minibatch
    3      1/n         1/n        1/n        all-gather twice (forward, backward) and
                                             reduce-scatter: 3 (n - 1) / n P

Stage 3 is also called FSDP. In stage 2 a layer's gradient is reduce-scattered inside of the
backward pass, as soon as it is computed: a device never holds more than one layer's gradients
and its own slices. Parameters are cut along the model's width (`sharding.ZERO`). The
few vectors without that dimension (biases of the hidden MLP, of queries, keys and values, and
of the output) stay whole.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key

from course_lib import arguments
from course_lib.many_devices import meshes
from course_lib.many_devices.axis import Asked, Axis, Share
from course_lib.many_devices.meshes import vary
from course_lib.many_devices.options import STAGES
from course_lib.many_devices.sharding import dim_of, place
from course_lib.models.hooks import Hooks
from course_lib.one_device import gradient_accumulation
from course_lib.one_device.gradient_accumulation import GradFn, LossFn

PyTree = Any
Layer = Callable[..., Any]  # (params, x, key) -> anything

AXIS = "data"


def gradient(
    loss_fn: LossFn,
    mesh: Mesh,
    param_specs: PyTree,
    grad_specs: PyTree,
    *,
    stage: int = 0,
    cut: Callable[[GradFn], GradFn] = gradient_accumulation.in_minibatches,
) -> GradFn:
    """Returns a gradient function on arrays that are spread over the mesh's "data" axis.

    Each device draws dropout from its own key: `rng` with the device's index folded in.

    Args:
      loss_fn: one device's loss, of its parts of the parameters and its share of the batch. In
        stage 2 a parameter whose gradient is cut arrives as a `Scattered` (`hooks`). If all
        label weights are 0, the loss and its gradient must be 0, as in `losses`: a device may
        have no labels, and one NaN from 0 / 0 would reach all devices.
      mesh: with an axis "data".
      param_specs: specs of the parameters.
      grad_specs: specs of the returned gradients: cut over "data" from stage 1 on.
      stage: of ZeRO.
      cut: makes the gradient function of a device's share from that of a minibatch. By default
        the share is one minibatch. Stages 0 and 1 communicate once for all minibatches.
    """
    arguments.one_of("stage", stage, STAGES)
    of_share = cut(
        gradient_accumulation.gradient(loss_fn)
        if stage < 2
        else _summed_gradient(loss_fn, param_specs, grad_specs)
    )

    def on_one_device(
        params: PyTree, batch: PyTree, rng: Key[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        grads, metrics = of_share(vary(params, AXIS), batch, _own_key(rng))
        if stage >= 2:  # summed over devices already, in each minibatch
            return grads, metrics
        total = jax.lax.psum(metrics, AXIS)
        share = label_share(metrics, total)
        # A share rounded to bfloat16 would lengthen the whole gradient, or shorten it.
        grads = jax.tree.map(lambda grad: (grad * share).astype(grad.dtype), grads)
        return sum_over_devices(grads, param_specs, grad_specs), total

    return meshes.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(param_specs, P(AXIS), P()),
        out_specs=(grad_specs, P()),
    )


def loss(loss_fn: LossFn, mesh: Mesh, param_specs: PyTree) -> LossFn:
    """Returns the loss of all devices: the weighted mean of `loss_fn`, one device's loss."""

    def on_one_device(params: PyTree, batch: PyTree, rng: Any) -> tuple[Array, PyTree]:
        rng = None if rng is None else _own_key(rng)
        return mean_over_devices(*loss_fn(params, batch, rng), AXIS)

    return meshes.shard_map(
        on_one_device, mesh=mesh, in_specs=(param_specs, P(AXIS), P()), out_specs=(P(), P())
    )


def divided(loss_fn: LossFn, axis: str, own: Callable[[Array], Array]) -> LossFn:
    """Returns the loss of all tokens. Each device along `axis` computes its own part of them,
    which `own` takes from an array, and draws dropout from its own key.
    """
    # The parameters are marked as each device's own before they are used, so that JAX sums
    # their gradients over devices once, at the end of the backward pass.

    def of_all(params: PyTree, batch: PyTree, rng: Any) -> tuple[Array, PyTree]:
        rng = None if rng is None else jax.random.fold_in(rng, jax.lax.axis_index(axis))
        return mean_over_devices(
            *loss_fn(vary(params, axis), jax.tree.map(own, batch), rng), axis
        )

    return of_all


def mean_over_devices(loss: Array, metrics: PyTree, axis: str) -> tuple[Array, PyTree]:
    """Returns the weighted mean of the losses along an axis, and the summed metrics."""
    total = _sum_of_metrics(metrics, axis)
    share = label_share(metrics, total)
    return jax.lax.psum(loss * share, axis), total


def _sum_of_metrics(metrics: PyTree, axis: str) -> PyTree:
    """Returns metrics summed over devices, not differentiated. They are sent as one array:
    simulated devices, with few threads, would wait forever for a count that some send early,
    others late.
    """
    numbers, tree = jax.tree.flatten(jax.lax.stop_gradient(metrics))
    return jax.tree.unflatten(tree, list(jax.lax.psum(jnp.stack(numbers), axis)))


def _summed_gradient(loss_fn: LossFn, param_specs: PyTree, grad_specs: PyTree) -> GradFn:
    """Returns a gradient function that sums over devices, and returns this device's part. In
    stage 2 the slices of `grad_specs` are cut from whole parameters; in stage 3 they are the
    parameters.
    """

    def share_of_mean(
        slices: PyTree, params: PyTree, batch: PyTree, rng: Any
    ) -> tuple[Array, PyTree]:
        loss, metrics = loss_fn(jax.tree.map(beside, slices, params), batch, rng)
        total = _sum_of_metrics(metrics, AXIS)
        return loss * label_share(metrics, total), total

    def beside(own: Array, param: Array) -> Any:
        return own if own.shape == param.shape else Scattered(own, param)

    def grad_fn(params: PyTree, batch: PyTree, rng: Any) -> tuple[PyTree, PyTree]:
        slices = jax.tree.map(_own_slice, params, param_specs, grad_specs)
        grads, metrics = jax.grad(share_of_mean, has_aux=True)(slices, params, batch, rng)
        return sum_over_devices(grads, grad_specs, grad_specs), metrics

    return grad_fn


def _own_slice(param: Array, param_spec: P, grad_spec: P) -> Array:
    """Returns the slice of a parameter whose gradient this device keeps."""
    dim = dim_of(grad_spec, AXIS)
    if dim is None or dim_of(param_spec, AXIS) is not None:
        return param
    size = param.shape[dim] // jax.lax.axis_size(AXIS)
    start = jax.lax.axis_index(AXIS) * size
    return jax.lax.dynamic_slice_in_dim(param, start, size, dim)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scattered:
    """A whole parameter. The device keeps one slice of its gradient (ZeRO stage 2)."""

    own: Array  # its values are not read: gradients are taken with respect to it
    whole: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scatter_gradient(own: Array, whole: Array, dim: int) -> Array:
    """Returns the whole parameter. Its gradient is reduce-scattered into the gradient of `own`.

    This is an all-gather without a transfer: the device has the whole parameter already. Its
    transpose is that of an all-gather, a reduce-scatter. `own` is the device's slice along
    `dim`, which "data" cuts.
    """
    return whole


scatter_gradient.defvjp(
    lambda own, whole, dim: (whole, None),
    lambda dim, _, grad: (  # the whole parameter is not differentiated
        jax.lax.psum_scatter(grad, AXIS, scatter_dimension=dim, tiled=True),
        None,
    ),
)


def scatter(params: PyTree, specs: PyTree) -> PyTree:
    """Makes each `Scattered` parameter whole; others stay as they are. `specs` are those of the
    gradients.
    """

    def of_leaf(leaf: Any, spec: P) -> Array:
        if not isinstance(leaf, Scattered):
            return leaf
        return scatter_gradient(leaf.own, leaf.whole, dim_of(spec, AXIS))

    return jax.tree.map(of_leaf, params, specs, is_leaf=lambda x: isinstance(x, Scattered))


def _own_key(rng: Key[Array, ""]) -> Key[Array, ""]:
    """Returns a key that differs along "data", so that each device drops different units."""
    return jax.random.fold_in(rng, jax.lax.axis_index(AXIS))


def label_share(metrics: PyTree, total: PyTree) -> Array:
    """Returns a device's share of all labels: the weight of its loss in the mean over all."""
    return metrics["loss"][1] / gradient_accumulation.nonzero(total["loss"][1])


def sum_over_devices(grads: PyTree, param_specs: PyTree, grad_specs: PyTree) -> PyTree:
    """Sums gradients over the devices. Returns all of the sum, or this device's slice of it, as
    the specs say.

    Gradients of sliced parameters are summed and sliced already: the loss gathers these
    parameters, and the transpose of a gather is a reduce-scatter.
    """

    def of_leaf(grad: Array, param_spec: P, grad_spec: P) -> Array:
        if dim_of(param_spec, AXIS) is not None:
            return grad
        dim = dim_of(grad_spec, AXIS)
        if dim is None:
            return jax.lax.psum(grad, AXIS)
        return jax.lax.psum_scatter(grad, AXIS, scatter_dimension=dim, tiled=True)

    return jax.tree.map(of_leaf, grads, param_specs, grad_specs)


def is_kernel(name: str) -> bool:
    return name.endswith("kernel")


def gather(
    params: PyTree, specs: PyTree, dtype: Any, where: Callable[[str], bool] = is_kernel
) -> PyTree:
    """Gathers parameters from the slices of the devices along "data". Kernels, which are chosen
    by name as for `optimizers.get`, and their gradients are sent in `dtype`, in which layers
    compute; the rest stays as it is.
    """

    def of_leaf(path: Any, leaf: Array, spec: P) -> Array:
        dim = dim_of(spec, AXIS)
        if dim is None:
            return leaf
        leaf = leaf.astype(dtype) if where(arguments.name_in_tree(path)) else leaf
        return checkpoint_name(jax.lax.all_gather(leaf, AXIS, axis=dim, tiled=True), "gathered")

    return jax.tree_util.tree_map_with_path(of_leaf, params, specs)


def gather_outside(specs: PyTree, dtype: Any) -> Callable[[PyTree], PyTree]:
    """Returns the hook that gathers what belongs to no layer: embeddings, last norm, head."""
    return outside(specs, lambda params, specs: gather(params, specs, dtype))


def outside(specs: PyTree, change: Callable[..., PyTree]) -> Callable[[PyTree], PyTree]:
    cut = {name: spec for name, spec in specs.items() if not name.startswith("block")}
    return lambda params: params | change({name: params[name] for name in cut}, cut)


def of_layer(specs: PyTree, scanned: bool) -> PyTree:
    """Picks the specs of one layer: those of scanned layers begin with that dimension."""
    if not scanned:
        return specs["block_0"]
    return jax.tree.map(
        lambda spec: P(*spec[1:]), specs["block"], is_leaf=lambda x: isinstance(x, P)
    )


def scatter_layers(specs: PyTree) -> Callable[[Layer], Layer]:
    """Returns a wrapper of a layer, for `hooks.Hooks.layer` or another model. It
    reduce-scatters the layer's gradients, of these specs, as soon as they are computed.
    """
    return lambda layer: lambda params, *args: layer(scatter(params, specs), *args)


def gather_layers(
    specs: PyTree,
    dtype: Any,
    again: bool,
    scanned: bool,
    where: Callable[[str], bool] = is_kernel,
) -> Callable[[Layer], Layer]:
    """Returns a wrapper of a layer, as `scatter_layers`: it gathers its parameters first.

    `specs` are those of one layer's parameters. With `again`, the gathered parameters are
    dropped after the forward pass, and the kernels gathered again in the backward pass. If not,
    those of all layers stay until then.
    """

    def wrap(layer: Layer) -> Layer:
        def gathering(params: PyTree, *args: Any) -> Any:
            return layer(gather(params, specs, dtype, where), *args)

        if not again:
            return gathering
        return jax.checkpoint(gathering, prevent_cse=not scanned, policy=save_all_but_gathered)

    return wrap


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def constrain_gradient(param: Array, place: NamedSharding) -> Array:
    """Returns the parameter; its gradient is summed and cut where it is computed."""
    return param


constrain_gradient.defvjp(
    lambda param, place: (param, None),
    lambda place, _, grad: (jax.lax.with_sharding_constraint(grad, place),),
)


def constrain_layers(specs: PyTree, mesh: Mesh) -> Callable[[Layer], Layer]:
    """Returns the compiler's form of `scatter_layers`: a wrapped layer constrains its gradients
    to the slices of the devices.
    """
    places = place(specs, mesh)
    return lambda layer: (
        lambda params, *args: layer(jax.tree.map(constrain_gradient, params, places), *args)
    )


def save_all_but_gathered(primitive: Any, *args: Any, **params: Any) -> bool:
    """A checkpoint policy: saves everything except gathered arrays, and except the reshaped or
    joined arrays that `products.columns` and `products.rows` make of gathered kernels.
    """
    made_of_it = primitive.name in ("reshape", "concatenate") and args[0].ndim > 1
    return (
        primitive.name != "all_gather" and not made_of_it and params.get("name") != "gathered"
    )


def hooks(share: Share) -> Hooks:
    """Returns the hooks of ZeRO stages 2 and 3 by hand."""
    model, strategy = share.model, share.strategy
    if strategy.zero == 2:
        layer = scatter_layers(of_layer(share.grads, model.scan_layers))
        return Hooks(layer=layer, params=outside(share.grads, scatter))
    if strategy.zero == 3:
        # A rematerialized block gathers again anyway.
        by_block = "Block" in model.remat and model.remat_policy == "nothing"
        again = strategy.gather_again and not by_block
        specs = of_layer(share.params, model.scan_layers)
        scanned = model.scan_layers and model.num_layers > 1  # XLA unrolls a loop of one
        layer = gather_layers(specs, model.dtype, again=again, scanned=scanned)
        return Hooks(layer=layer, params=gather_outside(share.params, model.dtype))
    return Hooks()


def errors(asked: Asked) -> Iterator[str]:
    """Yields what a model and a mesh must not ask of the axis."""
    strategy, remat = asked.strategy, asked.model.remat
    gathers = strategy.zero == 3 and strategy.by != "compiler"
    if not strategy.gather_again and not gathers:
        yield (
            "gather_again=False must come with zero=3, not by='compiler': at other stages"
            " layers gather nothing, and the compiler decides by itself when to gather"
        )
    if strategy.gather_again and gathers and {"MLP", "Attn"} & set(remat):
        yield (
            f"remat={tuple(remat)!r} must be () or ('Block',) with gather_again=True, which"
            " saves all of a layer except gathered parameters; or take gather_again=False"
        )
    n, batch, micro = asked.n[AXIS], asked.config.data.batch_size, strategy.microbatches
    minibatches = asked.config.training.num_minibatches
    if batch % (parts := n * minibatches * micro):
        yield (
            f"batch_size={batch} must be a multiple of {parts}: {n} devices along 'data' x"
            f" {minibatches} minibatches x {micro} microbatches of one size; take"
            f" {arguments.nearest(batch, parts)}"
        )


DATA = Axis(AXIS, errors, activations={"batch": AXIS, "sequences": AXIS}, hooks=hooks)
