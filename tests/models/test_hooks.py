"""Laws of the places where a strategy changes the model."""

import jax
import jax.numpy as jnp
import one_device
import pytest

from course_lib.models import attention, hooks, parameters, transformer
from course_lib.models.hooks import Hooks


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_model_asks_each_hook_and_hooks_that_do_nothing_change_nothing(positions):
    model = one_device.small(**{"model.positions": positions}).model
    called = set()

    def recorded(name, function):
        def call(*args, **options):
            called.add(name)
            return function(*args, **options)

        return call

    nothing = Hooks()
    functions = dict(
        column=jax.lax.dot_general,
        row=jax.lax.dot_general,
        lookup=hooks._lookup,
        attend=attention.attend,
    ) | {name: getattr(nothing, name) for name in ("named", "layer", "own_key")}
    place = "positions" if positions == "learned" else "attend_positions"
    functions[place] = getattr(nothing, place)
    same = Hooks(**{name: recorded(name, function) for name, function in functions.items()})

    tokens = jnp.arange(12).reshape(2, 6)
    params = jax.eval_shape(lambda: parameters.init(jax.random.key(0), model))

    def program(*hooks):
        """Returns the program of the model before it is compiled."""
        apply_fn = transformer.function(model, *hooks)
        return jax.jit(lambda params: apply_fn(params, tokens)).lower(params).as_text()

    assert program(same) == program()
    assert called == set(functions)
