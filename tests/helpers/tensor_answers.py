"""Right and wrong answers to the exercises of notebooks 10, 11, 13 and 14, for `test_check`."""

import jax
import jax.numpy as jnp

from course_lib.lessons import check
from course_lib.many_devices import collectives, meshes

FUNCTIONS = [
    check.gated_mlp,
    check.padded_vocabulary,
    check.divided_embedding,
    check.two_way_product,
    check.order_of_arrival,
    check.merge,
    check.ulysses,
    check.ring_bytes,
    check.places,
    check.expert_layer,
]
PREDICTIONS = {
    check.missing_sum: 1,
    check.hidden_with_latency: 1,
    check.work_in_order: 1,
    check.dropped: 2,
    check.least_room: 1,
}


def share(x, gate, up, down, activation=jax.nn.silu):
    """One device's term of a gated MLP."""
    return (activation(x @ gate) * (x @ up)) @ down


def summed(x):
    return jax.lax.psum(x, "tensor")


def three_thirds(x, gate, up, down):
    return summed(jnp.stack([share(x, gate, up, down) / 3] * 3)).sum(0)


def exchanged_kernels(x, gate, up, down):
    return summed(share(x, up, gate, down))


def summed_too_early(x, gate, up, down):
    return summed((jax.nn.silu(summed(x @ gate)) * (x @ up)) @ down)


def padded(V, n, multiple):
    return -(-V // (n * multiple)) * n * multiple


def looked_up(mask=True, own=True, total=True, take=False):
    def lookup(table, tokens):
        size = len(table)
        index = tokens - own * jax.lax.axis_index("tensor") * size
        mine = ((index >= 0) & (index < size))[..., None] | (not mask)
        rows = jnp.where(mine, table[jnp.clip(index, 0, size - 1)], 0)
        rows = jnp.take(table, index, axis=0) if take else rows
        return summed(rows) if total else rows

    return lookup


def gathered_table(table, tokens):
    device = jax.lax.axis_index("tensor")
    whole = jnp.zeros((jax.lax.axis_size("tensor"), *table.shape)).at[device].set(table)
    return summed(whole).reshape(-1, table.shape[1])[tokens]


def around(n, by=1):
    return [(d, (d + by) % n) for d in range(n)]


def halves(in_place=True, n=None):
    def product(x, kernel, n=n):
        n, d = n or jax.lax.axis_size("tensor"), jax.lax.axis_index("tensor")
        (right, left), (upper, lower) = jnp.split(x, 2, axis=1), jnp.split(kernel, 2)
        total = meshes.vary(jnp.zeros((n, len(x), kernel.shape[1])), "tensor")
        for step in range(n):
            first, second = ((d - step) % n, (d + step) % n) if in_place else (step, step)
            total = total.at[first].add(right @ upper).at[second].add(left @ lower)
            right = jax.lax.ppermute(right, "tensor", around(n))
            left = jax.lax.ppermute(left, "tensor", around(n, -1))
        return total.reshape(-1, kernel.shape[1])

    return product


def same_rows(x, kernel):
    upper, _ = jnp.split(kernel, 2)
    return halves()(x, jnp.concatenate([upper, upper]))


def twice_as_large(x, kernel):
    return 2 * halves()(x, kernel)


def not_turned(x, kernel):
    d, (right, left) = jax.lax.axis_index("tensor"), jnp.split(x, 2, axis=1)
    alone = [(right, jnp.zeros_like(left)), (jnp.zeros_like(right), left)]
    first, second = (halves()(jnp.concatenate(each, axis=1), kernel) for each in alone)
    return jnp.roll(first, 2 * d, axis=0) + jnp.roll(second, -2 * d, axis=0)


def whole_parts(x, kernel):
    """Sends whole parts, half of them each way: on four devices two right and one left."""
    n, d = jax.lax.axis_size("tensor"), jax.lax.axis_index("tensor")
    total = meshes.vary(jnp.zeros((n, len(x), kernel.shape[1])), "tensor").at[d].set(x @ kernel)
    for by, steps in ((1, n // 2), (-1, (n - 1) // 2)):
        part = x
        for step in range(1, steps + 1):
            part = jax.lax.ppermute(part, "tensor", around(n, by))
            total = total.at[(d - by * step) % n].set(part @ kernel)
    return total.reshape(-1, kernel.shape[1])


def one_ring(in_order=True, backwards=True):
    def product(x, kernel):
        n, products = jax.lax.axis_size("tensor"), []
        for _ in range(n):
            products.append(x @ kernel)
            x = jax.lax.ppermute(x, "tensor", around(n))
        if in_order:
            return collectives.join(products[::-1], 1 - n, "tensor", 0)
        return jnp.concatenate(products[::-1] if backwards else products)

    return product


def gathered_first(x, kernel):
    return jax.lax.all_gather(x, "tensor", tiled=True) @ kernel


def merged(larger=jnp.maximum, shrink=True, safe=True, mean=False, finite_top=False):
    def merge(a, b):
        top = larger(a[0], b[0])
        base = jnp.where(top > -jnp.inf, top, 0) if safe else top
        factors = [jnp.exp(t[0] - base) if shrink else jnp.ones_like(t[0]) for t in (a, b)]
        pairs = list(zip((a, b), factors, strict=True))
        total = sum(block[1] * by for block, by in pairs)
        out = sum(block[2] * by[:, None] for block, by in pairs)
        return base if finite_top else top, total, out / total[:, None] if mean else out

    return merge


def exchanged(back=True):
    def attention(query, key, value, attend):
        def exchange(x, split, join):
            return jax.lax.all_to_all(x, "context", split, join, tiled=True)

        out = attend(*(exchange(x, 2, 1) for x in (query, key, value)))
        return exchange(out, 1, 2) if back else out

    return attention


def alone(query, key, value, attend):
    return attend(query, key, value)


def gathered_keys(query, key, value, attend):
    whole = [jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (query, key, value)]
    begin = jax.lax.axis_index("context") * query.shape[1]
    return jax.lax.dynamic_slice_in_dim(attend(*whole), begin, query.shape[1], 1)


def sent(keys=2, gradients=1, home=0, gradients_home=1, gradient_width=4):
    """Bytes of a ring: how often keys and values go around, how often their gradients, and
    which of them come home.
    """

    def ring_bytes(n, numbers, width):
        there = keys * (n - 1 + home) * width
        back = gradients * (n - 1 + gradients_home) * (gradient_width or width)
        return numbers * (there + back)

    return ring_bytes


def expert(room, up, down, activation=jax.nn.gelu):
    hidden = activation(jnp.einsum("ecd,edf->ecf", room, up))
    return jnp.einsum("ecf,efd->ecd", hidden, down)


def visited(back=True, detach=False, activation=jax.nn.gelu):
    def layer(room, up, down):
        def exchange(x, split, join):
            return jax.lax.all_to_all(x, "expert", split, join, tiled=True)

        mine = exchange(room, 0, 1)
        out = expert(jax.lax.stop_gradient(mine) if detach else mine, up, down, activation)
        return exchange(out, 1, 0) if back else out

    return layer


def own_experts(room, up, down):
    return expert(room, jnp.tile(up, (4, 1, 1)), jnp.tile(down, (4, 1, 1)))


def mixed_axes(room, up, down):
    """Splits the places, not the experts, on the way home."""
    mine = jax.lax.all_to_all(room, "expert", 0, 1, tiled=True)
    out = expert(mine, up, down)  # [2 8 D]: two experts, two places of four devices
    return jax.lax.all_to_all(out.reshape(8, 2, -1), "expert", 0, 0, tiled=True)


def gathered_experts(room, up, down):
    whole = [jax.lax.all_gather(w, "expert", tiled=True) for w in (up, down)]
    return expert(room, *whole)


def sent_twice(room, up, down):
    once = visited()
    return (once(room, up, down) + once(room + 0 * room.sum(), up, down)) / 2


def placed(drops=True, first=0, from_the_end=False):
    def places(experts, E, C):
        order, found = [int(e) for e in experts], []
        for t, expert in enumerate(order):
            others = order[t + 1 :] if from_the_end else order[:t]
            place = others.count(expert)
            found.append(place + first if place < C or not drops else -1)
        return found

    return places


def shared_places(experts, E, C):
    return [place % C for place in placed(drops=False)(experts, E, C)]


def arrivals(step=-1, begin=0, modulo=True, size=None):
    def order(device, n):
        parts = [device + step * (k + begin) for k in range(n)]
        return [part % (size or n) if modulo else part for part in parts]

    return order


RIGHT = [
    (check.gated_mlp, (lambda *args: summed(share(*args)),)),
    (check.padded_vocabulary, (padded,)),
    (check.divided_embedding, (looked_up(),)),
    (check.two_way_product, (halves(),)),
    (check.order_of_arrival, (arrivals(),)),
    (check.merge, (merged(),)),
    (check.ulysses, (exchanged(),)),
    (check.ring_bytes, (sent(),)),
    (check.places, (placed(),)),
    (check.expert_layer, (visited(),)),
    (check.dropped, (4.3, 0)),
    (check.dropped, (4.7, 0)),  # of a normal distribution
    (check.dropped, (5, 0)),
    (check.least_room, (1.12,)),
]
WRONG = [
    (check.gated_mlp, (share,), "different arrays"),
    (check.gated_mlp, (lambda *args: jax.lax.pmean(share(*args), "tensor"),), "A quarter"),
    (check.gated_mlp, (summed_too_early,), "the one that you add up"),
    (check.gated_mlp, (exchanged_kernels,), "exchanged"),
    (check.gated_mlp, (three_thirds,), "bytes are sent"),
    (check.gated_mlp, (lambda *args: summed(share(*args, jax.nn.gelu)),), "through SiLU"),
    (check.padded_vocabulary, (lambda V, n, m: padded(V, n, m) // n,), "one device's part"),
    (check.padded_vocabulary, (lambda V, n, m: -(-V // n) * n,), "6,283"),
    (check.padded_vocabulary, (lambda V, n, m: -(-V // m) * m,), "divide first"),
    (check.padded_vocabulary, (lambda V, n, m: V // (n * m) * n * m,), "have none"),
    (check.padded_vocabulary, (lambda V, n, m: 65_536,), "not the least"),
    (check.padded_vocabulary, (lambda V, n, m: (V // (n * m) + 1) * n * m,), "should stay"),
    (check.divided_embedding, (looked_up(total=False),), "different arrays"),
    (check.divided_embedding, (looked_up(mask=False),), "other tokens"),
    (check.divided_embedding, (looked_up(own=False),), "tokens 0 to 7"),
    (check.divided_embedding, (looked_up(take=True),), "NaN"),
    (check.divided_embedding, (gathered_table,), "bytes are sent"),
    (check.divided_embedding, (lambda *args: looked_up()(*args) / 4,), "take no mean"),
    (check.missing_sum, (10,), "Not all ten"),
    (check.missing_sum, (1,), "in front"),
    (check.missing_sum, (8,), "Fewer"),
    (check.missing_sum, (5,), "Go through the ten"),
    (check.two_way_product, (gathered_first,), "gathered at once"),
    (check.two_way_product, (one_ring(),), "one way around"),
    (check.two_way_product, (one_ring(False),), "wrong order"),
    (check.two_way_product, (halves(False),), "order of arrival. Turn"),
    (check.two_way_product, (twice_as_large,), "Not x @ kernel"),
    (check.two_way_product, (same_rows,), "belong to the other half"),
    (check.two_way_product, (not_turned,), "order of arrival. Turn"),
    (check.two_way_product, (one_ring(False, backwards=False),), "wrong order"),
    (check.two_way_product, (halves(n=4),), "wrong on two"),
    (check.two_way_product, (whole_parts,), "one direction carries more"),
    (check.order_of_arrival, (arrivals(step=1),), "travelled left"),
    (check.order_of_arrival, (arrivals(begin=1),), "own part first"),
    (check.order_of_arrival, (arrivals(modulo=False),), "Modulo"),
    (check.order_of_arrival, (lambda device, n: [device],), "multiplies 8 parts"),
    (check.order_of_arrival, (arrivals(size=8),), "On 3 devices"),
    (check.order_of_arrival, (lambda device, n: list(range(n)),), "begins with its own part"),
    (check.order_of_arrival, (arrivals(step=-3),), "not multiply part 0 in step 1"),
    (check.order_of_arrival, (lambda device, n: device,), "Return a list"),
    (check.order_of_arrival, (lambda device, n: "ring",), "Return a list"),
    (check.hidden_with_latency, (74,), "take time too"),
    (check.hidden_with_latency, (1272,), "whole sequence"),
    (check.hidden_with_latency, (300,), "should be equal"),
    (check.merge, (merged(shrink=False),), "do not add"),
    (check.merge, (merged(jnp.minimum),), "Not finite"),
    (check.merge, (merged(safe=False),), "either block comes out NaN"),
    (check.merge, (merged(mean=True),), "divided by the total"),
    (check.merge, (merged(finite_top=True),), "return the larger top"),
    (check.ulysses, (alone,), "own two positions"),
    (check.ulysses, (gathered_keys,), "are gathered"),
    (check.ulysses, (exchanged(back=False),), "a fourth all-to-all"),
    (check.ulysses, (lambda query, *others: 0 * query,), "Not the attention"),
    (check.work_in_order, (17,), "zigzag"),
    (check.work_in_order, (32,), "first step"),
    (check.work_in_order, (136,), "together"),
    (check.work_in_order, (28,), "first step is missing"),
    (check.work_in_order, (24,), "own keys"),
    (check.work_in_order, (20,), "too few"),
    (check.work_in_order, (40,), "too many"),
    (check.ring_bytes, (sent(keys=1, gradients=0),), "forward pass alone"),
    (check.ring_bytes, (sent(gradients=0),), "travel, too"),
    (check.ring_bytes, (sent(keys=1),), "once more"),
    (check.ring_bytes, (sent(gradient_width=None),), "are float32"),
    (check.ring_bytes, (sent(home=1),), "need not come home"),
    (check.ring_bytes, (sent(gradients_home=0),), "one step away"),
    (check.ring_bytes, (sent(keys=3),), "Compiled for 2 devices"),
    (check.ring_bytes, (lambda n, numbers, width: numbers * (3 * n - 2) * 4,), "2 bytes"),
    (check.expert_layer, (own_experts,), "own two experts only"),
    (check.expert_layer, (visited(back=False),), "Send each output back"),
    (check.expert_layer, (mixed_axes,), "Not the outputs"),
    (check.expert_layer, (visited(activation=jax.nn.relu),), "has `jax.nn.gelu`"),
    (check.expert_layer, (visited(activation=jax.nn.silu),), "has `jax.nn.gelu`"),
    (check.expert_layer, (gathered_experts,), "are gathered"),
    (check.expert_layer, (sent_twice,), "bytes are exchanged"),
    (check.expert_layer, (visited(detach=True),), "its gradient is not"),
    (check.places, (placed(drops=False),), "drops no token"),
    (check.places, (placed(first=1),), "begin at 0"),
    (check.places, (placed(from_the_end=True),), "later ones"),
    (check.places, (lambda experts, E, C: [0],), "need 8 places"),
    (check.places, (shared_places,), "holds one token"),
    (check.dropped, (0, 0), "chance"),
    (check.dropped, (0.043, 0), "Percentages"),
    (check.dropped, (50, 0), "too many"),
    (check.dropped, (100 * 7.5 / 64 / 2, 0), "not by a whole one"),
    (check.dropped, (100 * 7.5 / 64, 0), "not by a whole one"),
    (check.dropped, (2.3, 0), "too few"),
    (check.dropped, (4.3, 2), "factor 2"),
    (check.dropped, (4.3, 0.4), "factor 2"),
    (check.least_room, (0.9,), "fewer places"),
    (check.least_room, (1.03,), "are dropped"),
    (check.least_room, (1.14,), "can be smaller"),
]
