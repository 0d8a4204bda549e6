"""A layer's gradient, cut into three programs: F, B and W.

    F   y, the output                       saves what B and W will read
    B   dx, the gradient of the input       passes on what W will read
    W   dweights, the gradient of the weights

JAX traces the layer and its gradient (`jax.vjp`) to one jaxpr, a list of equations. Each
equation belongs to the first program that needs its result, so nothing is computed twice. A
layer that rematerializes does so in B: the jaxpr then has the equations that compute its
activations again, and B runs them, also those that only W needs. Zero-bubble schedules rest on
this cut (Qi et al., 2023, https://arxiv.org/abs/2401.10241).

Each program computes three kinds of results for itself, since saving them would cost more:
those that depend on weights only (such as a cast), random keys, and casts, copies and reshapes
of an activation whose result is not smaller than what they read.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

PyTree = Any
Values = list[jax.Array]

CALLS = frozenset(
    "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call"
    " custom_vjp_call_jaxpr".split()
)
"""Primitives that call a jaxpr once."""

VIEWS = frozenset(
    "convert_element_type broadcast_in_dim reshape squeeze expand_dims transpose copy copy_p"
    " name reduce_precision pvary pcast".split()
)
"""Primitives that only cast, copy, rename, broadcast or reshape: next to the operation that
reads their result, they cost almost nothing.
"""


@dataclasses.dataclass(frozen=True)
class Split:
    """The three programs of a layer. `weights` and `others` are as for `split`."""

    forward: Callable[..., tuple[Any, Values]]  # (weights, x, *others) -> (y, saved)
    backward: Callable[..., tuple[Any, Values]]  # (weights, saved, dy, *others) -> (dx, passed)
    weight_gradient: Callable[..., PyTree]  # (weights, saved, passed, *others) -> dweights
    equations: dict[str, list[JaxprEqn]]  # of each program, by "F", "B" and "W"


def split(layer: Callable[..., Any], weights: PyTree, x: Any, *others: Any) -> Split:
    """Cuts the gradient of a layer, `layer(weights, x, *others) -> y` with y like x, into F, B
    and W. Only shapes and dtypes matter here; `others` are not differentiated, such as a random
    key.
    """

    def gradient(weights: PyTree, others: Any, x: Any, dy: Any) -> tuple[Any, Any, PyTree]:
        y, pull_back = jax.vjp(lambda weights, x: layer(weights, x, *others), weights, x)
        dweights, dx = pull_back(dy)
        return y, dx, dweights

    args, tree = jax.tree.flatten((weights, others, x, x))
    nested = jax.make_jaxpr(lambda *args: gradient(*jax.tree.unflatten(tree, args)))(*args)
    traced = jax.make_jaxpr(lambda *args: _inline(nested.jaxpr, nested.consts, args))(*args)
    jaxpr = traced.jaxpr
    constants = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    *free, input, gradient_of_output = jaxpr.invars
    output, gradient_of_input, *of_weights = jaxpr.outvars

    again = _repeated(jaxpr.eqns, [input, gradient_of_output])
    known = {*free, *constants}
    F = _needed(jaxpr.eqns, [output], {*known, input})
    from_f = {input, *_results(F, again)}
    B = _needed(jaxpr.eqns, [gradient_of_input], {*known, *from_f, gradient_of_output})
    from_b = {gradient_of_output, *_results(B, again)} - from_f
    W = _needed(jaxpr.eqns, of_weights, {*known, *from_f, *from_b})
    moved = _results(_recomputed(W, from_b, _depend(jaxpr.eqns, gradient_of_output)), again)
    B = _needed(jaxpr.eqns, [gradient_of_input, *moved], {*known, *from_f, gradient_of_output})
    from_b |= set(moved)
    W = _needed(jaxpr.eqns, of_weights, {*known, *from_f, *from_b})
    read_by_b, read_by_w = _read(B, [gradient_of_input]), _read(W, of_weights)
    saved = [v for v in dict.fromkeys([*read_by_b, *read_by_w]) if v in from_f]
    passed = [v for v in read_by_w if v in from_b]

    def run(program: list[JaxprEqn], values: dict[Var, Any], outputs: Sequence[Any]) -> Values:
        values = constants | values
        _evaluate(program, values)
        return [_value(values, v) for v in outputs]

    def given(weights: PyTree, others: Any) -> dict[Var, Any]:
        return dict(zip(free, jax.tree.leaves((weights, others)), strict=True))

    def forward(weights: PyTree, x: Any, *others: Any) -> tuple[Any, Values]:
        y, *values = run(F, given(weights, others) | {input: x}, [output, *saved])
        return y, values

    def backward(weights: PyTree, values: Values, dy: Any, *others: Any) -> tuple[Any, Values]:
        known = given(weights, others) | dict(zip(saved, values, strict=True))
        dx, *values = run(B, known | {gradient_of_output: dy}, [gradient_of_input, *passed])
        return dx, values

    def weight_gradient(
        weights: PyTree, values: Values, from_backward: Values, *others: Any
    ) -> PyTree:
        known = given(weights, others) | dict(zip(saved, values, strict=True))
        known |= dict(zip(passed, from_backward, strict=True))
        return jax.tree.unflatten(jax.tree.structure(weights), run(W, known, of_weights))

    return Split(forward, backward, weight_gradient, {"F": F, "B": B, "W": W})


def _inline(jaxpr: Any, constants: Sequence[Any], args: Sequence[Any]) -> Values:
    """Evaluates a jaxpr with calls inlined: one for both gradients could not be cut."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))
    _evaluate(jaxpr.eqns, values, inline=True)
    return [_value(values, v) for v in jaxpr.outvars]


def _evaluate(
    equations: Iterable[Any], values: dict[Var, Any], *, inline: bool = False
) -> None:
    """Computes equations, and adds their results to the values."""
    for equation in equations:
        args = [_value(values, v) for v in equation.invars]
        with jax.named_scope(str(equation.source_info.name_stack)):
            if inline and _is_called_once(equation):
                names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
                inner = next(equation.params[name] for name in names if name in equation.params)
                constants = getattr(inner, "consts", ())
                inner = getattr(inner, "jaxpr", inner)
                # A scan of one iteration cuts its first axis off, and puts it back.
                args = [
                    jax.lax.squeeze(x, [0]) if jnp.ndim(x) > v.aval.ndim else x
                    for x, v in zip(args, inner.invars, strict=True)
                ]
                results = [
                    jax.lax.expand_dims(x, [0]) if v.aval.ndim > jnp.ndim(x) else x
                    for x, v in zip(
                        _inline(inner, constants, args), equation.outvars, strict=True
                    )
                ]
            else:
                params = equation.primitive.get_bind_params(equation.params)
                # Before JAX 0.10: a pair.
                functions, params = params if isinstance(params, tuple) else ((), params)
                results = equation.primitive.bind(*functions, *args, **params)
        if not isinstance(results, (list, tuple)):
            results = [results]
        values.update(zip(equation.outvars, results, strict=True))


def _is_called_once(equation: JaxprEqn) -> bool:
    """Whether an equation calls a jaxpr once: a call, or a loop of one iteration."""
    name = equation.primitive.name
    return name in CALLS or (name == "scan" and equation.params["length"] == 1)


def _value(values: dict[Var, Any], v: Any) -> Any:
    return v.val if isinstance(v, Literal) else values[v]


def _needed(equations: Sequence[JaxprEqn], outputs: Iterable[Any], known: set) -> list:
    """Returns the equations, in order, that compute the outputs from known values."""
    wanted, chosen = {v for v in outputs if not isinstance(v, Literal)} - known, []
    for equation in reversed(equations):
        if wanted & set(equation.outvars):
            chosen.append(equation)
            wanted |= set(_read([equation])) - known
    return chosen[::-1]


def _read(equations: Iterable[JaxprEqn], outputs: Sequence[Any] = ()) -> list[Var]:
    """Returns the values that equations read, and the outputs, each once."""
    values = [v for equation in equations for v in equation.invars] + list(outputs)
    return list(dict.fromkeys(v for v in values if not isinstance(v, Literal)))


def _results(equations: Iterable[JaxprEqn], again: set[Var]) -> list[Var]:
    """Returns the results of equations, without those that each program computes for itself."""
    return [v for equation in equations for v in equation.outvars if v not in again]


def _depend(equations: Iterable[JaxprEqn], value: Var) -> set[Var]:
    """Returns the value and all that depends on it."""
    late = {value}
    for equation in equations:
        if late & set(_read([equation])):
            late |= set(equation.outvars)
    return late


def _recomputed(
    equations: Iterable[JaxprEqn], from_b: set[Var], late: set[Var]
) -> list[JaxprEqn]:
    """Returns the equations of W that B runs instead: they do not depend on dy, and read what B
    recomputes. Attention's output is one, much smaller than the probabilities it is made from.
    """
    moved, there = [], from_b - late
    for equation in equations:
        read = set(_read([equation]))
        if read & there and not read & late:
            moved.append(equation)
            there |= set(equation.outvars)
    return moved


def _repeated(equations: Iterable[JaxprEqn], activations: Iterable[Var]) -> set[Var]:
    """Returns the results that each program computes for itself."""
    # Values that depend on an activation, and random numbers, which take time to make.
    costly, again = set(activations), set[Var]()
    for equation in equations:
        read = _read([equation])
        if any(v in costly or _is_key(v) for v in read) and not _is_key(equation.outvars[0]):
            costly |= set(equation.outvars)
            if equation.primitive.name not in VIEWS or _bytes(read[0]) > _bytes(
                equation.outvars[0]
            ):
                continue
        again |= set(equation.outvars)
    return again


def _is_key(v: Any) -> bool:
    return jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)


def _bytes(v: Any) -> int:
    return v.aval.size * v.aval.dtype.itemsize
