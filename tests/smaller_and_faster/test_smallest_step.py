"""A backward pass by hand gives the gradient of autodiff, and holds one tree of gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import optax
import pytest
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib import configs, measure, training
from course_lib.lessons import check
from course_lib.many_devices import meshes, strategies
from course_lib.one_device import mixed_precision
from course_lib.smaller_and_faster import smallest_step
from course_lib.text.data import Batch


def config_of(backward="in_place", **changes):
    config = configs.get("155m")
    config.model.update(num_layers=2, hidden_size=32, head_dim=16, num_heads=2, max_seq_len=16)
    config.model.update(vocab_size=64, num_outputs=64, dtype="float32", remat=("Block",))
    config.model.dropout_rate = 0.0
    config.optimizer.update(name="sgd", schedule="constant")
    config.data.update(batch_size=4, seq_len=16)
    config.training.update(num_minibatches=2, backward=backward)
    config.update_from_flattened_dict(changes)
    return config


def batch_of(config, weights=None):
    size, draw = (config.data.batch_size, config.data.seq_len), np.random.default_rng(3)
    tokens = draw.integers(0, config.model.vocab_size, (2, *size), np.int32)
    return Batch(*tokens, draw.random(size, np.float32) if weights is None else weights)


def params_of(config):
    """Returns random parameters: none is 0, as biases are at the start of a run."""
    rng = np.random.default_rng(0)

    def one(path, leaf):
        mean = 1 if path[-1].key == "scale" else 0
        return jnp.asarray(rng.normal(mean, 0.2, leaf.shape), leaf.dtype)

    params = training.build(config).abstract()[0].params
    return jax.tree_util.tree_map_with_path(one, params)


def gradients(*cases, batch=None):
    """Returns gradients and metrics of each configuration, for the same parameters."""

    def compute(params, batch, rng):
        each = [training.functions(FrozenConfigDict(config)) for config in cases]
        return [one.gradient(one.loss_fn)(params, batch, rng) for one in each]

    batch = batch_of(cases[0]) if batch is None else batch
    with jax.default_matmul_precision("highest"):
        return jax.jit(compute)(params_of(cases[0]), batch, jax.random.key(5))


def assert_close(ours, wanted, rtol=1e-5):
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        mine = dict(jax.tree_util.tree_leaves_with_path(ours))[path]
        assert mine.dtype == leaf.dtype
        far = jnp.linalg.norm((mine - leaf).ravel().astype(jnp.float32))
        size = jnp.linalg.norm(leaf.ravel().astype(jnp.float32))
        assert far <= rtol * size + 1e-9, (path, float(far / size))


LONG = {"model.max_seq_len": 64, "data.seq_len": 64}
CASES = {
    "one minibatch": {"training.num_minibatches": 1},
    "two minibatches": {"model.loss_chunks": 4},
    "a loop": {"training.accumulation": "loop"},
    "dropout": {"model.dropout_rate": 0.1},
    "products are kept": {"model.remat_policy": "dots_no_batch", "model.dropout_rate": 0.1},
    "values are kept by name": {"model.remat_policy": "names", "model.remat_names": ("qkv",)},
    "flash attention": {"model.attention": "flash"} | LONG,
    "parallel blocks": {"model.parallel_block": True, "model.positions": "rotary"},
    "tied embeddings": one_device.LLAMA,
}


# The backward pass asks nothing of a layer's options: one model with all of them is enough.
SLOW = ("one minibatch", "a loop", "dropout", "values are kept by name")
SLOW += ("flash attention", "parallel blocks")


@pytest.mark.parametrize("name", [slow(each) if each in SLOW else each for each in CASES])
def test_the_gradient_equals_that_of_autodiff(name):
    cases = (config_of(way, **CASES[name]) for way in ("in_place", "autodiff"))
    (ours, metrics), (wanted, expected) = gradients(*cases)
    assert_close(ours, wanted)
    for key, pair in expected.items():
        np.testing.assert_allclose(metrics[key], pair, rtol=1e-6)


def test_in_bfloat16_the_gradient_is_as_close_to_the_exact_one_as_that_of_autodiff():
    half = {"model.dtype": "bfloat16"}
    cases = config_of("autodiff"), config_of(**half), config_of("autodiff", **half)
    with jax.numpy_dtype_promotion("standard"):  # as Flax's LayerNorm needs it
        (exact, _), (ours, _), (autodiff, _) = gradients(*cases)
    leaves = map(jax.tree.leaves, (exact, ours, autodiff))
    for right, mine, other in zip(*leaves, strict=True):
        error, usual = (float(jnp.linalg.norm((x - right).ravel())) for x in (mine, other))
        assert 0 < usual < 0.2 * float(jnp.linalg.norm(right.ravel()))
        assert error < 2 * usual


def test_a_minibatch_without_labels_adds_nothing():
    config = config_of()
    weights = jnp.ones((4, 16)).at[2:].set(0)  # the second of two minibatches
    (ours, metrics), (wanted, _) = gradients(
        config, config_of("autodiff"), batch=batch_of(config, weights)
    )
    assert metrics["loss"][1] == 32
    assert_close(ours, wanted)


def test_embeddings_can_be_tied():
    def embed(rest, batch):
        return rest["table"][batch.inputs]

    def layer(weights, x, key):
        return x + jnp.tanh(x @ weights["w"])

    def head(rest, x, batch):
        return training.next_token_loss(lambda *_: x @ rest["table"].T)(rest, batch, None)

    def loss(params, batch):
        x = embed(params, batch)
        for w in params["layers"]["w"]:
            x = layer({"w": w}, x, None)
        return head(params, x, batch)

    draw, batch = np.random.default_rng(0), batch_of(config_of())
    table, w = (0.3 * draw.normal(size=s).astype(np.float32) for s in ((64, 8), (3, 8, 8)))
    params = {"table": jnp.asarray(table), "layers": {"w": jnp.asarray(w)}}
    add = smallest_step.gradient_in_place(embed, layer, head, stacked="layers")
    start = jax.tree.map(jnp.ones_like, params)
    with jax.default_matmul_precision("highest"):
        total, metrics = jax.jit(add)(start, params, batch, None)
        wanted = jax.jit(jax.grad(loss, has_aux=True))(params, batch)[0]
    count = metrics["loss"][1]
    assert_close(jax.tree.map(lambda sum: (sum - 1) / count, total), wanted)


def test_only_one_tree_of_gradients_exists():
    def peak(backward):
        wide = {"model.hidden_size": 128, "model.num_heads": 8, "model.num_layers": 4}
        run = training.build(config_of(backward, **wide))
        state, batch = run.abstract()
        tree = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params))
        return measure.heap(run.train_step.lower(state, batch)).peak, tree

    (ours, tree), (autodiff, _) = peak("in_place"), peak("autodiff")
    assert autodiff - ours > 0.7 * tree


def test_an_exercise_may_be_solved_by_a_loop_in_python(capsys):
    def layer(w, x):
        return x + jnp.tanh(x @ w)

    def add(total, w, x):
        inputs = [x]
        for one in w:
            inputs.append(layer(one, inputs[-1]))
        dx = inputs.pop()
        for i in reversed(range(len(w))):
            dw, dx = jax.vjp(layer, w[i], inputs[i])[1](dx)
            total = total.at[i].add(dw)
        return total

    check.add_in_place(add)
    assert capsys.readouterr().out.startswith("✓")
    # a list is new memory: nothing of the donated array is overwritten
    check.add_in_place(lambda *args: list(add(*args)))
    if jax.__version_info__ >= (0, 10):  # JAX 0.7's program counts as many bytes for an array
        assert "trees exist beside the arguments" in capsys.readouterr().out


def test_weights_are_not_saved_for_the_backward_pass():
    def layer(weights, x, key):
        return jnp.tanh(x @ weights)

    stack, x = jnp.ones((5, 16, 16)), jnp.ones((4, 16))
    _, saved, _ = smallest_step.forward_and_saved(jax.checkpoint(layer), stack, x, None)
    assert [leaf.shape for leaf in saved] == [(5, 4, 16)]


@pytest.mark.parametrize("changed", ["loss", "policy", "loss scale"])
def test_what_the_backward_pass_by_hand_would_ignore_is_refused(changed):
    functions = training.functions(FrozenConfigDict(config_of()))
    loss_fn, options, optimizer = functions.loss_fn, {}, optax.sgd(0.1)
    state = jax.eval_shape(functions.init, jax.random.key(0))
    if changed == "loss":
        loss_fn = training.next_token_loss(lambda params, tokens, rng: None)
    elif changed == "policy":
        options = dict(policy=mixed_precision.policy("bfloat16"))
    else:
        state = dataclasses.replace(state, loss_scale=mixed_precision.loss_scale("static"))
    step = training.make_train_step(
        loss_fn, optimizer, gradient_fn=functions.gradient, **options
    )
    with pytest.raises(ValueError, match="backward='in_place' must be 'autodiff' for another"):
        step.lower(state, batch_of(config_of()))


def test_several_devices_are_refused():
    with pytest.raises(ValueError, match="must be 'autodiff' on 2 devices"):
        strategies.check(
            config_of(), meshes.make({"data": 2}, meshes.devices(2)), strategies.Strategy()
        )
