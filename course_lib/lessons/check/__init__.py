"""Checks of the notebooks' exercises: each runs the learner's answer and says what is wrong.

    from course_lib.lessons import check

    check.accumulation(your_accumulate)

A check prints one line and never raises. `check.x` loads only the module that has `x`: a module
has a text file beside it, with the sentences of each of its exercises under its name.
"""

import functools
import importlib
import pathlib
import re
from typing import Any

FOLDER = pathlib.Path(__file__).parent
# Exercises of modules that have no text file yet.
OTHERS = {
    "buffer_donation": "aliased_bytes all_of_the_state best_state",
    "flash_attention": "gradient_kernel largest_tiles query_gradient window_pairs",
    "gradient_accumulation": "accumulation forgotten_division multi_steps_share"
    " smallest_number_of_minibatches",
    "large_vocabulary": "bytes_of_logits one_pass online_logsumexp",
    "mixed_precision": "loss_scale_range scaled_step small_tanh stochastic_round",
    "offload": "streamed_bytes streamed_momentum what_to_offload",
    "optimizer_memory": "lion_8bit lost_updates state_of_a_matrix",
    "profiling": "busy_and_idle mfu named_part on_h100 stack_less stacked",
    "rematerialization": "depth keep_one_value square_root",
    "smallest_step": "add_in_place bytes_of_state update_in_backward",
    "transformer": "attend count_parameters looks_ahead scan_over_layers scores_outgrow_mlp",
}


@functools.cache
def modules() -> dict[str, str]:
    """Returns the module of each exercise."""
    names = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.toml"))}
    names = {stem: re.findall(r"^\[(\w+)\]$", text, re.M) for stem, text in names.items()}
    others = {stem: listed.split() for stem, listed in OTHERS.items()}
    return {one: stem for stem, listed in (others | names).items() for one in listed}


def __getattr__(name: str) -> Any:
    if name not in modules():
        raise AttributeError(f"There is no exercise {name!r}: {', '.join(sorted(modules()))}")
    return getattr(importlib.import_module(f"{__name__}.{modules()[name]}"), name)


def __dir__() -> list[str]:
    return sorted(modules())
