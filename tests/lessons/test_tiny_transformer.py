"""The plain Transformer that Part II spreads over devices."""

import ast
import functools
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from course_lib.lessons import tiny_transformer

INIT = jax.jit(functools.partial(tiny_transformer.init, N=2, D=16, H=2, V=11, L=8))
PAGE = Path(__file__).parents[2] / "notebooks" / "05_transformer.ipynb"


def functions(code):
    return {
        node.name: ast.unparse(node)
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef)
    }


def test_its_functions_are_those_that_notebook_5_shows():
    cells = json.loads(PAGE.read_text())["cells"]
    techniques = (c for c in cells if "technique" in c["metadata"].get("tags", ()))
    shown = functions("\n".join("".join(cell["source"]) for cell in techniques))
    library = functions(inspect.getsource(tiny_transformer))
    assert library and {name: shown[name] for name in library} == library


def test_it_learns_a_sequence_by_heart():
    params = INIT(jax.random.key(0))
    inputs = jnp.asarray(np.random.default_rng(0).integers(0, 11, (1, 8)))
    labels = jnp.roll(inputs, -1)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(tiny_transformer.mean_loss)(params, inputs, labels)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.jit(optimizer.init)(params)
    for _ in range(100):
        params, opt_state, loss = step(params, opt_state)
    assert loss < 0.1 < np.log(11)


def test_a_logit_depends_on_no_later_token():
    params, forward = INIT(jax.random.key(0)), jax.jit(tiny_transformer.forward)
    tokens = np.arange(8)[None]
    changed = np.where(tokens == 5, 9, tokens)
    difference = forward(params, tokens) != forward(params, changed)
    assert np.flatnonzero(np.asarray(difference).any((0, 2))).tolist() == [5, 6, 7]
