"""Laws of the checks of exercises.

Solutions are checked in `tests/test_solutions.py`, where they stand in the notebooks.
"""

import inspect

import bucket_answers
import jax
import jax.numpy as jnp
import pipeline_answers
import pytest
import tensor_answers
from slow_cases import slow

from course_lib.lessons import check, three_axes
from course_lib.lessons.check import answers
from course_lib.many_devices import meshes


def unfinished(*arguments):
    """Returns nothing, as a stub does."""


def fails(*arguments):
    raise KeyError("nope")


FUNCTIONS = [
    check.three_axes,
    *tensor_answers.FUNCTIONS,
    *pipeline_answers.FUNCTIONS,
    check.cut_norm,
    check.two_levels,
    check.mean_gradient,
    check.fsdp,
    check.summed_once,
    *bucket_answers.FUNCTIONS,
]
PREDICTIONS = {
    check.twice_the_gpus: 2,
    **tensor_answers.PREDICTIONS,
    **pipeline_answers.PREDICTIONS,
    check.traffic_of_minibatches: 2,
}


def name(value):
    return getattr(value, "id", None) or getattr(value, "__name__", str(value))


def answer(capsys, the_check, *arguments):
    capsys.readouterr()
    assert the_check(*arguments) is None
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1, printed
    return printed


@pytest.mark.parametrize("the_check", FUNCTIONS, ids=name)
def test_a_stub_gets_a_hint_and_an_error_is_repeated(the_check, capsys):
    assert answer(capsys, the_check, unfinished).startswith("✗ Nothing returned yet. ")
    assert "KeyError: 'nope'" in answer(capsys, the_check, fails)
    assert answer(capsys, the_check, 3).startswith("✗ ")


@pytest.mark.parametrize("the_check", PREDICTIONS, ids=name)
def test_a_prediction_that_is_not_made_gets_a_hint(the_check, capsys):
    number = PREDICTIONS[the_check]
    assert answer(capsys, the_check, *[...] * number).startswith("✗ No prediction yet. ")
    assert "not 'four'" in answer(capsys, the_check, *["four"] * number)


def test_a_check_that_cannot_read_an_answer_says_so_and_does_not_raise(capsys):
    broken = answers.exercise(lambda yours: yours.missing)
    assert "could not read" in answer(capsys, broken, 1)


# Plausible wrong answers, and a word that only the right explanation has.


def in_four_collectives(x):
    part = jax.lax.psum_scatter(x, "tensor", tiled=True)
    own = jax.lax.psum_scatter(part, "data", tiled=True)
    part = jax.lax.all_gather(own, "data", tiled=True)
    return jax.lax.all_gather(part, "tensor", tiled=True)


def over_tensor(total):
    return jax.lax.psum(total, "tensor")


def over_data(total):
    return jax.lax.psum(total, "data")


def mean_of_hosts(x):
    part = jax.lax.psum_scatter(x, "tensor", tiled=True)
    return jax.lax.all_gather(jax.lax.pmean(part, "data"), "tensor", tiled=True)


def row_sums(x):
    return (x**2).sum(1, keepdims=True)


def norm(total, columns):
    return lambda x: x / jnp.sqrt(total(row_sums(x)) / columns)


def of_gathered_batch(loss, w, x, y):
    x, y = (jax.lax.all_gather(a, "data", tiled=True) for a in (x, y))
    return jax.grad(loss)(meshes.vary(w, "data"), x, y)


RIGHT = [
    (check.two_levels, (in_four_collectives,)),
    (check.cut_norm, (norm(over_tensor, 64), 96)),
    *tensor_answers.RIGHT,
    *pipeline_answers.RIGHT,
    *bucket_answers.RIGHT,
]


@pytest.mark.parametrize(
    ("the_check", "right"),
    RIGHT,
    ids=[f"{name(the_check)}-{number}" for number, (the_check, _) in enumerate(RIGHT)],
)
def test_a_right_answer_written_in_another_way_passes(the_check, right, capsys):
    assert answer(capsys, the_check, *right).startswith("✓ ")


# The arrays that a layer saves depend on JAX's version.


def three_axes_with(line, changed):
    """Returns the course's answer with a part of its text changed."""
    text = inspect.getsource(three_axes)
    assert line in text
    scope: dict = {}
    exec(text.replace(line, changed), scope)
    return scope["make_gradient"]


def norm_of_columns(x):
    return x / jnp.sqrt(jax.lax.pmean((x**2).mean(0), "tensor"))


def norm_of_gathered(x):
    x = jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
    right = x / jnp.sqrt((x**2).mean(1, keepdims=True))
    return jax.lax.dynamic_slice_in_dim(right, 16 * jax.lax.axis_index("tensor"), 16, 1)


def of_mean(scale):
    return lambda loss, w, x, y: scale * jax.grad(loss)(w, x, y)


def gathered_first(shards, x, y):
    kernels = jax.lax.all_gather(shards, "data", axis=1, tiled=True)
    x, _ = jax.lax.scan(lambda x, kernel: (x + jnp.tanh(x @ kernel), None), x, kernels)
    return jax.lax.psum(jnp.sum((x - y) ** 2), "data")


def gather_rows(shard):
    return jax.lax.all_gather(shard, "data", tiled=True)


def summed_parts(shard):
    """Makes a kernel whole by a sum of arrays that have zeros in other devices' rows."""
    start = (2 * jax.lax.axis_index("data"), 0)
    rows = jax.lax.dynamic_update_slice(meshes.vary(jnp.zeros((16, 16)), "data"), shard, start)
    return jax.lax.psum(rows, "data")


def python_loop(body, x, shards):
    for shard in shards:
        x, _ = body(x, shard)
    return x, None


def fsdp_loss(
    again,
    total=jax.lax.psum,
    layer=lambda x, w: x + jnp.tanh(x @ w),
    gather=gather_rows,
    around=lambda layers: layers,
    scan=jax.lax.scan,
):
    def loss(shards, x, y):
        def add_layer(x, shard):
            return layer(x, gather(shard)), None

        body = jax.checkpoint(add_layer) if again else add_layer
        x = around(lambda x, shards: scan(body, x, shards)[0])(x, shards)
        return total(jnp.sum((x - y) ** 2), "data")

    return loss


def sums(kernel=lambda grad: grad, bias=lambda grad: jax.lax.psum(grad, "data")):
    def gradient(loss, params, batch):
        grads = jax.grad(loss)(params, batch)
        return {"kernel": kernel(grads["kernel"]), "bias": bias(grads["bias"])}

    return gradient


WRONG = [
    (check.twice_the_gpus, (2, "data"), "every part"),
    (check.twice_the_gpus, (1.75, "products"), "becomes shorter, by a factor of 2.00"),
    (check.twice_the_gpus, (1.75, "bubble"), "becomes shorter, by a factor of 1.63"),
    (check.twice_the_gpus, (1.75, "optimizer"), "takes only 0.006 s"),
    (check.twice_the_gpus, (1.75, "pipes"), "is one of"),
    (check.twice_the_gpus, (1.2, "data"), "more than 1.20"),
    (check.twice_the_gpus, (1.66, "data"), "more than 1.66"),  # no part of the bubble halved
    (check.twice_the_gpus, (1.95, "data"), "less than 1.95"),  # all but "data" halved
    (
        check.three_axes,
        (three_axes_with('"pipe", None, None, "tensor"', '"pipe"'),),
        "cut into 2",
    ),
    (check.three_axes, (three_axes_with("params = vary(", "vary("),), "wait forever"),
    (
        check.three_axes,
        (
            three_axes_with(
                "= vary(params, ",
                '|= vary({"norm": params["norm"], "output": params["output"]}, ',
            ),
        ),
        "in each slot",
    ),
    (check.three_axes, (three_axes_with("@jax.checkpoint\n", ""),), "Rematerialize"),
    (
        check.three_axes,
        (
            three_axes_with(
                '(params, ("data", "pipe"))', '(params, ("data", "pipe", "tensor"))'
            ),
        ),
        "One branch returns",
    ),
    (check.three_axes, (three_axes_with('mesh.shape["pipe"]', "2"),), "With four stages"),
    *tensor_answers.WRONG,
    *pipeline_answers.WRONG,
    *bucket_answers.WRONG,
    (check.cut_norm, (norm(lambda total: total, 16),), "its own columns"),
    (check.cut_norm, (norm(over_tensor, 16),), "64 columns"),
    (check.cut_norm, (norm_of_gathered,), "one number per row"),
    (check.cut_norm, (norm(over_tensor, 256),), "2 times the right"),
    (check.cut_norm, (lambda x: x / over_tensor(row_sums(x)) * 64,), "square root"),
    (check.cut_norm, (lambda x: x / jnp.sqrt(over_tensor((x**2).mean()) / 4),), "One number"),
    (check.cut_norm, (norm(over_data, 64),), "alone a device"),
    (check.cut_norm, (norm_of_columns,), "rows of a column"),
    (check.cut_norm, (norm(over_tensor, 64), 64), "How often"),
    (check.cut_norm, (norm(over_tensor, 64), 3072), "stays where it is"),
    (check.cut_norm, (norm(over_tensor, 64), 48), "too few"),
    (check.cut_norm, (norm(over_tensor, 64), 112), "too many"),
    (check.cut_norm, (norm(over_tensor, 64), ...), "No prediction yet"),
    (check.cut_norm, (norm(over_tensor, 64), "four"), "not 'four'"),
    (check.two_levels, (over_data,), "across hosts, GPU by GPU"),
    (check.two_levels, (mean_of_hosts,), "0.5 times the sum"),
    (check.mean_gradient, (of_mean(-1 / 8),), "sign"),
    (check.mean_gradient, (of_gathered_batch,), "send nothing else"),
    (check.two_levels, (over_tensor,), "inside each host"),
    (check.two_levels, (lambda x: jax.lax.psum(x, ("data", "tensor")),), "both axes"),
    (check.two_levels, (lambda x: jax.lax.psum(over_tensor(x), "data"),), "16 suffice"),
    (check.mean_gradient, (of_mean(1),), "8 times too large"),
    (check.mean_gradient, (lambda loss, *args: jax.value_and_grad(loss)(*args),), "one array"),
    (check.mean_gradient, (of_mean(1 / 64),), "0.125 times"),
    (
        check.mean_gradient,
        (lambda loss, w, x, y: jax.grad(loss)(meshes.vary(w, "data"), x, y),),
        "different gradients",
    ),
    (check.fsdp, (gathered_first,), "6 layers whole at once"),
    (check.fsdp, (fsdp_loss(again=False),), "each kernel is gathered once"),
    (check.fsdp, (fsdp_loss(False, around=jax.checkpoint),), "spans 6 layers"),
    (
        check.fsdp,
        (fsdp_loss(False, around=jax.checkpoint, scan=python_loop),),
        "spans 6 layers",
    ),
    (check.fsdp, (fsdp_loss(True, lambda loss, axis: loss),), "Sum them"),
    (check.fsdp, (fsdp_loss(True, jax.lax.pmean),), "not `pmean`"),
    (check.fsdp, (fsdp_loss(True, lambda s, axis: jax.lax.psum(s / 32, axis)),), "their mean"),
    (check.fsdp, (fsdp_loss(True, layer=lambda x, w: jnp.tanh(x @ w)),), "to its input"),
    (check.fsdp, (fsdp_loss(True, gather=summed_parts),), "nothing is all-gathered"),
    (
        check.fsdp,
        (fsdp_loss(True, gather=lambda s: gather_rows(jax.lax.stop_gradient(s))),),
        "no gradient reaches",
    ),
    (check.traffic_of_minibatches, (2 * 6144, 4 * 6144), "one minibatch gathers"),
    (check.traffic_of_minibatches, (4 * 6144, 4 * 6144), "backward"),
    (check.traffic_of_minibatches, (8 * 6144, 6144), "no room"),
    (check.traffic_of_minibatches, (7 * 6144, 4 * 6144), "leave the device"),
    (check.traffic_of_minibatches, (1, 4 * 6144), "Count layers"),
    (check.summed_once, (sums(kernel=lambda g: jax.lax.psum(g, "data")),), "same two rows"),
    (check.summed_once, (sums(kernel=lambda g: jax.lax.pmean(g, "data")),), "same two rows"),
    (check.summed_once, (sums(kernel=lambda g: g / 8),), "an eighth"),
    (check.summed_once, (sums(kernel=lambda g: 8 * g),), "8 times the right one"),
    (check.summed_once, (lambda loss, params, batch: params["bias"],), "Return a dict"),
    (check.summed_once, (sums(bias=lambda g: g),), "differs between devices"),
    (check.summed_once, (sums(bias=lambda g: jax.lax.pmean(g, "data")),), "a mean"),
]

SLOW = "Rematerialize", "With four stages"  # three axes, compiled twice


@pytest.mark.parametrize(
    ("the_check", "wrong", "explanation"),
    [slow(*case) if case[2] in SLOW else case for case in WRONG],
    ids=[f"{name(the_check)}-{word}" for the_check, _, word in WRONG],
)
def test_a_wrong_answer_is_told_what_is_wrong(the_check, wrong, explanation, capsys):
    printed = answer(capsys, the_check, *wrong)
    assert printed.startswith("✗ ") and explanation in printed, printed
    assert "could not read" not in printed


def test_each_check_knows_three_mistakes():
    for the_check in [*FUNCTIONS, *PREDICTIONS]:
        words = {word for one, _, word in WRONG if one is the_check}
        assert len(words) >= 3, name(the_check)
