"""A moving picture: stored pictures, and a slider that shows one of them at a time."""

import base64
import html
import io
import json
from collections.abc import Mapping
from string import Template

import PIL.Image
from matplotlib.figure import Figure

COLORS = 64  # of a stored picture: half the bytes, and nothing that a reader would miss

_PAGE = Template("""\
<div class="moving"><p>$name <b>$label</b>, one of $count pictures; \
run this cell, and a slider shows all</p>
<img src="$still" alt="$alt" style="max-width: 100%"></div>
<script>
(() => {
  const frames = $frames, labels = $labels, script = document.currentScript;
  const all = [...(script ? script.parentNode : document).querySelectorAll(".moving")];
  const box = all.filter(each => !each.querySelector("input")).at(-1);
  const slider = Object.assign(document.createElement("input"),
    {type: "range", min: 0, max: frames.length - 1, value: $first, style: "width: 300px"});
  slider.setAttribute("data-lm-suppress-shortcuts", "true");  // JupyterLab: arrow keys move it
  const label = Object.assign(document.createElement("label"), {style: "display: block"});
  const text = document.createElement("b");
  label.append("$name ", slider, " ", text);
  const show = () => {
    box.querySelector("img").src = "data:image/png;base64," + frames[slider.value];
    text.textContent = labels[slider.value];
  };
  slider.addEventListener("input", show);
  box.querySelector("p").replaceWith(label);
  show();
})();
</script>""")


class moving:  # noqa: N801  a notebook calls it like the other pictures
    """Joins pictures into one with a slider.

    The output holds every picture, so the slider needs neither Python nor a network. It starts
    at the still picture. Without scripts, as on GitHub or in a notebook that is not trusted,
    the still picture stands alone, and a line above it says which one of how many it is.

    Args:
      frames: label -> picture, in the order of the slider. Equal axes make changes visible.
      name: of the quantity that the slider changes, such as "minibatches".
      still: the index of the picture that is shown first, or without scripts.
    """

    def __init__(self, frames: Mapping[str, Figure], *, name: str = "", still: int = 0) -> None:
        if len(frames) < 2:
            raise ValueError(f"frames={list(frames)} must hold at least two pictures to move")
        if not 0 <= still < len(frames):
            raise ValueError(f"still={still} must be the index of one of {len(frames)} frames")
        self.frames = [base64.b64encode(png(figure)).decode() for figure in frames.values()]
        self.labels, self.name, self.still = list(frames), name, still

    def __repr__(self) -> str:
        return f"<moving picture of {len(self.frames)} frames: {', '.join(self.labels)}>"

    def _repr_html_(self) -> str:
        """Returns the still picture, and a script that turns the label above into a slider."""
        label = self.labels[self.still]
        return _PAGE.substitute(
            still=f"data:image/png;base64,{self.frames[self.still]}",
            label=html.escape(label),
            count=len(self.frames),
            alt=html.escape(f"{self.name}: {label}"),
            frames=json.dumps(self.frames),
            labels=json.dumps(self.labels).replace("<", "\\u003c"),
            first=self.still,
            name=html.escape(self.name),
        )


def png(figure: Figure) -> bytes:
    """Returns a figure as a PNG with a palette."""
    drawn, stored = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    image = PIL.Image.open(drawn).convert("RGB").quantize(COLORS, dither=PIL.Image.Dither.NONE)
    image.save(stored, format="png", optimize=True)
    return stored.getvalue()
