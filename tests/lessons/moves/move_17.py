import functools

import jax
import optax

from course_lib import lessons
from course_lib.lessons import game


def make_step(config):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(game.light_loss)(params, batch)
        updates, opt_state = config.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


lessons.submit(make_step, name="bfloat16 moments", optimizer="adamw_bf16")
