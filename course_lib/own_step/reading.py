"""Reads a step of one's own: a function of arrays alone, and where these are on a machine."""

import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import math
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from course_lib.measure import origin, virtual

PyTree = Any
origin.CALLERS.add(__file__)
REF: Any = getattr(jax, "Ref", ())  # an array that a step changes in place


NO_MESH = (
    "no argument, in_shardings or out_shardings name a mesh of {count} devices; give arguments"
    " their shardings, as jax.NamedSharding(jax.make_mesh(({count},), ('data',)), P('data'))"
)
ELSEWHERE = (
    "it names this machine's devices: make its mesh of the parameter `devices` of make_step,"
    " and pass shapes with their sharding"
)


class StepError(ValueError):
    """The step's own code raised an error, which is the `__cause__`."""


@contextlib.contextmanager
def blaming_the_step(doing: str) -> Iterator[None]:
    """Says of an error in the block that the step's own code raised it."""
    try:
        yield
    except (Exception, SystemExit) as error:
        elsewhere = re.search("incompatible devices|does not match memory kind", str(error))
        if reason := virtual.why_not_lowered(error) or elsewhere and ELSEWHERE:
            raise ValueError(f"{doing}: {reason}") from None
        message = (str(error).strip().splitlines() or [""])[0]
        raise StepError(f"{doing} raised {type(error).__name__}: {message}") from error


def load(where: str) -> Callable[..., Any]:
    """Returns the function that `where` names: "FILE.py:FUNCTION" or "MODULE:FUNCTION"."""
    place, _, name = where.rpartition(":")
    if not (place and name.isidentifier()):
        raise ValueError(
            f"{where} must be FILE.py:FUNCTION or MODULE:FUNCTION, as in my_step.py:make_step"
        )
    path = pathlib.Path(place)
    if is_file := path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"{place}: there is no such file in {pathlib.Path.cwd()}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.path.insert(0, str(path.parent.absolute() if is_file else pathlib.Path.cwd()))
    with blaming_the_step(f"importing {place}"):
        if is_file:
            module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    if not callable(getattr(module, name, None)):
        known = ", ".join(n for n, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"{where}: {place} has no function {name}; it has {known or 'none'}")
    return getattr(module, name)


def make(make_step: Callable[..., Any], devices: Sequence[jax.Device], **switches: Any) -> Any:
    """Calls a `make_step`, with the devices if it has a parameter of this name."""
    if "devices" in inspect.signature(make_step).parameters:
        switches["devices"] = list(devices)
    name = getattr(make_step, "__name__", "make_step")
    with blaming_the_step(f"{name}({', '.join(switches)})"):
        return make_step(**switches)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step as a function of arrays alone."""

    function: Callable[..., PyTree]
    arguments: tuple[PyTree, ...]  # of one call: arrays or shapes, and None for all else
    names: tuple[str, ...]  # of the arguments
    donated: tuple[int, ...]  # the arguments that the step's own jit donates
    merge: Callable[..., list[PyTree]]  # puts arrays among all else, as the step takes them
    jitted: Any = None  # the step's own jit, if it takes shapes in place of its arrays
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of that jit, else
    jaxpr: Any = None  # what it does
    owners: tuple[int, ...] = ()  # which argument each input of `jaxpr` belongs to

    def trace(self, arguments: Sequence[PyTree]) -> jax.stages.Traced:
        """Traces one call; JAX remembers it for shapes that differ only in their places."""
        with virtual.triton_without_gpu():
            if self.jitted:
                return self.jitted.trace(*self.merge(tuple(arguments)))
            again = jax.jit(self.function, donate_argnums=self.donated, **self.options)
            return again.trace(*arguments)

    def replaced(self) -> dict[int, int]:
        """Returns the arguments that results can replace, wherever these lie."""
        arrays = [
            (n, kind(leaf), size(leaf))
            for n, arg in enumerate(self.arguments)
            for leaf in jax.tree.leaves(arg)
        ]
        return replaceable(arrays, map(kind, self.jaxpr.out_avals), self.donated)


def replaceable(
    arrays: Sequence[tuple[int, Any, int]], results: Iterable[Any], first: Collection[int]
) -> dict[int, int]:
    """Returns the arguments of which results could have at least half of the memory, and how
    many bytes that is. `arrays` are (argument, kind, bytes); arguments in `first` choose first.
    """
    free, taken = collections.Counter(results), collections.Counter[int]()
    size = collections.Counter[int]()
    for number, kind, bytes in sorted(arrays, key=lambda array: array[0] not in first):
        size[number] += bytes
        if free[kind] > 0:
            free[kind] -= 1
            taken[number] += bytes
    return {n: bytes for n, bytes in taken.items() if bytes and 2 * bytes >= size[n]}


def kind(leaf: Any, place: Any = None) -> tuple[tuple[int, ...], str]:
    """Returns the shape of an array on one device, and its dtype."""
    return tuple(place.shard_shape(leaf.shape) if place else leaf.shape), str(leaf.dtype)


def size(leaf: Any, place: Any = None) -> int:
    return math.prod(kind(leaf, place)[0]) * leaf.dtype.itemsize


def step_of(made: Any) -> Step:
    """Reads what a `make_step` returned: a step, plain or jitted by JAX, Flax NNX or Equinox,
    and the arguments of one call.
    """
    if not (isinstance(made, tuple) and len(made) > 1 and callable(made[0])):
        types = [type(one).__name__ for one in made] if isinstance(made, tuple) else made
        raise ValueError(
            "make_step() must return the step and the arguments of one call, as in `return"
            f" step, state, batch`, and returned {str(types)[:200]}"
        )
    step, *args = made
    if jax.config.jax_disable_jit:
        raise ValueError("jax_disable_jit must be off: a step without jit donates nothing")
    try:
        inspect.signature(step).bind(*args)
    except TypeError as error:
        raise ValueError(
            f"make_step() returned a step that cannot be called with the {len(args)} arguments"
            f" after it ({error}): `return step, state, batch` is for step(state, batch)"
        ) from None
    kinds = {p.name: p.kind for p in inspect.signature(step).parameters.values()}
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [n for n, kind in kinds.items() if kind <= either][: len(args)]
    rest = next((n for n, kind in kinds.items() if kind == either + 1), "argument")
    names += [f"{rest}__{n}" for n in range(len(args) - len(names))]
    pairs = zip(names, args, strict=True)
    for name, leaf in ((name, leaf) for name, arg in pairs for leaf in jax.tree.leaves(arg)):
        is_text = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "OSU"
        foreign = is_text or not (_is_array(leaf) or isinstance(leaf, REF))
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and foreign:
            raise ValueError(
                f"argument {name} holds a {type(leaf).__module__}.{type(leaf).__name__}: pass"
                " arrays of JAX or NumPy, or shapes (jax.ShapeDtypeStruct)"
            )
    arrays, merge, changed = _arrays(args)
    if not jax.tree.leaves(arrays):
        raise ValueError(f"the arguments {', '.join(names)} hold no array or shape: pass some")

    def function(*arrays: PyTree) -> PyTree:
        called = merge(jax.tree.map(lambda x: x, arrays))  # Flax changes what it merges
        results, new = jax.tree.leaves(step(*called)), changed(arrays, called)
        known = {id(x) for x in new}  # a step may return its model, too
        return [x for x in results if isinstance(x, jax.Array) and id(x) not in known], new

    signature = inspect.Signature([inspect.Parameter(name, either) for name in names])
    # XLA names the arguments by the signature, and JAX's errors the function that is wrapped
    vars(function).update(__signature__=signature, __wrapped__=step)
    function.__name__ = getattr(step, "__name__", "step")
    overwritten = tuple(
        n
        for n, arg in enumerate(args)
        if any(isinstance(leaf, REF) for leaf in jax.tree.leaves(arg))
    )
    leaves = jax.tree.leaves(args)
    apart = len(jax.tree.leaves(arrays)) == sum(map(_is_array, leaves)) and not overwritten
    jitted = step if apart and isinstance(step, type(jax.jit(step_of))) else None
    return traced(Step(function, arrays, tuple(names), overwritten, merge, jitted))


def traced(step: Step) -> Step:
    """Adds what the step does, and what its own jit was asked for."""
    with blaming_the_step(f"tracing {step.function.__name__} for jax.jit"):
        stage = step.trace(step.arguments)
    owners = _owners(step, stage)
    inner = next((eqn for eqn in stage.jaxpr.eqns if "donated_invars" in eqn.params), None)
    options: dict[str, Any] = {}
    if step.jitted:
        given = [info.donated for info in jax.tree.leaves(stage.args_info)]
        donated = {n for n, is_donated in zip(owners, given, strict=True) if is_donated}
    elif inner is not None and hasattr(vars(step.function)["__wrapped__"], "lower"):
        # the jit of Flax, of Equinox, or around which references had to be made
        owner = {id(v): n for v, n in zip(stage.jaxpr.jaxpr.invars, owners, strict=True)}
        both = zip(inner.invars, inner.params["donated_invars"], strict=True)
        donated = {owner[id(v)] for v, is_donated in both if is_donated and id(v) in owner}
        places = dict(zip(map(id, inner.outvars), inner.params["out_shardings"], strict=True))
        asked = (places.get(id(v)) for v in stage.jaxpr.jaxpr.outvars)
        placed = [p if isinstance(p, jax.sharding.Sharding) else None for p in asked]
        options["keep_unused"] = inner.params["keep_unused"]
        if any(placed):
            options["out_shardings"] = jax.tree.unflatten(stage.out_tree, placed)
    else:
        donated = set()
    if not stage.jaxpr.out_avals:
        raise ValueError(
            f"{step.function.__name__} returns no array: let it return its results"
        )
    return dataclasses.replace(
        step,
        donated=tuple(sorted(donated | set(step.donated))),
        options=options,
        jaxpr=stage.jaxpr,
        owners=owners,
    )


def _owners(step: Step, stage: jax.stages.Traced) -> tuple[int, ...]:
    """Returns the argument of each input: what is static to the step's own jit has none."""
    owners: list[int] = []
    rest = iter(enumerate(step.merge(step.arguments) if step.jitted else step.arguments))
    for info in stage.args_info[0]:
        shapes = [leaf.shape for leaf in jax.tree.leaves(info)]
        owners += next(
            [n] * len(shapes)
            for n, arg in rest
            if shapes == [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(arg)]
        )
    return tuple(owners)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _as_jax(leaf: Any) -> Any:
    """Returns an array as JAX takes it: NumPy's float64 is float32 to it."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.eval_shape(lambda x: x, leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf if dtype == leaf.dtype else leaf.update(dtype=dtype)


def _arrays(args: list[PyTree]) -> tuple[tuple[PyTree, ...], Callable, Callable]:
    """Returns the arrays of each argument, a function that puts others in their place, and one
    that returns the arrays that a call has changed in place, as those of Flax NNX.
    """
    nnx: Any = sys.modules.get("flax.nnx")

    def is_node(leaf: Any) -> bool:
        # a State is a pytree of arrays, alone or in the state of an optimizer
        pytree = nnx and (nnx.State, nnx.Variable, REF)
        return bool(nnx) and nnx.graph.is_graph_node(leaf) and not isinstance(leaf, pytree)

    nodes = {
        number: arg
        for number, arg in enumerate(args)
        if any(map(is_node, jax.tree.leaves(arg, is_leaf=is_node)))
    }
    # arrays that modules share are in the state once
    graph, state = nnx.split(nodes) if nodes else (None, {})
    leaves, tree = jax.tree.flatten([None if n in nodes else arg for n, arg in enumerate(args)])
    is_ref = [isinstance(leaf, REF) for leaf in leaves]
    leaves = [leaf[...] if ref else leaf for ref, leaf in zip(is_ref, leaves, strict=True)]
    leaves = [_as_jax(x) if _is_array(x) else x for x in leaves]

    def merge(arrays: tuple) -> list[PyTree]:
        given = iter(jax.tree.leaves([None if n in nodes else a for n, a in enumerate(arrays)]))
        filled = (next(given) if _is_array(leaf) else leaf for leaf in leaves)
        both = zip(is_ref, filled, strict=True)
        called = jax.tree.unflatten(tree, [jax.new_ref(x) if ref else x for ref, x in both])
        merged = nnx.merge(graph, nnx.State({n: arrays[n] for n in state})) if nodes else {}
        return [merged.get(n, arg) for n, arg in enumerate(called)]

    def changed(arrays: tuple, called: list[PyTree]) -> list[jax.Array]:
        after = nnx.split({n: called[n] for n in nodes})[1] if nodes else {}
        old, new = (jax.tree.leaves([side[n] for n in state]) for side in (arrays, after))
        refs = [leaf[...] for leaf in jax.tree.leaves(called) if isinstance(leaf, REF)]
        same = {id(x) for x in old}
        return refs + [x for x in new if id(x) not in same]

    plain = jax.tree.unflatten(tree, [x if _is_array(x) else None for x in leaves])
    return tuple(state.get(n, arg) for n, arg in enumerate(plain)), merge, changed


def placed(step: Step, devices: Sequence[jax.Device]) -> tuple[tuple[PyTree, ...], Mesh | None]:
    """Returns the shapes of a step's arguments on devices, and their mesh, if they have one:
    the arguments' own, with these devices in place of its own.
    """
    count, meshes = len(devices), {}

    def mesh_of(leaf: Any) -> Mesh | None:
        mesh: Any = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if mesh is None or mesh.size == 1:
            return None
        if mesh.size != count:
            raise ValueError(
                f"--devices {count}: an argument is on a mesh of {mesh.size} devices; add"
                f" --devices {mesh.size}, or make a mesh of {count}"
            )
        if mesh not in meshes:
            own = isinstance(mesh, Mesh) and set(mesh.devices.flat) == set(devices)
            places = mesh.devices if own else np.array(devices).reshape(mesh.axis_sizes)
            meshes[mesh] = Mesh(places, mesh.axis_names, axis_types=mesh.axis_types)
        return meshes[mesh]

    mesh = next(filter(None, map(mesh_of, jax.tree.leaves(step.arguments))), None)

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        if count == 1:
            return virtual.abstract(leaf, devices[0])
        if own := mesh_of(leaf):
            return virtual.abstract(leaf, NamedSharding(own, leaf.sharding.spec))
        return jax.eval_shape(lambda x: x, leaf)  # its place is the compiler's choice

    return jax.tree.map(place, step.arguments), mesh
