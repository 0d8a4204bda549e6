"""Offload: keeps arrays in the host's memory, and fetches them when a step needs them.

The host of a GPU has more memory than the GPU, behind a link that is 7 to 52 times slower than
device memory. Offload pays where it saves much memory and sends few bytes over this link:

- activations, by a checkpoint policy: `model.remat_policy="offload"`
  (`course_lib.one_device.rematerialization`);
- the optimizer's moments, which a step reads and writes once: `streamed`.

*Streaming* fetches one layer, uses it, sends it back, and overwrites the old one.

Sources: https://docs.jax.dev/en/latest/notebooks/host-offloading.html; ZeRO-Offload (Ren et
al., 2021, https://arxiv.org/abs/2101.06840), which also runs Adam on the host.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import compute_on

from course_lib import arguments
from course_lib.measure import hardware

PyTree = Any

LAYERS, REST, ALONE = "layers", "rest", "alone"  # what `streamed` does with a leaf

_compute_on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)
_ON_HOST = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Host}


def to_host(tree: PyTree) -> PyTree:
    """Moves arrays to the host's memory, also inside of a compiled function."""
    check_available()
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: PyTree) -> PyTree:
    """Moves arrays to the device's memory, also inside of a compiled function."""
    return jax.device_put(tree, jax.memory.Space.Device)


@functools.cache
def why_unavailable() -> str | None:
    """Returns None if compiled functions can keep arrays in the host's memory, else the reason.

    Some versions leave an array on the device, and raise no error: a tiny program shows it.
    """
    device, moved = jax.devices()[0], jnp.float32(0)
    try:
        program = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Host))
        kind = program.lower(moved).compile().output_shardings.memory_kind
    except Exception as error:  # any error of the compiler is a reason
        return f"JAX {jax.__version__} fails on this {device.platform}: {str(error)[:200]}"
    if kind == "pinned_host":
        return None
    return (
        f"JAX {jax.__version__} on this {device.platform} leaves arrays in its memory"
        f" {kind!r}; JAX 0.10 and newer moves them"
    )


def check_available() -> None:
    """Refuses to offload where it would do nothing."""
    if reason := why_unavailable():
        raise RuntimeError(f"nothing can be offloaded here: {reason}")


@functools.cache
def why_no_host_compute() -> str | None:
    """Returns None if compiled functions can run on the host's processor, else the reason."""
    if reason := why_unavailable():
        return reason
    if "out_memory_spaces" not in inspect.signature(_compute_on).parameters:
        return f"JAX {jax.__version__} has no `compute_on2`; JAX 0.10 and newer have it"
    try:
        function = _compute_on(jnp.negative, **_ON_HOST)
        jax.jit(function)(jax.device_put(jnp.float32(0), jax.memory.Space.Host))
    except Exception as error:  # any error of the compiler is a reason
        platform = jax.devices()[0].platform
        return f"JAX {jax.__version__} fails on this {platform}: {str(error)[:200]}"
    return None


def on_host(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Makes the host's processor compute a function, on arrays in the host's memory."""
    if reason := why_no_host_compute():
        raise RuntimeError(f"the host's processor cannot compute for a program here: {reason}")
    return _compute_on(function, **_ON_HOST)


def streamed(
    optimizer: optax.GradientTransformation, stacked: Sequence[str] = ("block",)
) -> optax.GradientTransformation:
    """Keeps an optimizer's state per parameter, such as Adam's moments, in the host's memory,
    and updates one layer at a time.

    The update is a loop over stacked layers: it fetches the moments of one layer, computes its
    updates, and sends the new moments back to their old place. The updates overwrite the
    gradients. After the loop, all other parameters, such as embeddings, are updated together.

    WARNING: `optimizer` must treat each parameter by itself, as SGD, Adam, AdamW and Lion do.
    Here it sees one layer at a time. An optimizer that needs all gradients at once, such as a
    clip by their norm, computes other updates without an error, because nothing in it says
    what it reads. Put the clip before, not inside:

        optax.chain(optax.clip_by_global_norm(1.0), streamed(optax.adam(1e-3)))     # right
        streamed(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))     # wrong

    It also sees each layer without the axis of layers. So a mask or a rule that counts the
    dimensions of a parameter decides otherwise than without `streamed`: decide by its name.

    Args:
      optimizer: computes the updates. The state has the structure of this optimizer's state: a
        checkpoint of one can be restored into the other.
      stacked: the entries of the parameters whose leaves have a leading axis of layers, as
        `nn.scan` makes them.
    """
    arguments.optimizer(optimizer)

    def init(params: PyTree) -> PyTree:
        return optax.tree_map_params(optimizer, to_host, optimizer.init(params))

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        check_available()
        length = num_layers(grads, stacked)
        place = jax.tree_util.tree_map_with_path(
            lambda path, _: LAYERS if path[0].key in stacked else REST, grads
        )
        # The state has trees like the parameters, and numbers that stand alone: step counts.
        place_in_state = optax.tree_map_params(
            optimizer,
            lambda _, where: where,
            state,
            place,
            transform_non_params=lambda _: ALONE,
        )
        _check_on_host(state, place_in_state)

        def choose(where, tree, places, read):
            """Reads the leaves of one place, hides those of the other, keeps step counts."""

            def one(here, leaf):
                if here == ALONE:
                    return leaf
                return read(leaf) if here == where else optax.MaskedNode()

            return jax.tree.map(one, places, tree)

        def update_part(where, updates, state, read, write):
            new_updates, new_state = optimizer.update(
                choose(where, updates, place, read),
                choose(where, state, place_in_state, lambda leaf: to_device(read(leaf))),
                None if params is None else choose(where, params, place, read),
            )
            # The count of steps changes once, with the rest.
            changed = (where,) if where == LAYERS else (where, ALONE)

            def put(moved):
                def one(here, old, new):
                    if here not in changed:
                        return old
                    return new if here == ALONE else write(old, moved(new))

                return one

            return (
                jax.tree.map(put(lambda new: new), place, updates, new_updates),
                jax.tree.map(put(to_host), place_in_state, state, new_state),
            )

        def update_layer(carry: tuple[PyTree, PyTree], i: Any) -> tuple[Any, None]:
            read = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
            write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
            return update_part(LAYERS, *carry, read, write), None

        with jax.named_scope("streamed"):
            # Layers first: they read the old count of steps.
            carry, _ = jax.lax.scan(update_layer, (grads, state), jnp.arange(length))
            return update_part(REST, *carry, lambda leaf: leaf, lambda old, new: new)

    return optax.GradientTransformation(init, update)


def num_layers(params: PyTree, stacked: Sequence[str]) -> int:
    """Returns the length of the leading axis that all leaves of some entries share."""
    names = list(params) if isinstance(params, Mapping) else None
    if not names or not set(stacked) <= set(names):
        raise ValueError(
            f"stacked={tuple(stacked)!r} must name entries of the parameters whose leaves have"
            f" a leading axis of layers (scan_layers=True makes one), out of {names}"
        )
    lengths = {
        jnp.shape(leaf)[:1] for name in stacked for leaf in jax.tree.leaves(params[name])
    }
    if len(lengths) != 1 or lengths == {()}:
        raise ValueError(
            f"stacked={tuple(stacked)!r} must name entries whose leaves all have the same"
            f" number of layers, not {sorted(lengths)}"
        )
    return lengths.pop()[0]


def _check_on_host(state: PyTree, places: PyTree) -> None:
    for where, leaf in zip(jax.tree.leaves(places), jax.tree.leaves(state), strict=True):
        if where != ALONE and jax.typeof(leaf).memory_space != jax.memory.Space.Host:
            raise ValueError(
                f"the optimizer's state has {jax.typeof(leaf).str_short()} in the device's"
                " memory and must have it in the host's: use what `init` returns, or `to_host`"
            )


def bytes_each_way(optimizer: optax.GradientTransformation, params: PyTree) -> int:
    """Returns the bytes that a streamed update fetches from the host; it sends back as many."""
    sizes: list[int] = []
    optax.tree_map_params(
        optimizer,
        lambda leaf: sizes.append(leaf.size * leaf.dtype.itemsize),
        jax.eval_shape(optimizer.init, params),
    )
    return sum(sizes)


def break_even_tokens(
    flops_per_second: float,
    link: hardware.HostLink,
    *,
    bytes_each_way: float | int = 8,
    flops_per_token: float | int = 6,
    host_memory: float | None = None,
    host_bytes: float | int = 16,
) -> float:
    """Returns the tokens per step from which on transfers hide behind matmuls. The link sends
    both ways at once, and each GPU has `host_memory` bytes/s of its host's (None: no limit).

    All bytes and FLOPs are per parameter. The moments of Adam, streamed, send 8 bytes each way,
    and the host's memory moves 16. Adam on the host sends 2, and its memory moves 32. A token
    has 6 FLOPs, 4 of them in the backward pass.
    """
    seconds = bytes_each_way / link.bandwidth
    if host_memory is not None:
        seconds = max(seconds, host_bytes / host_memory)
    return seconds * flops_per_second / flops_per_token
