"""The ladder of notebook 19: configurations of a step of 155.9 million parameters, compiled for
an A5000, from the first writing to the smallest step and to the fastest.

    make ladder    # minutes: compiles and records every rung

Each rung but the first changes one field of the rung that it stands on: the difference of their
rows is the effect of this field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from course_lib import configs, measure, training
from course_lib.lessons.study import Study
from course_lib.measure import hardware, recorded, virtual
from course_lib.smaller_and_faster import flash_attention

ACCELERATOR = "a5000"


@dataclass(frozen=True)
class Rung:
    """A configuration, as a change of another one."""

    name: str
    changes: Mapping[str, Any] = field(hash=False)  # fields of the configuration
    on: str = ""  # the rung that it stands on; "" for the preset `155m`


# Each rung stands on one above it.
RUNGS = (
    Rung("first writing", {"model.dtype": "float32", "model.remat": ()}),
    Rung("bfloat16", {"model.dtype": "bfloat16"}, "first writing"),
    Rung("rematerialized blocks", {"model.remat": ("Block",)}, "bfloat16"),
    Rung("flash attention", {"model.attention": "flash"}, "rematerialized blocks"),
    Rung("no dropout", {"model.dropout_rate": 0.0}, "flash attention"),
    Rung("16 minibatches", {"training.num_minibatches": 16}, "no dropout"),
    Rung("16 minibatches, unrolled", {"model.scan_layers": False}, "16 minibatches"),
    Rung("gradients in place", {"training.backward": "in_place"}, "16 minibatches"),
    Rung("64 minibatches", {"training.num_minibatches": 64}, "gradients in place"),
    Rung("moments on the host", {"optimizer.offload": True}, "64 minibatches"),
    Rung("Adafactor", {"optimizer.name": "adafactor"}, "64 minibatches"),
    Rung("bfloat16 parameters", {"optimizer.param_dtype": "bfloat16"}, "Adafactor"),
    Rung(
        "products once, 16 minibatches",
        {"model.remat_policy": "dots_no_batch"},
        "gradients in place",
    ),
    Rung(
        "products once, 4 minibatches",
        {"training.num_minibatches": 4},
        "products once, 16 minibatches",
    ),
    Rung("flash attention, all kept", {"model.remat": ()}, "flash attention"),
    Rung("unrolled", {"model.scan_layers": False}, "flash attention, all kept"),
)
BY_NAME = {rung.name: rung for rung in RUNGS}


def config_of(name: str) -> ConfigDict:
    """Returns the configuration of a rung, checked."""
    rung = BY_NAME[name]
    config = config_of(rung.on) if rung.on else configs.get("155m")
    config.update_from_flattened_dict(dict(rung.changes))
    configs.check(config)
    return config


def flops_of(config: ConfigDict) -> dict[str, int]:
    """Returns the FLOPs of a step by dtype of the operands, recomputed ones included.

    Attention that is written out computes masked scores too, and some of its products in
    float32. Flash attention computes all in the model's dtype, and leaves out the tiles of
    scores that are masked entirely. Its kernels have 2 products in the forward pass and 7 in
    the backward pass (notebook 16). No policy here saves the result of a kernel, so
    rematerialization runs the forward kernel again: 2 more.
    """
    by_dtype = dict(training.step_flops(config).total)
    if config.model.attention != "flash":
        return by_dtype
    total = sum(by_dtype.values())
    model, tokens = config.model, config.data.batch_size * config.data.seq_len
    length, tile = config.data.seq_len, flash_attention.tile_for(model.head_dim, model.dtype)
    tiling = flash_attention.Tiling(tile, model.head_dim**-0.5, model.causal_mask)
    scores = len(tiling.pairs(length)[0]) * tile**2
    per_score = 2 * (tokens // length) * model.hidden_size * model.num_layers
    again = 2 if model.remat else 0
    total -= (2 + 4 + again) * per_score * length**2
    total += (2 + 7 + again) * per_score * scores
    return {config.model.dtype: total}


def compile_rung(name: str) -> dict[str, Any]:
    """Compiles a rung for a virtual A5000, and returns a row: "bytes" at the peak,
    "bytes_each_way" that cross the link to the host (PCIe 4.0), "flops", "traffic_bytes", and
    "seconds", attainable.
    """
    config, accelerator = config_of(name), hardware.get(ACCELERATOR)
    run = training.build(config)
    step: Any = run.train_step
    heap = measure.heap(
        step.lower(*virtual.abstract(run.abstract(), virtual.devices(ACCELERATOR)[0]))
    )
    traffic, flops = measure.traffic(heap.compiled), flops_of(config)
    return {
        "case": name,
        "bytes": heap.peak,
        "bytes_each_way": measure.host_traffic(heap.compiled).to_host,
        "flops": sum(flops.values()),
        "traffic_bytes": traffic.bytes,
        "seconds": measure.attainable_seconds(
            measure.Flops(flops, {}), traffic, accelerator, hardware.host_link("pcie4")
        ),
    }


STUDY = Study("smallest_step_a5000", tuple(BY_NAME), compile_rung, ACCELERATOR)


def table(live: Sequence[str] = ()) -> recorded.Table:
    """Returns the rows of all rungs: those in `live` compiled anew where possible, the others
    recorded.
    """
    return STUDY.table(live)
