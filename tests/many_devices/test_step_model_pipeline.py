"""Laws of the predicted time of a training step with a pipeline."""

import dataclasses

import pytest

from course_lib.many_devices import cluster_model, step_model
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.pipeline_parallel import schedules
from course_lib.many_devices.plans import Plan, Shape
from course_lib.measure import hardware

H100 = hardware.get("h100")
RATE, MEMORY = cluster_model.PRODUCTS_SHARE * 989e12, 0.85 * 3.35e12
# The output layer takes as long as six layers, so that the last stage is much slower.
N, D, L, V = 16, 4096, 4096, 128_000
UNEVEN = Shape(N, D, heads=32, head_dim=128, mlp=4 * D, vocab=V, seq_len=L)
# The mesh is {"pipe": p, "data": 2, "tensor": t} on hosts of eight GPUs: bytes/s from a GPU to
# the next stage's and seconds until the first byte arrives there; bytes/s between the two along
# "data" and seconds until a collective has begun.
LINKS = {  # (p, t)
    (2, 8): ((45e9, 20e-6), (45e9, 40e-6)),  # a host for each of the four
    (4, 8): ((45e9, 20e-6), (45e9, 40e-6)),
    (2, 2): ((360e9, 10e-6), (360e9, 20e-6)),  # all on one host
    (4, 2): ((45e9, 20e-6), (360e9, 20e-6)),  # two stages on each of two hosts
}


def step(p, t, m, shape=UNEVEN, accelerator=H100, data=2, **plan):
    axes = {"pipe": p, "data": data, "tensor": t}
    plan = Plan(axes, batch=data * m, zero=1, **plan)
    return step_model.breakdown(shape, plan, Cluster(accelerator, p * data * t))


# By hand: the formulas for pipelines, written down a second time. Widths are multiples of D.


def parts_by_hand(t, sequence_parallel):
    """Returns seconds of UNEVEN for a microbatch of one sequence: a layer forward; what its
    backward pass has that is not twice that; its traffic; the output layer; that of [L, D].
    """
    weights = 12 * D * D / t
    flops = 24 * L * D * D / t + 4 * L * L * D / t
    moved = L * D * (8 + 60 / t + 22 / (t if sequence_parallel else 1)) + 2 * weights
    layer = flops / RATE + moved / MEMORY
    more = 2 * L * L * D / t / RATE + 8 * weights / MEMORY
    gather = 2 * L * D * (t - 1) / t / 360e9 + 20e-6
    head = 6 * L * D * V / t / RATE + (22 * L * V + 6 * D * V) / t / MEMORY + 4 * gather
    return layer, more, 4 * gather, head  # two all-reduces are four gathers


def along_data_by_hand(p, t, forward, backward, tables=1):
    """Returns seconds along "data" and of the optimizer, beside so many seconds of computing; a
    stage has one of the two tables, or both.
    """
    parameters = (N // p * 12 * D * D + tables * V * D) / t
    bandwidth, latency = LINKS[p, t][1]
    sent = 2 * parameters / 2 / bandwidth + latency
    hidden = [min(7 / 8 * sent, room) for room in (forward, backward)]
    return 2 * sent - 0.75 * sum(hidden) + parameters * (28 / 2 + 4) / MEMORY


@pytest.mark.parametrize("p, t", LINKS, ids=str)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatron_s_pipeline_takes_the_time_of_the_formulas_by_hand(
    p, t, chunks, sequence_parallel
):
    m = 8
    layer, more, traffic, head = parts_by_hand(t, sequence_parallel)
    forward, backward = (N / p * x for x in (layer + traffic, 2 * layer + more + traffic))
    bandwidth, latency = LINKS[p, t][0]
    # of the residual stream a device sends its own part, there and back, for each chunk
    one = 2 * chunks * (2 * L * D / t / bandwidth + latency)
    # All wait for the last stage, which has the output layer; a pipeline is filled and emptied
    # at the pace of a mean stage.
    seconds = m * (forward + backward + head + one)
    seconds += (p - 1) / chunks * (forward + backward + head / p + one)
    waits = N / p * traffic
    # Each chunk's gradients travel beside the p (chunks - 1) passes of a chunk after its own.
    passes = (1 + p * (chunks - 1)) / chunks
    seconds += along_data_by_hand(p, t, passes * (forward - waits), passes * (backward - waits))
    found = step(p, t, m, chunks=chunks, sequence_parallel=sequence_parallel)
    assert found.total == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("t", [2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_this_course_s_pipeline_of_two_stages_takes_the_time_of_the_formulas_by_hand(
    name, t, sequence_parallel
):
    m = 4
    layer, more, traffic, head = parts_by_hand(t, sequence_parallel)
    core = 4 * L * L * D / t / RATE + 8 * L * D / t / MEMORY  # attention's
    # W has the products with weights, and adds up their gradients; B all other work.
    F = N / 2 * (layer + traffic)
    W = N / 2 * (layer - core + 8 * 12 * D * D / t / MEMORY)
    backward = N / 2 * (2 * layer + more + traffic)
    B, last = backward - W, backward - W + head  # the last stage's B has the output layer
    seconds = by_columns(schedules.make(name, 2, m), F, B, W, last)
    (bandwidth, latency), _ = LINKS[2, t]
    # 3 (m + p - 1) columns; after each, activations go on and gradients go back
    part = t if sequence_parallel else 1
    seconds += 3 * (m + 1) * 2 * (2 * L * D / part / bandwidth + latency)
    waits = N / 2 * traffic
    seconds += along_data_by_hand(2, t, F - waits, backward - waits, tables=2)
    # The two stages sum the gradients of both tables, inside of a host, or across two.
    begins = {2: 20e-6, 8: 40e-6}[t]
    seconds += 2 * (2 * 2 * V * D / t / 2 / bandwidth + begins)
    planned = schedules.make(name, 2, m)
    found = step(2, t, m, schedule=planned, sequence_parallel=sequence_parallel)
    assert found.total == pytest.approx(seconds, rel=1e-9)


def by_columns(planned, F, B, W, last):
    """Returns the time of two stages that wait for each other after each column: BW is B in its
    first column, and W in its second.
    """
    first, second = (
        [{None: 0, "F": F, "-": b, "B": b, "BW": W, "W": W}[op and op.kind] for op in row]
        for row, b in zip(planned.table, (B, last), strict=True)
    )
    return sum(map(max, zip(first, second, strict=True)))


def test_a_backward_in_two_pieces_computes_nothing_twice():
    # Products alone: memory is so fast that it takes no time.
    fast = dataclasses.replace(H100, memory_bandwidth=1e24)
    scores = N / 2 * 4 * L * L * D / RATE
    F = N / 2 * 24 * L * D * D / RATE + scores
    head = 6 * L * D * V / RATE
    # FlashAttention computes the scores again: 5 products in B for 2 in F.
    B, W = F + 1.5 * scores, F - scores
    # Two stages and microbatches, column by column: the first stage beside the last.
    table = [(F, 0), (F, F), (0, B + head), (B, F), (W, B + head), (B, W), (W, W)]
    planned = schedules.make("zero_bubble", 2, 2)
    found = step(2, 1, 2, accelerator=fast, data=1, schedule=planned)
    waited = sum(found.parts[part] for part in ("products", "bubble"))
    assert waited == pytest.approx(sum(max(column) for column in table), rel=1e-6)


def test_a_stage_in_chunks_goes_through_the_table_in_steps_of_a_chunk():
    # without an output layer, of which a chunk has all or nothing
    even, fast = (
        dataclasses.replace(UNEVEN, vocab=1),
        dataclasses.replace(H100, memory_bandwidth=1e24),
    )
    scores = N / 4 * 4 * L * L * D / RATE
    F = N / 4 * 24 * L * D * D / RATE + scores
    B, W = F + 1.5 * scores, F - scores
    # Two stages of two chunks, two microbatches: the first stage beside the last.
    table = [(F, 0), (F, F), (F, F), (F, F), (0, B), (0, W), (B, F), (W, B), (0, W)]
    table += [(B, B), (W, W), (B, B), (W, W), (B, 0), (W, 0)]
    planned = schedules.make("depth_first", 2, 2, 2)
    found = step(2, 1, 2, even, fast, data=1, chunks=2, schedule=planned)
    waited = sum(found.parts[part] for part in ("products", "bubble"))
    assert waited == pytest.approx(sum(max(column) for column in table), rel=1e-4)
    # 15 columns inside of a host
    tables = 2 * (2 * 2 * D / 2 / 360e9 + 20e-6)  # of a vocabulary of one
    assert found.parts["pipe"] == pytest.approx(15 * 2 * (2 * L * D / 360e9 + 10e-6) + tables)


def test_interleaved_stages_hide_what_they_send_between_warm_up_and_flush():
    """32 chunks of microbatches; 3 + 4 are the mean warm-up of four stages."""
    plain, hiding = (
        step(4, 8, 16, chunks=2, sequence_parallel=True, pipe_overlap=overlap)
        for overlap in (False, True)
    )
    sent = plain.parts["pipe"]
    steady = sent * (32 - 7) / 32
    assert hiding.hidden["pipe"] == pytest.approx(0.75 * steady)
    assert hiding.parts["pipe"] == pytest.approx(sent - 0.75 * steady)
    assert plain.hidden["pipe"] == 0
    assert plain.total - hiding.total == pytest.approx(0.75 * steady)


@pytest.mark.parametrize("p, v", [(2, 1), (4, 1), (2, 2), (4, 3), (12, 8)])
def test_a_chunk_s_gradients_may_travel_beside_all_passes_from_its_last_one_on(p, v):
    # Backward, each group of p microbatches passes all chunks, the last chunk first.
    order = [
        (chunk, group) for group in range(3) for chunk in reversed(range(v)) for _ in range(p)
    ]
    last = max(i for i, one in enumerate(order) if one == (v - 1, 2))
    passes = (len(order) - last) / v  # of a chunk, in those of a stage
    plan = Plan({"pipe": p}, 3 * p, chunks=v)
    assert step_model._passes_beside_data(plan) == pytest.approx(passes)


def test_a_pipeline_in_chunks_hides_more_of_its_gradients():
    """Over a slow network, all of the computing beside gradients and parameters hides some."""
    slow = dict(accelerator=dataclasses.replace(H100, network_bandwidth=1e9))
    one, chunked = (step(4, 8, 16, chunks=v, data=16, **slow) for v in (1, 4))
    assert chunked.hidden["data"] == pytest.approx((1 + 3 * 4) / 4 * one.hidden["data"])


def test_a_pipeline_that_fills_and_empties_hides_little_of_what_it_sends():
    few, hiding = (step(4, 8, 4, chunks=4, pipe_overlap=overlap) for overlap in (False, True))
    hidden = few.parts["pipe"] * 0.75 / 16  # of 16 chunks all but a mean warm-up of 3 + 12
    assert hiding.hidden["pipe"] == pytest.approx(hidden)
    assert few.parts["pipe"] - hiding.parts["pipe"] == pytest.approx(hidden)


@pytest.mark.parametrize(
    "plan", [{"chunks": 1}, {"chunks": 2, "schedule": schedules.make("depth_first", 2, 2, 2)}]
)
def test_only_interleaved_stages_of_megatron_can_hide_what_they_send(plan):
    with pytest.raises(
        ValueError, match="pipe_overlap=True must come with chunks of at least 2"
    ):
        step(2, 1, 2, data=1, pipe_overlap=True, **plan)
