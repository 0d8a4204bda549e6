"""Laws of the report on donated buffers."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import struct

from course_lib.measure import virtual
from course_lib.one_device import buffer_donation

needs_virtual = pytest.mark.skipif(
    virtual.why_unavailable() is not None, reason=str(virtual.why_unavailable())
)

OPTIMIZER = optax.adam(1e-3)


@struct.dataclass
class State:
    params: dict
    opt_state: tuple
    rng: jax.Array


def step(state, batch, unused):
    grads = jax.grad(lambda params: jnp.square(batch @ params["w"]).mean())(state.params)
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state)
    rng, _ = jax.random.split(state.rng)
    return State(optax.apply_updates(state.params, updates), opt_state, rng), {
        "norm": jnp.linalg.norm(grads["w"])
    }


def example(width=32):
    params = {"w": jnp.ones((width, 8))}
    return (
        State(params, OPTIMIZER.init(params), jax.random.key(0)),
        jnp.ones((4, width)),
        jnp.ones(5),
    )


def report(function, *args, **options):
    with warnings.catch_warnings():
        # JAX's own, at lowering
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        compiled = virtual.compile(jax.jit(function, **options).lower(*args))
    return buffer_donation.report(compiled)


def check_step(found, state):
    in_state = [row for row in found.arguments if row.path.startswith("args[0]")]
    # w, its two moments, the step count, the key
    assert len(in_state) == len(jax.tree.leaves(state)) == 5
    for row in in_state:
        assert row.donated and row.why_not is None
        # each leaf reuses its own old buffer
        assert row.aliased_to == row.path.replace("args[0]", "out[0]")
    assert found.donated_bytes == found.aliased_bytes == sum(row.bytes for row in in_state)


def test_a_donated_state_is_aliased_leaf_by_leaf():
    state, batch, unused = example()
    found = report(step, state, batch, unused, donate_argnums=0)
    check_step(found, state)
    assert found.arguments[0] == buffer_donation.DonatedArgument(
        "args[0].params['w']", (32, 8), "float32", 1024, True, "out[0].params['w']", None
    )


@needs_virtual
def test_a_state_is_aliased_on_a_gpu_too():
    state, batch, unused = example()
    args = virtual.abstract((state, batch, unused), virtual.devices("a5000")[0])
    check_step(report(step, *args, donate_argnums=0), state)


def test_the_bytes_are_those_of_the_compilers_own_memory_analysis():
    args = example()
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    found, memory = buffer_donation.report(compiled), compiled.memory_analysis()
    assert found.argument_bytes == memory.argument_size_in_bytes
    assert found.aliased_bytes == memory.alias_size_in_bytes
    # a pointer for each output stands beside them
    table = 8 * (len(jax.tree.leaves(args[0])) + 1)
    assert found.output_bytes == memory.output_size_in_bytes - table


def test_without_donation_nothing_is_aliased():
    found = report(step, *example())
    assert found.donated_bytes == found.aliased_bytes == 0
    assert {row.why_not for row in found.arguments} == {"not donated"}


def test_each_failure_has_its_reason():
    def function(grows, twin, other_twin, unused, kept):
        return jnp.concatenate([grows, grows]), twin + other_twin, kept + 1

    args = [jnp.ones(3), jnp.ones(4), jnp.ones(4), jnp.ones(5), jnp.ones(6, jnp.bfloat16)]
    found = report(function, *args, donate_argnums=(0, 1, 2, 3, 4))
    assert {row.path: row.why_not for row in found.arguments} == {
        "args[0]": "no output has this shape and dtype",
        "args[1]": None,
        "args[2]": "every output of this shape and dtype reuses another argument",
        "args[3]": "the program does not use it, and does not take it",
        "args[4]": None,  # found in spite of the dropped argument before it
    }
    assert (found.donated_bytes, found.aliased_bytes, found.argument_bytes) == (
        4 * 16 + 12,
        16 + 12,
        4 * 11 + 12,
    )


# 0.7 asks for the same shape and dtype; the versions between were not tried
NEWER = jax.__version_info__ >= (0, 10)


@pytest.mark.skipif(
    (0, 7, 2) < jax.__version_info__ < (0, 10), reason="JAX changed between these versions"
)
@pytest.mark.parametrize(
    ("function", "taken_over"),
    [
        (lambda x: jnp.sin(x.reshape(32, 32)), NEWER),  # as many elements, in another shape
        (lambda x: x.astype(jnp.int32), NEWER),  # as many bytes, of another dtype
        (lambda x: x.astype(jnp.bfloat16), False),  # as many elements, not as many bytes
        # as many bytes, not as many elements
        (lambda x: jnp.tile(x, 2).astype(jnp.bfloat16), False),
    ],
)
def test_a_buffer_of_another_shape_or_dtype_is_taken_over_in_newer_jax_and_the_report_says_so(
    function, taken_over
):
    found = report(function, jnp.ones(1024), donate_argnums=0)
    (row,) = found.arguments
    assert (row.aliased_to, row.why_not) == (
        ("out", None) if taken_over else (None, "no output has this shape and dtype")
    )
    assert found.aliased_bytes == taken_over * row.bytes


def test_arguments_by_name_and_a_single_result_have_paths():
    function = jax.jit(lambda state, batch: state + batch.sum(), donate_argnums=0)
    found = buffer_donation.report(function.lower(jnp.ones(3), batch=jnp.ones(2)).compile())
    assert [(row.path, row.aliased_to) for row in found.arguments] == [
        ("args[0]", "out"),
        ("kwargs['batch']", None),
    ]


def test_jax_warns_at_lowering_and_the_report_does_not():
    function = jax.jit(lambda x: x.sum(), donate_argnums=0)
    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        lowered = function.lower(jnp.ones(3))
    # and a warning here would be an error
    assert buffer_donation.report(lowered.compile()).aliased_bytes == 0


def test_what_is_not_compiled_is_refused():
    as_a_user = inspect.unwrap(buffer_donation.report)  # without the tests' checks of types
    with pytest.raises(ValueError, match="compiled must be a compiled step"):
        as_a_user(jax.jit(jnp.sin).lower(jnp.ones(3)))


def test_a_donated_array_cannot_be_used_again_but_one_that_found_no_output_can():
    function = jax.jit(lambda state, batch: state + batch.sum(), donate_argnums=(0, 1))
    state, batch = jnp.ones(3), jnp.ones(2)
    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        function(state, batch)
    assert state.is_deleted() and not batch.is_deleted()
    # JAX or the runtime below it refuses, whichever sees it first
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        state + 1
