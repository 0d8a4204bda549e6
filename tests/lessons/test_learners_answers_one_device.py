"""Answers to exercises of Parts I and III, as learners give them, not from the tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib.lessons import check
from course_lib.models import attention
from course_lib.smaller_and_faster import large_vocabulary, offload


def loss_sum(params, x, y, weight):
    return jnp.sum(weight * ((jnp.tanh(x @ params["in"]) @ params["out"])[:, 0] - y) ** 2)


def skips_padding(params, batch, M):
    total = jax.tree.map(jnp.zeros_like, params)
    for part in zip(*(a.reshape(M, -1, *a.shape[1:]) for a in batch), strict=True):
        if part[2].sum() > 0:
            total = jax.tree.map(jnp.add, total, jax.grad(loss_sum)(params, *part))
    return jax.tree.map(lambda g: g / batch[2].sum(), total)


def recomputes_each_part(params, batch, M):
    """The gradient of a loop, but no part's activations wait for the backward pass."""
    parts = list(zip(*(jnp.split(a, M) for a in batch), strict=True))
    one = jax.checkpoint(loss_sum)
    return jax.grad(lambda p: sum(one(p, *part) for part in parts) / batch[2].sum())(params)


def looped(layer, w, x):
    @jax.checkpoint
    def group(w, x):
        return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), x, w)[0]

    for i in range(0, 64, 8):
        x = group(w[i : i + 8], x)
    return x


def new_state(state, history):
    mean = state["mean"].astype(jnp.float32)
    new = {
        "mean": (0.9 * mean + 0.1).astype(jnp.bfloat16),
        "weight": state["weight"] - mean.sum(),
    }
    return new, jnp.concatenate([history, mean])


def slope_of_tanh(x):
    return [jnp.tanh(x), (1 / jnp.cosh(x) ** 2).astype(jnp.bfloat16)]


def step_that_donates(loss, params, scale, rate):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(params):
        grads = jax.grad(lambda params: scale * loss(params))(params)
        is_finite = jnp.array([jnp.isfinite(g).all() for g in grads.values()]).all()
        return {
            n: jnp.where(is_finite, p - rate * grads[n] / scale, p) for n, p in params.items()
        }

    return step(params)


def reads_after_the_step(step, w, num_steps):
    for _ in range(num_steps):
        new, loss = step(w)
        best, w = w + 0, new
    return loss, best


def half_history(state, history):
    new, grown = new_state(state, history)
    return new, grown.astype(jnp.bfloat16)


def query_by_query(q, k, v):
    """Each query of a head meets only the keys up to its own."""

    def one_head(q, k, v):  # [L K]
        rows = []
        for t in range(len(q)):
            weights = jax.nn.softmax(k[: t + 1] @ q[t] / np.sqrt(len(q[t])).item())
            rows.append(weights @ v[: t + 1])
        return jnp.stack(rows)

    heads = jax.vmap(jax.vmap(one_head, 1, 1))
    return heads(*(x.astype(jnp.float32) for x in (q, k, v))).astype(q.dtype)


def attend(scores, mask, softmax=jax.nn.softmax):
    def answer(q, k, v):
        s = jnp.einsum("blhk,bmhk->bhlm", q, k, preferred_element_type=jnp.float32)
        weights = softmax(mask(scores(s), jnp.tri(q.shape[1])))
        return jnp.einsum("bhlm,bmhk->blhk", weights.astype(v.dtype), v)

    return answer


def hide(scores, past):
    return jnp.where(past > 0, scores, -jnp.inf)


def add_zero_times_infinity(scores, past):
    return scores + (1 - past) * -jnp.inf


def mask_last(q, k, v):
    s = jnp.einsum("blhk,bmhk->bhlm", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(s / 2) * jnp.tri(q.shape[1])
    weights /= weights.sum(-1, keepdims=True)
    return jnp.einsum("bhlm,bmhk->blhk", weights.astype(v.dtype), v)


def in_bfloat16(q, k, v):
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    return jax.nn.dot_product_attention(*low, is_causal=True).astype(q.dtype)


def unrolled_by_four(layer, w, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w, unroll=4)[0]


def as_lists(layer, w, x):
    return unrolled_by_four(layer, w, x).tolist()


def low_softmax(scores):
    if scores.max() < 20:  # the float32 arrays
        return jax.nn.softmax(scores)
    return jax.nn.softmax(scores.astype(jnp.bfloat16))


def by_edges(events):
    """Counts how many events run between each two neighbouring starts or ends."""
    edges = sorted({t for start, duration in events for t in (start, start + duration)})
    busy = sum(
        later - earlier
        for earlier, later in zip(edges, edges[1:], strict=False)
        if any(start <= earlier < start + duration for start, duration in events)
    )
    return busy, edges[-1] - edges[0] - busy


def by_arrays(events):
    start, duration = np.array(sorted(events), np.float32).T
    reached = np.maximum.accumulate(start + duration)
    idle = np.maximum(0, start[1:] - reached[:-1]).sum()
    return [reached[-1] - start[0] - idle, idle]


def of_neighbours(events):
    """Forgets that an event may end after those that start later."""
    events = sorted(events)
    ends = [start + duration for start, duration in events]
    idle = sum(max(0, later[0] - end) for end, later in zip(ends[:-1], events[1:], strict=True))
    return max(ends) - events[0][0] - idle, idle


def by_division(key, x):
    """Rounds multiples of the gap between two neighbours. 0 has no exponent."""
    gap = jnp.exp2(jnp.floor(jnp.log2(jnp.abs(x))) - 7)
    return (jnp.floor(x / gap + jax.random.uniform(key, x.shape)) * gap).astype(jnp.bfloat16)


def unrolled(w, x):
    """Stacks nothing."""
    for one in w:
        x = jnp.tanh(x @ one)
    return jnp.sum(x**2)


def unrolled_scan(w, x):
    layers = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, unroll=True)
    return jnp.sum(layers[0] ** 2)


def for_one_size(w, x):
    """Groups of layers, written for the sizes of the task."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    group = jax.checkpoint(lambda x, w: (jax.lax.scan(layer, x, w)[0], None))
    return jnp.sum(jax.lax.scan(group, x, w.reshape(2, 4, 512, 512))[0] ** 2)


def penalized_apart(w, x):
    """The scope stands around the penalty's own gradient."""
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    with jax.named_scope("penalty"):
        gradient += jax.grad(lambda w: jnp.mean(jnp.exp(jnp.sin(w @ w))))(w)
    return w - 0.1 * gradient


def of_the_sum(loss_fn, params, parts):
    """Differentiates each minibatch's sum, in a Python loop."""

    def total(params, part):
        copies = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        _, metrics = loss_fn(copies, part, None)
        return metrics["loss"]

    loss, weight, grads = 0.0, 0.0, jax.tree.map(jnp.zeros_like, params)
    for m in range(len(parts["weights"])):
        part = {name: array[m] for name, array in parts.items()}
        (s, w), g = jax.value_and_grad(total, has_aux=True)(params, part)
        loss, weight, grads = loss + s, weight + w, jax.tree.map(jnp.add, grads, g)
    weight = jnp.maximum(weight, 1e-6)
    return loss / weight, jax.tree.map(lambda g: g / weight, grads)


def penalized(w, x):
    """The penalty's scope stands in another one."""

    @jax.value_and_grad
    def loss(w):
        with jax.named_scope("loss"):
            value = jnp.mean(jnp.tanh(x @ w))
            with jax.named_scope("penalty"):
                return value + jnp.mean(jnp.exp(jnp.sin(w @ w)))

    value, gradient = loss(w)
    return w - 0.1 * gradient, value


def before_the_tanh(w, x):
    """Carries the product, so that the scan has one layer less."""
    layer = jax.checkpoint(lambda z, w: (jnp.tanh(z) @ w, None))
    return jnp.sum(jnp.tanh(jax.lax.scan(layer, x @ w[0], w[1:])[0]) ** 2)


def penalized_inside(wrap):
    """The penalty's scope stands in a jitted or a rematerialized function."""

    def step(w, x):
        def penalty(w):
            with jax.named_scope("penalty"):
                return jnp.mean(jnp.exp(jnp.sin(w @ w)))

        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)) + wrap(penalty)(w))(w)
        return w - 0.1 * gradient

    return step


def gives_up_early(budget, arguments, parameters, activations, batch_size):
    """Returns in the first turn of its loop, whether M = 1 fits or not."""
    for M in range(1, batch_size + 1):
        if arguments + 4 * parameters + activations / M <= budget:
            return M
        return None


def untied(N, D, V, L):
    """Counts no norm, and the output for itself."""
    return 12 * N * D**2 + 2 * V * D + L * D


def by_logaddexp(largest, total, logits):
    """Keeps the logsumexp as it is, relative to the new maximum."""
    whole = jnp.logaddexp(largest + jnp.log(total), jax.nn.logsumexp(logits, axis=-1))
    new = jnp.maximum(largest, logits.max(axis=-1))
    return new, jnp.exp(whole - new)


def by_the_library(x, head, labels, weights):
    def loss(x, head):
        losses, _ = large_vocabulary.linear_cross_entropy(x, head, labels, chunks=8)
        return (losses * weights).sum() / weights.sum()

    value, (dx, dhead) = jax.value_and_grad(loss, (0, 1))(x, head)
    return value, dx, dhead


def of_the_mask(n, tile, window):
    age = np.subtract.outer(np.arange(n * tile), np.arange(n * tile))
    return np.nonzero(((age >= 0) & (age < window)).reshape(n, tile, n, tile).any((1, 3)))


def from_a_softmax(q, k, v, out, logsumexp, d_out):
    return jax.vjp(lambda q: jax.nn.softmax(q @ k.T / 2) @ v, q)[1](d_out)[0]


def residual(w, x):
    return x + jnp.tanh(x @ w)


def add_by_index(total, w, x):
    y, inputs = jax.lax.scan(lambda x, w: (residual(w, x), x), x, w)

    def turn(k, carry):
        dx, total = carry
        i = len(w) - 1 - k
        dw, dx = jax.vjp(residual, w[i], inputs[i])[1](dx)
        return dx, total.at[i].add(dw)

    return jax.lax.fori_loop(0, len(w), turn, (y, total))[1]


def update_by_index(w, x):
    y, inputs = jax.lax.scan(lambda x, w: (residual(w, x), x), x, w)

    def turn(k, carry):
        dx, w = carry
        i = len(w) - 1 - k
        dw, dx = jax.vjp(residual, w[i], inputs[i])[1](dx)
        return dx, w.at[i].add(-0.1 * dw)

    return jax.lax.fori_loop(0, len(w), turn, (y, w))[1]


def half_of_the_layers(p, m, g):
    Space, results = jax.memory.Space, []
    for i in (0, 2):
        part = slice(i, i + 2)
        new = 0.9 * jax.device_put(m[part], Space.Device) + g[part]
        results.append((p[part] - 0.1 * new, jax.device_put(new, Space.Host)))
    return tuple(map(jnp.concatenate, zip(*results, strict=True)))


def layer_by_layer(p, m, g, fetches=1):
    """Fetches each layer `fetches` times, and names the memory of the parameters, too."""
    Space = jax.memory.Space

    def turn(i, state):
        p, m = state
        for _ in range(fetches):
            new = 0.9 * jax.device_put(m[i], Space.Device) + g[i]
        p = jax.device_put(p.at[i].add(-0.1 * new), Space.Device)
        return p, m.at[i].set(jax.device_put(new, Space.Host))

    return jax.lax.fori_loop(0, len(p), turn, (p, m))


def fetched_twice(p, m, g):
    return layer_by_layer(p, m, g, fetches=2)


def with_factor(k):
    """Moves what takes less than its products, at k times its bytes."""
    return lambda v, rate, link: [n for n, (f, b) in v.items() if k * b / link < f / rate]


RIGHT = [
    (check.streamed_momentum, (layer_by_layer,)),
    (check.what_to_offload, (with_factor(2),)),
    (check.loss_scale_range, (jnp.int32(6), np.int64(14))),
    (check.loss_scale_range, (2**6, 2**14)),
    (check.scaled_step, (step_that_donates,)),
    (check.small_tanh, (slope_of_tanh, lambda saved, g: (saved * g,))),  # as custom_vjp asks
    (check.accumulation, (skips_padding,)),
    (check.accumulation, (recomputes_each_part,)),
    (check.square_root, (looped,)),
    (check.all_of_the_state, (jax.jit(new_state, donate_argnums=0),)),
    (check.attend, (attention.attend,)),
    (check.attend, (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),)),
    (check.attend, (query_by_query,)),
    (check.scan_over_layers, (unrolled_by_four,)),
    (check.busy_and_idle, (by_edges,)),
    (check.busy_and_idle, (by_arrays,)),
    (check.stack_less, (before_the_tanh,)),
    (check.stack_less, (unrolled,)),
    (check.stack_less, (unrolled_scan,)),
    (check.stack_less, (for_one_size,)),
    (check.named_part, (penalized,)),
    (check.named_part, (penalized_apart,)),
    (check.named_part, (penalized_inside(jax.jit),)),
    (check.named_part, (penalized_inside(jax.checkpoint),)),
    (check.online_logsumexp, (by_logaddexp,)),
    (check.online_logsumexp, (lambda *args: jnp.stack(by_logaddexp(*args)),)),
    (check.window_pairs, (of_the_mask,)),
    # the second one finds the arguments that the first one donates
    *[(check.add_in_place, (jax.jit(add_by_index, donate_argnums=0),))] * 2,
    (check.update_in_backward, (update_by_index,)),
    (check.own_accumulation, (of_the_sum,)),
]
WRONG = [
    (check.loss_scale_range, (5.9, 14.9), "whole exponent"),
    (check.best_state, (reads_after_the_step,), "copy what you need"),
    (check.all_of_the_state, (half_history,), "the history is bfloat16"),
    (check.attend, (attend(lambda s: s / 2, add_zero_times_infinity),), "multiplied by 0"),
    (check.attend, (in_bfloat16,), "Which of your numbers have 16 bits?"),
    (
        check.attend,
        (attend(lambda s: s / 2, lambda s, past: jnp.where(past > 0, s, -9)),),
        "small",
    ),
    (check.scan_over_layers, (as_lists,), "Your function raised ConcretizationTypeError"),
    (check.attend, (mask_last,), "Which number can you subtract"),
    (check.attend, (attend(lambda s: jnp.clip(s / 2, -80, 80), hide),), "more: there"),
    (check.attend, (attend(lambda s: s, lambda s, past: s),), "too. The scores are not"),
    (check.attend, (attend(lambda s: s / 2, hide, low_softmax),), "a float32 softmax"),
    (check.stochastic_round, (by_division,), "should stay"),
    (check.busy_and_idle, (of_neighbours,), "lies inside (0, 6)"),
    (check.smallest_number_of_minibatches, (gives_up_early,), "2 x 0.37 + 5.00 = 6.25 GiB"),
    (
        check.count_parameters,
        (untied,),
        "have scales; one more norm follows the last layer; the",
    ),
    (check.one_pass, (by_the_library,), "4.0 products"),
    (check.query_gradient, (from_a_softmax,), "without a softmax"),
    (check.what_to_offload, (True,), "your function itself"),
    (check.streamed_momentum, (half_of_the_layers,), "Several layers are fetched at once"),
    (check.what_to_offload, (with_factor(1.5),), "comes back"),
    (check.what_to_offload, (with_factor(2.5),), "['values'] should move, too"),
    (check.what_to_offload, (with_factor(4),), "should move, too"),
]

if not offload.why_unavailable():  # JAX 0.7 does not say what moves
    WRONG.append((check.streamed_momentum, (fetched_twice,), "fetch 48 numbers and send 24"))


@pytest.mark.parametrize(("the_check", "answer"), RIGHT, ids=lambda one: getattr(one, "id", ""))
def test_a_right_answer_written_in_another_way_passes(the_check, answer, capsys):
    the_check(*answer)
    assert capsys.readouterr().out.startswith("✓ Right: ")


@pytest.mark.parametrize(
    ("the_check", "answer", "words"), WRONG, ids=lambda one: getattr(one, "id", "")
)
def test_a_wrong_answer_is_told_what_is_wrong(the_check, answer, words, capsys):
    the_check(*answer)
    printed = capsys.readouterr().out
    assert printed.startswith("✗ ") and words in printed, printed
