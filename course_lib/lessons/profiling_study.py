"""The programs of notebook 06, and the rows of its tables.

Notebook 06 records one train step, compiles a Transformer of few layers in three variants, and
reads one schedule. It makes these calls itself. This module builds their arguments, and sorts
what they return into rows.
"""

import collections
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import configs, measure, training
from course_lib.measure import origin, program, virtual
from course_lib.measure.hardware import Accelerator
from course_lib.measure.heap import memory_viewer
from course_lib.measure.traffic import kind_of
from course_lib.one_device import profiling
from course_lib.one_device.rematerialization import Residual
from course_lib.show import figures
from course_lib.text import data

# Names of bars and rows, with the kinds of traffic (`measure.traffic`) that they add up.
TRAFFIC = {
    "matrix products": ("matmul",),
    "elementwise, sums": ("elementwise", "reduce"),
    "copies": ("copy", "gather/scatter", "other"),
    "fill": ("fill",),
    "dynamic-update-slice": ("dynamic-update-slice",),
    "dynamic-slice": ("dynamic-slice",),
}
LARGEST = 4  # arrays alive at the peak, per row


def first_batch(config: ConfigDict | FrozenConfigDict) -> data.Batch:
    """Returns the first batch [B, L] that a run of this configuration trains on."""
    [batch] = data.batches(
        data.tokens("train"),
        **config.data,
        vocab_size=config.model.vocab_size,
        seed=config.seed,
        steps=1,
    )
    return batch


def products(compiled: jax.stages.Compiled) -> frozenset[str]:
    """Returns the names of a program's matrix products, alone or fused with other operations.

    A name does not say it: XLA:CPU calls fusions of a softmax `ynn_fusion`, too.
    """
    instructions = program.read(compiled).module.instructions
    return frozenset(name for name, i in instructions.items() if kind_of(i) == "matmul")


def milliseconds_by_phase(
    events: Sequence[profiling.Event],
    phase: Callable[[profiling.Event], str],
    matmuls: frozenset[str],
) -> list[dict[str, Any]]:
    """Adds up the self time of a step's operations (`profiling.Trace.during`). Returns a row
    per phase that occurs: its "products" (those in `matmuls`), "all else" and "together" in ms,
    and its "share".
    """
    ms = {(name, matmul): 0.0 for name in figures.PHASES for matmul in (True, False)}
    for event in events:
        ms[phase(event), event.op in matmuls] += 1e3 * event.self_time
    total = sum(ms.values())
    rows = []
    for name in figures.PHASES:
        of_products, rest = ms[name, True], ms[name, False]
        if together := of_products + rest:
            row = {"phase": name, "products": of_products, "all else": rest}
            rows.append(row | {"together": together, "share": together / total})
    return rows


def shortest_step(trace: profiling.Trace) -> dict[str, float]:
    """Returns the times in ms of a trace's shortest step: "step", "busy" and "idle", its
    "longest gap", and where this gap begins, "at".
    """
    busy = min(trace.busy(), key=lambda step: step.seconds)
    begin, length = busy.gaps[0] if busy.gaps else (0.0, 0.0)
    seconds = {"step": busy.seconds, "busy": busy.busy, "idle": busy.idle}
    seconds |= {"longest gap": length, "at": begin}
    return {name: 1e3 * value for name, value in seconds.items()}


def few_layers(
    changes: Mapping[str, Any], *, layers: int, batch_size: int, seq_len: int, width: int
) -> training.Run:
    """Builds the Transformer of preset `155m`, with changes of its configuration, fewer layers
    of another width D (a multiple of 128: each head has 128), and no dropout. A batch is one
    minibatch.
    """
    config = configs.get("155m")
    config.model.update(num_layers=layers, hidden_size=width, num_heads=width // 128)
    config.model.update(max_seq_len=seq_len, dropout_rate=0.0)
    config.data.update(batch_size=batch_size, seq_len=seq_len)
    config.training.num_minibatches = 1
    config.update_from_flattened_dict(dict(changes))
    return training.build(config)


def of_each_layer(residuals: Sequence[Residual], layers: int) -> list[Residual]:
    """Selects the arrays that a scan over `layers` layers saves for each of them: those that
    begin with this dimension and are no arguments. No other dimension that comes first, such as
    that of the batch, may have this size.
    """
    return [
        array
        for array in residuals
        if array.shape[:1] == (layers,) and not array.why.startswith("argument")
    ]


def in_words(array: Residual, seq_len: int) -> str:
    """Names in the model's words an array of `of_each_layer`: "block / MLP / hidden layer,
    GELU". The length L tells queries [N, B, L, H, K] from scores [N, B, H, L, L]; it must not
    equal the number of heads H.
    """
    module = "attention" if "attn" in array.why else "MLP"
    if re.search(r"/(input_layer|output_layer|qkv)$", array.why):
        part = f"weights, in {array.dtype}"
    elif "pre_norm" in array.why:
        part = "normalization"
    elif module == "MLP":
        part = "hidden layer, GELU"
    else:
        part = "q, k, v, output" if array.shape[2] == seq_len else "softmax"
    return f"block / {module} / {part}"


def costs(
    heap: measure.Heap,
    flops: measure.Flops,
    accelerator: Accelerator,
    phase: Callable[[str], str],
) -> dict[str, Any]:
    """Returns the costs of a step that was compiled for an accelerator: "kinds" and "phases",
    the bytes of traffic by kind and by `phase(scope)`; "peak", the bytes of memory at the peak;
    "timeline" and "tape", the memory over the program; "largest", the largest arrays at the
    peak; "compute_seconds" and "memory_seconds", the floors of the step time.
    """
    traffic = measure.traffic(heap.compiled)
    by_phase: collections.Counter[str] = collections.Counter()
    for move in traffic.moves:
        by_phase[phase(move.scope)] += move.bytes
    floor = measure.roofline(flops, traffic, accelerator)
    return {
        "kinds": traffic.by_kind(),
        "phases": dict(by_phase),
        "peak": measure.memory(heap.compiled).peak,
        "timeline": heap.timeline.tolist(),
        "tape": vars(measure.tape(heap)),
        "largest": [
            {"bytes": a.bytes, "dtype": a.dtype, "shape": list(a.shape), "scope": a.scope}
            for a in heap.arrays[:LARGEST]
        ],
        "compute_seconds": floor.compute_seconds,
        "memory_seconds": floor.memory_seconds,
    }


def moved(kinds: Mapping[str, int]) -> dict[str, int]:
    """Adds up the bytes of traffic by kind (`Traffic.by_kind`) under the names of `TRAFFIC`."""
    return {
        name: sum(kinds.get(kind, 0) for kind in together) for name, together in TRAFFIC.items()
    }


def largest_arrays(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lists the largest arrays at each peak, from rows of `costs` with their "case": a row per
    array has "case", "MiB", "dtype", "shape", and its "origin" in the model's words.
    """
    return [
        {
            "case": row["case"],
            "MiB": array["bytes"] / measure.MIB,
            "dtype": array["dtype"],
            "shape": str(tuple(array["shape"])),
            "origin": origin.words(array["scope"]),
        }
        for row in rows
        for array in row["largest"]
    ]


def viewer_pages(session: pathlib.Path) -> dict[str, Any]:
    """Reads what TensorBoard's pages would show of the folder of a session that holds one
    program (`measure.write_session`): "offered", the names of its pages; "peak", the bytes at
    the peak in the memory viewer; "timed", the number of entries on two pages about time.
    """
    # course_lib.measure, imported above, keeps it from logging to the screen
    from xprof.convert import raw_to_tool_data as xprof

    [record] = session.glob("*.xplane.pb")
    viewer = memory_viewer(record)

    def entries(page: str, key: str) -> int:
        return len(json.loads(xprof.xspace_to_tool_data([str(record)], page, {})[0])[key])

    return {
        "offered": sorted(xprof.xspace_to_tool_names([str(record)])),
        "peak": round(viewer["peakHeapMib"] * measure.MIB),
        "timed": entries("hlo_stats", "rows") + entries("trace_viewer@", "traceEvents"),
    }


def data_parallel(
    loss: Callable[..., Any], *, layers: int, width: int, gpus: int
) -> jax.stages.Lowered:
    """Lowers the gradient of `loss(kernels, x)`, of square bfloat16 kernels and a batch of
    `width` rows, for virtual H100s. Each has all kernels and a part of the rows; gradients are
    summed.
    """
    mesh = jax.make_mesh((gpus,), ("data",), devices=virtual.devices("h100", gpus))
    replicated, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    matrix = jax.ShapeDtypeStruct((width, width), jnp.bfloat16)
    return jax.jit(jax.grad(loss), out_shardings=replicated).lower(
        virtual.abstract([matrix] * layers, replicated), virtual.abstract(matrix, divided)
    )


def order_of(compiled: jax.stages.Compiled, collective: str) -> list[str]:
    """Lists the matrix products ("product") and the collectives of one kind (their opcodes, as
    "all-reduce-start") of a program without loops, in the order in which they run.

    `measure.schedule_around` lists all kernels, of programs that start such a collective.
    """
    entry = program.read(compiled).module.entry
    return [
        i.opcode if i.opcode.startswith(collective) else "product"
        for i in entry.instructions
        if i.opcode.startswith(collective) or kind_of(i) == "matmul"
    ]
