"""Laws of the library with models that are not the course's: of Flax NNX and of a dict of
arrays, with names, batches and losses of their own.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from own_models import MODELS, L, V, of_dict
from slow_cases import slow

from course_lib import optimizers, training
from course_lib.arguments import name_in_tree
from course_lib.many_devices import data_parallel, meshes, sharding
from course_lib.one_device import gradient_accumulation, mixed_precision, rematerialization
from course_lib.smaller_and_faster import offload
from course_lib.text.data import Batch

B = 8
MODEL = pytest.mark.parametrize("name", MODELS)


class Tuple(NamedTuple):
    inputs: Any
    labels: Any
    weights: Any


KINDS = {"Batch": Batch, "dict": dict, "NamedTuple": Tuple}
BATCHES = [("NNX", "Batch"), ("dict", "dict"), slow("dict", "NamedTuple"), slow("NNX", "dict")]
CASES = pytest.mark.parametrize(("name", "kind"), BATCHES)


def batch_of(kind="Batch"):
    """Labels of unequal weight, which bfloat16 would add up wrongly: 1 to 300."""
    tokens = np.random.default_rng(0).integers(0, V, (B, L + 1))
    weights = jnp.linspace(1, 300, B * L, dtype=jnp.float32).reshape(B, L)
    return KINDS[kind](inputs=tokens[:, :-1], labels=tokens[:, 1:], weights=weights)


def loss_of(apply_fn):
    """A loss of its own, with label smoothing, that takes any batch with names."""

    def loss_fn(params, batch, rng):
        entry = (
            batch.__getitem__ if isinstance(batch, dict) else functools.partial(getattr, batch)
        )
        logits = apply_fn(params, entry("inputs"), rng).astype(jnp.float32)
        wanted = optax.smooth_labels(jax.nn.one_hot(entry("labels"), V), 0.1)
        each = optax.softmax_cross_entropy(logits, wanted) * entry("weights")
        metrics = {"loss": (each.sum(), entry("weights").sum())}
        return each.sum() / metrics["loss"][1], metrics

    return loss_fn


@functools.cache
def model(name):
    """The parameters, the model, and its loss."""
    apply_fn, init_params = MODELS[name]()
    return init_params(jax.random.key(1)), apply_fn, loss_of(apply_fn)


def gradient(loss_fn, params, batch, **options):
    grad_fn = gradient_accumulation.of_loss(loss_fn, **options)
    with jax.default_matmul_precision("highest"):
        return jax.jit(grad_fn)(params, batch, jax.random.key(2))


def assert_equal(tree, expected, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert jnp.linalg.norm(one - other) <= tolerance * jnp.linalg.norm(other)


@CASES
def test_minibatches_of_unequal_weight_have_the_gradient_of_the_batch(name, kind):
    params, _, loss_fn = model(name)
    training.check_loss(loss_fn, params, batch_of(kind))
    expected, metrics = gradient(loss_fn, params, batch_of())
    found, summed = gradient(loss_fn, params, batch_of(kind), num_minibatches=4)
    assert_equal(found, expected)
    np.testing.assert_allclose(summed["loss"], metrics["loss"], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_ignores_the_weights_of_any_batch_is_refused(kind):
    params, apply_fn, _ = model("dict")

    def unweighted(params, batch, rng):
        even = Batch(batch_of().inputs, batch_of().labels, jnp.ones((B, L)))
        rows = len(jax.tree.leaves(batch)[0])
        return loss_of(apply_fn)(params, jax.tree.map(lambda x: x[:rows], even), rng)

    with pytest.raises(ValueError, match="loss_fn must return the mean over labels"):
        training.check_loss(unweighted, params, batch_of(kind))


@pytest.mark.parametrize(
    ("rows", "half"), [(slice(B // 2), "first"), (slice(B // 2, B), "second")]
)
def test_a_batch_with_a_half_of_padding_cannot_try_a_loss_and_is_refused_by_name(rows, half):
    params, _, loss_fn = model("dict")
    batch = batch_of("dict")
    batch["weights"] = batch["weights"].at[rows].set(0)
    with pytest.raises(ValueError, match=f"batch must have a label .* of its {half} half"):
        training.check_loss(loss_fn, params, batch)


@CASES
def test_a_policy_computes_in_its_dtype_and_adds_up_weights_in_float32(name, kind):
    params, apply_fn, _ = model(name)
    seen = []

    def spied(params, inputs, rng):
        logits = apply_fn(params, inputs, rng)
        seen.append(logits.dtype)
        return logits

    policy = mixed_precision.policy("bfloat16")
    found, metrics = gradient(policy.wrap(loss_of(spied)), params, batch_of(kind))
    expected, wide = gradient(loss_of(apply_fn), params, batch_of())
    assert set(seen) == {jnp.dtype(jnp.bfloat16)} and metrics["loss"][1] == wide["loss"][1]
    assert_equal(found, expected, tolerance=0.05)


def test_one_batch_is_not_taken_for_several():
    params, _, loss_fn = model("dict")
    [found] = training.evaluate(loss_fn, params, [batch_of("dict")]).values()
    np.testing.assert_allclose(found, loss_fn(params, batch_of(), None)[0], rtol=1e-5)
    with pytest.raises(ValueError, match="batches=dict must be several batches"):
        training.evaluate(loss_fn, params, batch_of("dict"))


def test_a_policy_refuses_a_batch_of_which_it_does_not_know_what_to_cast():
    wrapped = mixed_precision.policy("bfloat16").wrap(
        lambda params, batch, rng: (jnp.zeros(()), {})
    )
    with pytest.raises(ValueError, match="batch={'x': .*must have an entry 'inputs'"):
        wrapped({}, {"x": jnp.ones(3)}, None)
    wrapped({}, {"tokens": jnp.ones(3, jnp.int32)}, None)  # has nothing to cast


@pytest.mark.parametrize(("name", "policy"), [("NNX", "nothing"), ("dict", "dots")])
def test_a_rematerialized_model_keeps_less_and_has_the_same_gradient(name, policy):
    params, apply_fn, loss_fn = model(name)
    again = jax.checkpoint(apply_fn, policy=rematerialization.policy(policy), static_argnums=2)
    assert_equal(*(gradient(f, params, batch_of())[0] for f in (loss_of(again), loss_fn)))

    def kept(function):
        tokens = batch_of().inputs
        found = rematerialization.residuals(lambda p: function(p, tokens, None), params)
        return sum(one.bytes for one in found)

    assert kept(again) < kept(apply_fn)


@MODEL
def test_one_train_step_runs_all_techniques_at_once_and_skips_what_is_not_finite(name):
    params, _, loss_fn = model(name)
    optimizer = optimizers.get("sgd", 0.1)
    step = training.make_train_step(
        loss_fn, optimizer, num_minibatches=2, policy=mixed_precision.policy("float16")
    )
    scale = mixed_precision.DynamicLossScale(value=2.0**10)
    params = jax.tree.map(jnp.copy, params)  # the step donates them
    grads, _ = gradient(loss_fn, params, batch_of())
    state = training.init_state(params, optimizer, jax.random.key(2), scale)
    old = jax.tree.map(jnp.copy, params)
    new, metrics = step(state, batch_of("dict"))
    assert metrics["skipped"][0] == 0
    moved = jax.tree.map(lambda p, new: (p - new) / 0.1, old, new.params)
    assert_equal(moved, grads, tolerance=0.01)  # of float16


def test_an_optimizer_by_name_is_that_of_optax():
    params = {"any": jnp.ones(3)}
    for mine, theirs in (
        (optimizers.get("adamw", 1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)),
        (optimizers.get("sgd", lambda step: 0.5**step), optax.sgd(lambda step: 0.5**step)),
    ):
        states = mine.init(params), theirs.init(params)
        for _ in range(3):
            found, mine_state = mine.update(params, states[0], params)
            expected, state = theirs.update(params, states[1], params)
            states = mine_state, state
            np.testing.assert_allclose(found["any"], expected["any"], rtol=1e-6)


@MODEL
def test_muon_takes_the_matrices_that_are_chosen_by_name_and_no_others(name):
    params, _, _ = model(name)
    stacked = MuonDimensionNumbers(1, 2)

    def where(name):  # a bias is no matrix, whatever is chosen
        return stacked if name.startswith("stack") else name.startswith("blocks")

    optimizer = optimizers.get("muon", 0.1, matrices=where)
    [muon] = [
        leaf.mu
        for leaf in jax.tree.leaves(
            optimizer.init(params), is_leaf=lambda x: hasattr(x, "ns_coeffs")
        )
        if hasattr(leaf, "ns_coeffs")
    ]
    chosen = {name_in_tree(path) for path, _ in jax.tree_util.tree_leaves_with_path(muon)}
    names = {name_in_tree(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}
    assert chosen == {n for n, x in names.items() if where(n) and x.ndim > 1} and chosen
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(updates))


def test_muon_takes_the_matrices_of_stacks_that_are_chosen_by_name():
    def axes(**options):
        params = {"stack": jnp.ones((2, 4, 6)), "head": jnp.ones((4, 6)), "scale": jnp.ones(4)}
        return optimizers.matrix_axes(params, lambda name: True, **options)

    flat, stacked = MuonDimensionNumbers(0, 1), MuonDimensionNumbers(1, 2)
    found = axes(stacks=lambda name: name == "stack")
    assert found == {"stack": stacked, "head": flat, "scale": None}
    with pytest.raises(ValueError, match="shape \\(2, 4, 6\\).* `stacks` can say so"):
        axes()


def test_muon_is_refused_where_it_would_not_know_what_a_matrix_is():
    params, _, _ = model("dict")
    for matrices, wrong in (
        (None, "matrices=where"),
        (lambda name: False, "must have a kernel in a layer"),
        (lambda name: True, r"where\('stack/down'\)=True must be MuonDimensionNumbers"),
        (lambda name: 1, r"where\('stack/down'\)=1 must be MuonDimensionNumbers"),
    ):
        with pytest.raises(ValueError, match=wrong):
            optimizers.get("muon", 0.1, matrices=matrices).init(params)
    with pytest.raises(ValueError, match="matrices=.* must be None for 'adam'"):
        optimizers.get("adam", 0.1, matrices=lambda name: True)
    for name, unread in (
        ("adam", dict(weight_decay=0.1)),
        ("adamw", dict(block_size=64)),
        ("adamw", dict(warmup_steps=9)),
    ):
        with pytest.raises(ValueError, match=f"{[*unread][0]}=.* must be left out: get"):
            optimizers.get(name, 0.1, **unread)
    with pytest.raises(ValueError, match=r"optimizer\.weight_decy"):
        optimizers.get("adamw", 0.1, weight_decy=1.0)


@pytest.mark.skipif(offload.why_unavailable() is not None, reason="nothing can be offloaded")
def test_the_moments_of_stacked_layers_of_any_name_are_streamed():
    params, _, loss_fn = model("dict")
    grads, _ = gradient(loss_fn, params, batch_of())
    plain = optax.adam(1e-2)
    streamed = offload.streamed(plain, stacked=("stack",))
    found, expected = (
        jax.jit(one.update)(grads, jax.jit(one.init)(params), params)[0]
        for one in (streamed, plain)
    )
    assert_equal(found, expected)


def test_a_table_of_ones_own_dimensions_divides_any_model():
    names = {
        "table/embedding": ("vocab", "embed"),
        "scale/scale": ("embed",),
        "mix/kernel": ("embed", "other"),
        "mix/bias": ("other",),
        "up/kernel": ("embed", "mlp"),
        "down/kernel": ("mlp", "embed"),
    }
    mesh = meshes.make({"data": 2}, jax.devices()[:2])
    params, _, loss_fn = model("NNX")
    specs = sharding.specs(params, sharding.ZERO, mesh, names)
    assert {
        "table/embedding": P(None, "data"),
        "blocks/1/up/kernel": P("data", None),
    }.items() <= {
        name_in_tree(path): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(
            specs, is_leaf=lambda x: isinstance(x, P)
        )
    }.items()
    placed = jax.device_put(params, sharding.place(specs, mesh))
    rows = jax.device_put(batch_of(), NamedSharding(mesh, P("data")))
    found, _ = gradient(loss_fn, placed, rows)  # ZeRO stage 3 by the compiler
    assert_equal(found, gradient(loss_fn, params, batch_of())[0])
    with pytest.raises(ValueError, match="table must name the dimensions of 'blocks/0/down"):
        sharding.specs(params, sharding.ZERO, mesh, {})


@pytest.mark.parametrize("stage", [slow(0), 1, slow(2), 3])
def test_zero_by_hand_has_the_gradient_of_one_device_for_a_loss_of_ones_own(stage):
    mesh = meshes.make({"data": 2}, jax.devices()[:2])
    names = dict(table=("vocab", "embed"), head=("embed", "vocab"), mix=("embed", "other"))
    names |= dict(up=("embed", "mlp"), down=("mlp", "embed"))
    params, _, loss_fn = model("dict")
    whole = sharding.specs(params, {}, mesh, names)
    cut = sharding.specs(params, sharding.ZERO if stage else {}, mesh, names)
    expected, _ = gradient(loss_fn, params, batch_of())
    if stage >= 2:
        of_layer = jax.tree.map(
            lambda spec: P(*spec[1:]), cut["stack"], is_leaf=lambda x: isinstance(x, P)
        )
        change, wrap = data_parallel.scatter, data_parallel.scatter_layers(of_layer)
        if stage == 3:
            sent = dict(dtype=jnp.bfloat16, where=lambda name: name in ("up", "down"))
            change = functools.partial(data_parallel.gather, **sent)
            wrap = data_parallel.gather_layers(of_layer, again=True, scanned=False, **sent)
        inner = loss_of(of_dict(wrap=wrap)[0])

        def loss_fn(params, batch, rng):
            rest = {n: params[n] for n in ("table", "head")}
            return inner(params | change(rest, {n: cut[n] for n in rest}), batch, rng)

    own = cut if stage == 3 else whole
    grad_fn = data_parallel.gradient(loss_fn, mesh, own, cut, stage=stage)
    traced = jax.jit(grad_fn).trace(params, batch_of(), jax.random.key(0))
    found, _ = traced.lower().compile()(params, batch_of(), jax.random.key(0))
    assert_equal(found, expected, tolerance=1e-5 if stage < 3 else 0.02)
    sent = re.findall(r":(\w+)\[.* = all_gather\[", str(traced.jaxpr))
    assert set(sent) == ({"f32", "bf16"} if stage == 3 else set())


def test_what_is_neither_linen_nor_nnx_is_told_how_to_become_a_function():
    class Equinox:  # stands for eqx.Module: a callable pytree
        def __call__(self, x):
            return x

    with pytest.raises(ValueError, match="model=Equinox must be .* eqx.partition"):
        training.as_function(Equinox())
