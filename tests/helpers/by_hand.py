"""The seconds of a training step by hand: the formulas of `planner.price` and
`cluster_model` written out once more, in plain numbers, for H100s on hosts of eight.

Nothing here comes from `course_lib`, so a slip there shows. Letters as in the notebooks: N
layers of width D, H heads of width K, G heads of keys (0: H), an MLP of width F, V words, L
tokens per sequence.
"""

import math

MATMULS, MEMORY = 0.76 * 989e12, 0.85 * 3.35e12  # FLOP/s, bytes/s
NVLINK, PORT = 0.8 * 450e9, 50e9  # bytes/s


def group(size, stride):
    """Returns a group of GPUs whose numbers are `stride` apart: its size, its GPUs per host,
    bytes/s inside of a host and through a port, and the latency.
    """
    per_host = min(size, max(1, 8 // stride))
    hosts = size // per_host
    latency = 20e-6 * (per_host > 1)
    port = PORT
    if hosts > 1:
        latency += 40e-6 * math.ceil(math.log2(hosts))
        port *= min(0.9, max(0.4, 0.9 - 0.05 * math.log2(hosts / 4)))
    return size, per_host, NVLINK, port, latency


def all_gather(links, size):
    """Returns the seconds of an all-gather, or of a reduce-scatter."""
    n, per_host, inside, port, latency = links
    if n == 1:
        return 0.0
    across = size * (n - 1) / n / (per_host * port) if n > per_host else 0.0
    return max(size * (per_host - 1) / per_host / inside, across) + latency


def shift(links, size):
    """Returns the seconds in which each GPU sends an array to the next one."""
    n, per_host, *_ = links
    if n == 1:
        return 0.0
    return size / (0.9 * PORT) + 20e-6 if n > per_host else size / NVLINK + 10e-6


def exposed(traffic, computing):
    """Returns the part of the traffic that costs time beside computing."""
    return traffic - 0.75 * min(traffic, computing)


def table_1f1b(stages, microbatches):
    """Returns the table of 1F1B, a row per stage. A backward pass takes two slots, B and W, and
    the stage before may begin its own when both are done.
    """
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        order, forward = [("F", m) for m in range(ahead)], ahead
        for m in range(microbatches):
            order += [("B", m), ("W", m)]
            if forward < microbatches:
                order.append(("F", forward))
                forward += 1
        orders.append(order)
    done, rows = {}, [[] for _ in orders]
    while any(orders):
        now = []
        for stage, order in enumerate(orders):
            op = None
            if order:
                kind, m = order[0]
                needed = {
                    "F": [("F", m, stage - 1)] * (stage > 0),
                    "B": [("F", m, stage), *[("W", m, stage + 1)] * (stage < stages - 1)],
                    "W": [("B", m, stage)],
                }[kind]
                if all(key in done for key in needed):
                    op = order.pop(0)
                    now.append((*op, stage))
            rows[stage].append(op)
        done.update(dict.fromkeys(now))
    return rows


def lockstep(rows, usual, of_last):
    """Returns the seconds of a table whose neighbours wait for each other in every column."""
    stages = len(rows)
    ready = [0.0] * stages
    for column in zip(*rows, strict=True):
        ends = [
            start + (op is not None and (of_last if d == stages - 1 else usual)[op[0]])
            for d, (start, op) in enumerate(zip(ready, column, strict=True))
        ]
        ready = [max(ends[d - 1], ends[d], ends[(d + 1) % stages]) for d in range(stages)]
    return max(ready)


def seconds(model, axes, zero, parts, fused=False):
    """Returns the seconds of a step with rematerialized blocks in bfloat16 and Adam, like
    `planner.estimate(...).step`.

    Args:
      model: N, D, H, K, G, F, V, L and the batch, in sequences per step.
      axes: sizes of "data", "pipe" and "tensor", outer to inner.
      zero: stage of ZeRO.
      parts: number of microbatches.
      fused: whether scores stay on the chip.
    """
    N, D, H, K, G, F, V, L, batch = model.values()
    links, stride = {}, 1
    for axis, size in reversed(axes.items()):
        links[axis], stride = group(size, stride), stride * size
    d, p, t = (axes.get(axis, 1) for axis in ("data", "pipe", "tensor"))
    data, pipe, tensor = (links.get(axis, group(1, 1)) for axis in ("data", "pipe", "tensor"))
    tokens = batch // d // parts * L
    queries, keys = H * K, (G or H) * K
    weights = (2 * D * (queries + keys) + 2 * D * F) / t  # of a layer, on one GPU

    # One layer, forward: FLOPs of weights and of scores; bytes of operands, norms, activations.
    of_weights, of_scores = 2 * tokens * weights, 4 * tokens * L * queries / t
    moved = tokens * 2 * (2 * D + 2 * (queries + keys) / t + 2 * (D + F / t))
    moved += tokens * (22 * D / t + (4 * F + 12 * queries) / t) + 2 * weights
    moved += tokens / t * (8 * queries if fused else 13 * L * H)
    summed = 4 * all_gather(tensor, 2 * tokens * D)  # two all-reduces, of two gathers each
    forward = [of_weights + of_scores, moved, summed]
    # Backward: twice, and everything once more, but for the last product, of the MLP, and the
    # reduce-scatter after it, one gather of four. Gradients of weights are summed in float32.
    backward = [3 * part for part in forward[:2]] + [(2 - 1 / 4) * summed]
    backward[0] += (of_scores / 2 if fused else 0) - 2 * tokens * D * F / t
    backward[1] += 8 * weights
    # The embedding's output is summed in float32, the head's gradient in bfloat16.
    outside = 2 * all_gather(tensor, 4 * tokens * D) + 2 * all_gather(tensor, 2 * tokens * D)
    head = [6 * tokens * V / t * D, 22 * tokens * V / t + 6 * V * D / t, outside]

    def computing(cost):
        return cost[0] / MATMULS + cost[1] / MEMORY

    def busy(cost):
        return computing(cost) + cost[2]

    # Only computing hides traffic along "data".
    beside_forward, beside_backward = (computing(cost) * N / p for cost in (forward, backward))

    if zero == 3 and d > 1:  # parameters and gradients travel in bfloat16, layer by layer
        one = all_gather(data, 2 * weights)
        forward[2] += exposed(one, computing(forward))
        backward[2] += exposed(2 * one, computing(backward))
        # The head is gathered once, and its gradient scattered.
        head[2] += exposed(2 * all_gather(data, 2 * V * D / t), computing(head))
    stage_forward, stage_backward = busy(forward) * N / p, busy(backward) * N / p
    mean = stage_forward + stage_backward + busy(head) / p
    total = parts * mean

    # Adam: 24 bytes per parameter, which ZeRO divides, and 8 of the float32 gradient. All
    # parameters of a GPU are sent once per step, in eight buckets.
    own = (N / p * t * weights + V * D * 2) / t
    if zero == 3:
        # The embedding travels in float32, and nothing hides it.
        total += own / d * 32 / MEMORY + parts * 2 * all_gather(data, 4 * V * D / t)
    else:
        total += own * (28 / (d if zero else 1) + 4 / (d if zero == 2 else 1)) / MEMORY
        once = all_gather(data, 4 * own)
        both = ((once, beside_forward), (once, beside_backward))
        for sent, beside in both if zero else ((2 * once, beside_backward),):
            total += exposed(sent, min(beside, sent * 7 / 8))
    if p > 1:
        core = tokens / t * (8 * queries if fused else 13 * L * H)  # not in W
        gradients = (of_weights / MATMULS + (moved - core + 8 * weights) / MEMORY) * N / p
        usual = {"F": stage_forward, "B": stage_backward - gradients, "W": gradients}
        rows = table_1f1b(p, parts)
        total += lockstep(rows, usual, usual | {"B": usual["B"] + busy(head)}) - parts * mean
        total += len(rows[0]) * 2 * shift(pipe, 2 * tokens * D / t)
        # All stages hold the embedding and the output layer, and sum their float32 gradients.
        total += 2 * all_gather(pipe, 4 * 2 * V * D / t)
    return total
