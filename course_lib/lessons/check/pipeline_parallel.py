"""Checks of notebook 09's exercises. One of them runs on four devices.

S stages, M microbatches, v chunks per device, a device d.
"""

import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.answers import call, close, exercise, predicted, require
from course_lib.lessons.check.many_devices import (
    compiled,
    normal,
    row_of_devices,
    without_residual,
)
from course_lib.many_devices import meshes
from course_lib.many_devices.pipeline_parallel import schedules, slots

Order = list[tuple[str, int]]  # ("F" or "B", microbatch)

# For `fast_pipeline`.
SEQUENCES = 64
STAGES = 8
OP_OVERHEAD = 0.25  # milliseconds added to each op, however small its microbatch
MOST_LIVE = 24  # sequences whose activations fit on a device
MOST_MILLISECONDS = 240


@exercise
def bubble_share(share, microbatches, split_microbatches):
    """Checks predictions for eight stages: the bubble's share with 1F1B and 24 microbatches,
    and the fewest microbatches for a bubble below 5%, with 1F1B and with zero-bubble.
    """
    predicted(
        share,
        microbatches,
        split_microbatches,
        hint="The table of formulas has the share of each schedule: S - 1 over a sum.",
    )
    right = schedules.bubble(schedules.one_f_one_b(8, 24))
    require(
        abs(share - 7 / 24) > 1e-3,
        "7/24 compares idle with busy time, as Megatron-LM does. The share is of the whole"
        " step.",
    )
    require(share <= 1, "A share is at most 1: 5% is 0.05.")
    require(
        abs(share - right) < 5e-3,
        f"{share:.3g} is not the share of idle cells. How many slots does a device's row have"
        " with 24 microbatches, and how many of them are empty?",
    )
    for name, number in (("1f1b", microbatches), ("zero_bubble", split_microbatches)):
        require(
            number == int(number) >= 1,
            f"{number} microbatches: take a whole number, at least 1.",
        )
        bubble = schedules.bubble(schedules.make(name, 8, int(number)))
        require(
            bubble < 0.05,
            f"{name} with {number} microbatches idles {bubble:.2%} of the time: not below 5%.",
        )
        require(
            schedules.bubble(schedules.make(name, 8, int(number) - 1)) >= 0.05,
            f"{name}: fewer than {number} are enough. How many idle slots does its row have,"
            " and how many busy ones?",
        )
    return f"{right:.0%}; counted in the tables, 134 and 45 microbatches are the fewest."


@exercise
def one_f_one_b(your_order):
    """Checks `your_order(device, S, M)`, the ops of a device in 1F1B, in the order in which it
    runs them: a list like `["F0", "F1", "B0", "B1"]`.

    The orders of all devices are put into one table, each op as early as its inputs allow, with
    one slot for a forward and two for a backward. Legality, live microbatches and slots are
    compared with those of `schedules.one_f_one_b`.
    """
    for S, M in ((4, 8), (3, 5), (4, 2)):
        orders = [_order(your_order, device, S, M) for device in range(S)]
        where = f"S = {S}, M = {M}: "
        time = _slots(orders)
        require(
            time is not None,
            f"{where}the devices wait for each other forever. A backward needs its own"
            " forward, and the backward of the same microbatch on the next device.",
        )
        planned = schedules.one_f_one_b(S, M)
        for device, (order, fewest) in enumerate(
            zip(orders, schedules.peak_live(planned), strict=True)
        ):
            live = _most_live(order)
            require(
                live <= fewest,
                f"{where}device {device} has {live} live microbatches at once; 1F1B has"
                f" {fewest}. Run backward 0 as soon as its gradient can arrive.",
            )
        fewest = len(planned.table[0])
        require(
            time <= fewest,
            f"{where}the step lasts {time} slots; 1F1B lasts {fewest}. Some device waits for an"
            " activation: its neighbour runs too few forwards before its first backward.",
        )
    return "legal, with at most S - d live microbatches on device d, in 3 (M + S - 1) slots."


def _order(your_order, device: int, S: int, M: int) -> Order:
    """Calls the learner's function and reads its list."""
    hint = "Begin with the forwards that device d runs before its first backward."
    words = call(your_order, device, S, M, hint=hint)
    spelled = isinstance(words, list | tuple) and all(
        isinstance(word, str) and re.fullmatch(r"[FB]\d+", word) for word in words
    )
    require(spelled, f'Return a list like ["F0", "F1", "B0", "B1"], not {words!r}.')
    order = [(word[0], int(word[1:])) for word in words]
    for kind in "FB":
        numbers = [m for k, m in order if k == kind]
        require(
            sorted(numbers) == list(range(M)),
            f"S = {S}, M = {M}: device {device} runs {kind} of the microbatches {numbers}. Each"
            f" of 0 to {M - 1} comes once.",
        )
    return order


def _slots(orders: list[Order]) -> int | None:
    """Returns the slots of a step in which each device works in its order, each op as early as
    its inputs allow. None if the devices wait for each other forever.
    """
    ends: dict[tuple[str, int, int], int] = {}  # when an op of a microbatch in a stage ends
    clock, done = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for d, order in enumerate(orders):
            while done[d] < len(order):
                kind, m = order[done[d]]
                needs = [("F", m, d)] if kind == "B" else []
                neighbour = d - 1 if kind == "F" else d + 1
                if 0 <= neighbour < len(orders):
                    needs.append((kind, m, neighbour))
                if any(need not in ends for need in needs):
                    break
                start = max([clock[d], *(ends[need] for need in needs)])
                clock[d] = ends[kind, m, d] = start + {"F": 1, "B": 2}[kind]
                done[d] += 1
                moved = True
    finished = all(done[d] == len(order) for d, order in enumerate(orders))
    return max(clock) if finished else None


def _most_live(order: Order) -> int:
    live = most = 0
    for kind, _ in order:
        live += 1 if kind == "F" else -1
        most = max(most, live)
    return most


@exercise
def gpipe(your_loss):
    """Checks `your_loss(kernel, x, y)`, one device's part of GPipe, run inside `jax.shard_map`
    over the axis "pipe".

    Four devices have one layer each: kernel is [1 8 8], and a layer maps h to
    `h + tanh(h @ kernel[0])`. x and y are [6 2 8] on all devices: six microbatches. The loss is
    the sum of `(h - y) ** 2` after the last layer. The check
    compares loss, gradient and the bytes passed on.
    """
    S, M = 4, 6
    mesh = row_of_devices("pipe", S)
    kernels, x, y = normal(3, (S, 8, 8), (M, 2, 8), (M, 2, 8))
    kernels = 0.3 * kernels
    hint = "Scan over M + S - 1 slots of time; `jax.lax.ppermute` passes the activation on."

    def one_device(kernels, x, y):
        for kernel in kernels:
            x = x + jnp.tanh(x @ kernel)
        return jnp.sum((x - y) ** 2)

    def on_each(kernel, x, y):
        loss = call(your_loss, kernel, x, y, hint=hint)
        require(
            jnp.shape(loss) == (),
            f"The loss is one number, not an array of shape {jnp.shape(loss)}.",
        )
        return loss

    specs = (P("pipe"), P(), P())
    each = jax.shard_map(
        lambda *args: meshes.vary(on_each(*args), "pipe").reshape(1),
        mesh=mesh,
        in_specs=specs,
        out_specs=P("pipe"),
    )
    with jax.default_matmul_precision("highest"):
        right, expected = jax.value_and_grad(one_device)(kernels, x, y)
        mistakes = (  # the loss that each makes, and what to say of it
            *(
                (
                    one_device(kernels, x, jnp.roll(y, shift, axis=0)),
                    "Each microbatch is compared with the y of another one. In which slot does"
                    " the last stage finish microbatch 0?",
                )
                for shift in range(1, M)
            ),
            (
                jnp.sum((without_residual(kernels, x) - y) ** 2),
                "A layer adds tanh(h W) to its input. Yours returns tanh(h W) alone.",
            ),
            (
                one_device(kernels[-1:], jnp.zeros_like(x), y),
                "The last stage computes with zeros: no activation reaches it. Which device"
                " sends to which, and where does a microbatch of x enter?",
            ),
            (
                one_device(kernels, jnp.broadcast_to(x[:1], x.shape), y),
                "Every y is compared with the result of microbatch 0. Which microbatch enters"
                " the first stage in slot t?",
            ),
            (
                one_device(kernels, x, y[jnp.minimum(jnp.arange(M) + S - 1, M - 1)]),
                "In slot t the result is compared with y[t]. But the microbatch that the last"
                " stage finishes then entered S - 1 slots earlier.",
            ),
            (
                one_device(kernels, x[1:], y[1:]),
                "Microbatch 0 is not in the loss. In which slot does the last stage finish it?",
            ),
            *(
                (
                    one_device(kernels, x[:count], y[:count]),
                    f"Only {count} of the {M} microbatches are in the loss. Do the others reach"
                    " the last stage, and does it add them? The last one ends in slot"
                    " M + S - 2.",
                )
                for count in range(1, M)
            ),
        )
    losses, _ = compiled(each, mesh, kernels, x, y)
    same = abs(losses - right) < 1e-4 * right
    require(
        not same[-1] or same.all(),
        "The last device has the loss, the others have not. Sum it over the devices: the others"
        " add 0.",
    )
    require(
        abs(S * losses[0] - right) > 1e-4 * right,
        "A quarter of the loss: the devices' terms are parts of a sum, not of a mean.",
    )
    for count in (M, x[0].size, x.size, *x[0].shape):
        require(
            abs(count * losses[0] - right) > 1e-4 * right,
            f"This is the right loss divided by {count}. It is a sum over microbatches, rows"
            " and features, not a mean.",
        )
    for mistaken, reason in mistakes:
        require(abs(losses[0] - mistaken) > 1e-4 * mistaken, reason)
    require(
        losses[0] < right * (1 + 1e-4),
        f"The loss is {losses[0]:.2f}, without a pipeline {right:.2f}. Is too much added? Only"
        " the last stage finishes a microbatch, the first one in slot S - 1. And which"
        " microbatch enters in slot t?",
    )
    require(
        same.all(),
        f"The loss is {losses[0]:.2f}, without a pipeline {right:.2f}. Which"
        " microbatch does each stage work on in slot t, and which device adds to the loss?",
    )
    loss = jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=P())
    grads, ledger = compiled(jax.value_and_grad(loss), mesh, kernels, x, y)
    require(
        close(grads[1], expected),
        "The loss is right, the gradient is not. Does it flow back through each `ppermute`?",
    )
    require(
        ledger.payload("all-gather") == 0,
        "Right numbers, but arrays are gathered. In a pipeline, kernels stay where they are,"
        " and each activation is passed to the next device only.",
    )
    activation = x[0].nbytes
    sent, enough = ledger.payload("collective-permute", "pipe") // activation, 2 * (M + S - 1)
    require(
        sent <= enough,
        f"Right numbers, but {sent} arrays are passed on; {enough} are enough: in each slot one"
        " activation, and one gradient back.",
    )
    require(
        sent > 0 and ledger.payload() <= enough * activation + 64,  # and the sum of the loss
        f"Right numbers, but {ledger.payload():,} bytes are communicated;"
        f" {enough * activation:,} are enough, if each device sends to the next one only.",
    )
    return f"the gradient is that of one device, and {sent} arrays are passed on."


@exercise
def stash(gpipe, one_f_one_b):
    """Checks the MiB of the stash, which forwards save for backwards, on the first of eight
    devices. 32 layers rematerialize; there are 32 microbatches of 4 sequences, each of 1,024
    tokens of 2,560 bfloat16 numbers.
    """
    predicted(
        gpipe,
        one_f_one_b,
        hint="One activation has 4 x 1024 x 2560 x 2 bytes. How many MiB are that?",
    )
    activation = 4 * 1024 * 2560 * 2 / 2**20
    live = {
        name: slots.program(schedules.make(name, 8, 32)).sizes["stash"]
        for name in ("gpipe", "1f1b")
    }
    right = {name: count * (32 // 8 + 1) * activation for name, count in live.items()}
    per_microbatch = gpipe / (32 * activation)
    require(
        per_microbatch not in (1, 4),
        f"GPipe: you count {per_microbatch:g} activations for each of the 32 live microbatches."
        " What does the stash keep for each layer, and what once for the stage?",
    )
    require(
        gpipe != right["gpipe"] * 2**20,
        "These are the bytes. How many MiB are they?",
    )
    require(
        gpipe != 32 * 33 * activation,
        "This is the whole model's. A device has 32 / 8 layers.",
    )
    require(
        gpipe == right["gpipe"],
        f"GPipe: not {gpipe:,} MiB. All microbatches are live before the first backward.",
    )
    require(
        one_f_one_b != gpipe,
        "1F1B has its first backward long before the last forward. How many forwards does the"
        " first device run before it?",
    )
    require(
        one_f_one_b == right["1f1b"],
        f"1F1B: not {one_f_one_b:,} MiB. A live microbatch keeps as much as with GPipe. How"
        " many are live on the first device when its first backward begins?",
    )
    return f"the stash holds {live['gpipe']} and {live['1f1b']} microbatches."


@exercise
def shared_slots(wrong_of_4, wrong_of_8, enough):
    """Checks predictions about 1F1B on four devices whose stash slot is `microbatch % 3`: with
    M = 4 and with M = 8, how many microbatches have a wrong gradient on device 0; and the least
    n for which `microbatch % n` is right.
    """
    predicted(
        wrong_of_4,
        wrong_of_8,
        enough,
        hint="Which forward writes into slot 0 before the backward of microbatch 0?",
    )
    require(
        wrong_of_4 != 0,
        "Device 0 runs four forwards before its first backward, and has 3 slots.",
    )
    require(
        wrong_of_4 == _overwritten(4, 3),
        f"Not {wrong_of_4} of 4. An input is lost if a later forward takes its slot before its"
        " backward. Go through the order of device 0.",
    )
    require(
        wrong_of_8 != 8,
        "Not all 8: an input is safe if no later forward takes its slot.",
    )
    require(
        wrong_of_8 == _overwritten(8, 3),
        f"Not {wrong_of_8} of 8. Forward m + 3 takes the slot of microbatch m. Does it come"
        " before backward m, and for which m does it exist?",
    )
    require(
        enough <= 4 or _overwritten(8, int(enough)),
        f"{enough} slots are enough, but not the fewest. How many microbatches are live?",
    )
    require(
        enough >= 1 and _overwritten(8, int(enough)) == 0,
        f"With {enough} slots a live microbatch still loses its input.",
    )
    return "1 of 4 and 5 of 8; four slots, as many as are live at once."


def _overwritten(M: int, slots: int) -> int:
    """Returns how many backwards of device 0 of 1F1B find another microbatch in their slot."""
    stash: dict[int, int] = {}
    wrong = 0
    for op in schedules.order_1f1b(M, ahead=4, backward="BW"):
        if op.kind == "F":
            stash[op.microbatch % slots] = op.microbatch
        else:
            wrong += stash[op.microbatch % slots] != op.microbatch
    return wrong


@exercise
def fast_pipeline(schedule, microbatches, chunks):
    """Checks a choice of schedule, microbatches and chunks for 64 sequences on eight stages: a
    step of at most 240 ms, and at most 24 sequences' activations on a device.

    An op of a full stage takes 1 ms for each sequence of the microbatch. Every op takes 0.25 ms
    more, however small it is. `slots.lockstep` gives the time: neighbours wait for each other.
    """
    predicted(microbatches, chunks, hint="Compute the time of 1F1B with 32 microbatches first.")
    require(
        schedule in schedules.SCHEDULES,
        f"`schedule` is one of {', '.join(schedules.SCHEDULES)}, not {schedule!r}.",
    )
    require(
        microbatches >= 1 and SEQUENCES % microbatches == 0,
        f"{microbatches} microbatches do not divide {SEQUENCES} sequences.",
    )
    require(chunks == int(chunks) >= 1, f"{chunks} chunks: take a whole number, at least 1.")
    try:
        planned = schedules.make(schedule, STAGES, int(microbatches), int(chunks))
    except ValueError as error:
        require(False, f"This schedule does not exist: {error}.")
    of_a_chunk = SEQUENCES / microbatches / chunks
    live = max(schedules.peak_live(planned)) * of_a_chunk
    milliseconds = slots.lockstep(planned, dict.fromkeys("FBW", of_a_chunk + OP_OVERHEAD))
    name = f"{schedule} with M = {microbatches} and v = {chunks}"
    require(
        live <= MOST_LIVE,
        f"{name}: {milliseconds:.0f} ms, but a device keeps the activations of {live:g}"
        f" sequences; {MOST_LIVE} fit.",
    )
    ops = 3 * microbatches * chunks
    require(
        milliseconds <= MOST_MILLISECONDS,
        f"{name}: {milliseconds:.0f} ms. {ops * of_a_chunk:.0f} of them are work,"
        f" {ops * OP_OVERHEAD:.0f} the fixed part of {ops} ops, and"
        f" {milliseconds - ops * (of_a_chunk + OP_OVERHEAD):.0f} the bubble.",
    )
    return f"{name}: {milliseconds:.0f} ms, with {live:g} sequences live."
