"""Laws of the report on donated buffers."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx, struct
from jax.sharding import NamedSharding, PartitionSpec

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


def compiled(function, *args, **options):
    with warnings.catch_warnings():
        # JAX's own, at lowering
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return virtual.compile(jax.jit(function, **options).lower(*args))


def report(function, *args, **options):
    return buffer_donation.report(compiled(function, *args, **options))


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
    found = report(step, state, batch, unused)
    assert found.donated_bytes == found.aliased_bytes == 0
    assert {row.why_not for row in found.arguments} == {"not donated"}


@needs_virtual
def test_a_state_is_aliased_on_a_gpu_too():
    state, batch, unused = example()
    args = virtual.abstract((state, batch, unused), virtual.devices("a5000")[0])
    check_step(report(step, *args, donate_argnums=0), state)


def test_each_failure_has_its_reason():
    def function(grows, twin, other_twin, unused, kept):
        return jnp.concatenate([grows, grows]), twin + other_twin, kept + 1

    args = [jnp.ones(3), jnp.ones(4), jnp.ones(4), jnp.ones(5), jnp.ones(6, jnp.bfloat16)]
    found = report(function, *args, donate_argnums=(0, 1, 2, 3, 4))
    assert {row.path: row.why_not for row in found.arguments} == {
        "args[0]": "no output has as many elements and bytes",
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


@pytest.mark.parametrize(
    "change",
    [lambda x: (x + 1).reshape(16), lambda x: jax.lax.bitcast_convert_type(x + 1, jnp.int32)],
    ids=["shape", "dtype"],
)
def test_from_jax_0_10_on_an_output_of_as_many_elements_and_bytes_takes_a_buffer(change):
    (found,) = report(change, jnp.ones((4, 4)), donate_argnums=0).arguments
    if jax.__version_info__ >= (0, 10):
        assert (found.aliased_to, found.why_not) == ("out", None)
    else:
        assert (found.aliased_to, found.why_not) == (None, "no output has this shape and dtype")


def test_arguments_by_name_and_a_single_result_have_paths():
    function = jax.jit(lambda state, batch: state + batch.sum(), donate_argnums=0)
    found = buffer_donation.report(function.lower(jnp.ones(3), batch=jnp.ones(2)).compile())
    assert [(row.path, row.aliased_to) for row in found.arguments] == [
        ("args[0]", "out"),
        ("kwargs['batch']", None),
    ]


@pytest.mark.parametrize(
    ("before", "after", "held", "why_not"),
    [
        ((), ("data",), 64_000, "every output of this shape and dtype is divided otherwise"),
        (("data",), (), 8_000, "every output of this shape and dtype is divided otherwise"),
        (("data",), ("data",), 8_000, None),
    ],
)
def test_on_a_mesh_the_bytes_are_those_of_one_device(before, after, held, why_not):
    mesh = jax.make_mesh((8,), ("data",))
    here, there = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (before, after))
    args = jax.ShapeDtypeStruct((16, 1000), jnp.float32, sharding=here), jnp.ones(3)
    options = dict(donate_argnums=0, out_shardings=there)
    program = compiled(lambda x, unused: x + 1, *args, **options)
    found, memory = buffer_donation.report(program), program.memory_analysis()
    assert found.argument_bytes == found.donated_bytes == held == memory.argument_size_in_bytes
    assert found.output_bytes == memory.output_size_in_bytes
    assert found.aliased_bytes == memory.alias_size_in_bytes
    row = found.arguments[0]
    assert row.shape == (16, 1000) and row.bytes == held
    assert row.why_not == why_not or row.why_not.startswith(why_not)


def test_a_step_of_nnx_is_taken_as_it_is():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    lowered = nnx.jit(lambda model, x: model(x), donate_argnums=1).lower(
        model, jnp.ones((4, 8))
    )
    found = buffer_donation.report(lowered.compile())
    assert [row.bytes for row in found.arguments if row.donated] == [128]
    assert found.aliased_bytes == 128 and found == buffer_donation.report(lowered)
