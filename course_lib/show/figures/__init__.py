"""Every picture of the course: one function per picture, plain data in, a matplotlib `Figure`
out. A picture's module is imported when the picture is first asked for.
"""

import importlib
from typing import Any

from course_lib import extras

# The names of this package by the module that has them: a new picture is one name here.
PICTURES = {
    "bars": "memory_bars memory_breakdown residuals roofline rungs",
    "blocks": "block",
    "clusters": "hosts",
    "curves": "lines loss_curve progress roofline_plot trace tradeoff",
    "devices": "who_holds_what",
    "explorers": "explorer",
    "frames": "moving",
    "numbers": "formats gradient_histogram",
    "positions": "attention_pairs dependencies memory_levels token_routing",
    "style": "PHASES use_style",
    "tapes": "tape",
    "timelines": "Lane lanes lanes_of_layers lanes_of_schedule lanes_of_step overlap schedule"
    " step_timeline",
}
_MODULES = {name: module for module, names in PICTURES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras.needed("pictures"):
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
