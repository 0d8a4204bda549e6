"""An explorer: a table that Python computed, buttons that choose among its rows, and bars."""

import base64
import hashlib
import html
import itertools
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from string import Template
from typing import Any

from matplotlib.figure import Figure

from course_lib.show.figures import style
from course_lib.show.figures.frames import png

_STRIPES = "repeating-linear-gradient({}deg, black 0 1px, transparent 1px 5px),"
HATCHES = (
    "",
    _STRIPES.format(-45),
    "radial-gradient(black 1px, transparent 1.5px) 0 0 / 5px 5px,",
    _STRIPES.format(45),
)
"""The first hatches of `style.HATCHES`, as CSS backgrounds."""

# The script looks rows up and sets widths and texts; it computes no other number.
_PAGE = Template("""\
<div class="explorer" id="$id"><img src="$still" alt="$alt" style="max-width: 100%"></div>
<script>
(() => {
  const {columns, rows, settings, label, value, parts, fills, note, unit, digits, chosen} =
    $data;
  const box = [...document.querySelectorAll("#$id")].find(each => each.querySelector("img"));
  const make = (tag, text = "", css = "") =>
    Object.assign(document.createElement(tag), {textContent: text, style: css});
  const style = make("style", `
    #$id {max-width: 46em; line-height: 1.5}
    #$id button {font: inherit; color: inherit; background: none; border: 1px solid;
      border-radius: 4px; padding: 0 8px; margin: 2px 0 2px 6px; cursor: pointer}
    #$id button[aria-pressed=true] {color: white; background: $color; font-weight: bold;
      outline: 2px solid $color}
    #$id i {display: inline-block; box-sizing: border-box; height: 1.2em; border: 1px solid;
      vertical-align: middle}
    #$id span {margin: 0 12px 0 4px}
    #$id .bar {display: flex; align-items: center}
    #$id .row {margin-top: 8px}`);
  const at = (row, column) => row[columns.indexOf(column)];
  const bars = make("div"), buttons = [];
  const show = () => {
    const shown = rows.filter(row => settings.every(name => at(row, name) === chosen[name]));
    const isNumber = row => typeof at(row, value) === "number";
    const longest = Math.max(0, ...shown.filter(isNumber).map(row => at(row, value))) || 1;
    bars.replaceChildren(...shown.map(row => {
      const line = Object.assign(make("div"), {className: "row"});
      const bar = Object.assign(make("div"), {className: "bar"});
      line.append(make("div", at(row, label)), bar);
      if (!isNumber(row)) {
        bar.append(make("em", at(row, value)));
        return line;
      }
      const number = column => at(row, column).toFixed(digits);
      (parts.length ? parts : [value]).forEach((part, i) => at(row, part) && bar.append(
        make("i", "", `width: $${80 * at(row, part) / longest}%; background: $${fills[i]}`)));
      bar.append(make("b", number(value), "margin-left: 6px"));
      const sum = parts.map(part => part + " " + number(part)).join(" + ");
      line.append(make("small", [sum, note && at(row, note)].filter(Boolean).join("; ")));
      return line;
    }));
    for (const [button, name, option] of buttons)
      button.setAttribute("aria-pressed", chosen[name] === option);
  };
  const choices = settings.map(name => {
    const line = make("div", name + ":");
    for (const option of new Set(rows.map(row => at(row, name)))) {
      const button = make("button", option);
      button.addEventListener("click", () => { chosen[name] = option; show(); });
      buttons.push([button, name, option]);
      line.append(button);
    }
    return line;
  });
  const legend = make("div", "", "margin-top: 8px");
  parts.forEach((part, i) => legend.append(
    make("i", "", `width: 1.4em; background: $${fills[i]}`), make("span", part)));
  legend.append(make("small", unit + "; the scale fits the longest bar"));
  box.replaceChildren(style, ...choices, legend, bars);
  show();
})();
</script>""")


class explorer:  # noqa: N801  a notebook calls it like the other pictures
    """Shows a table one selection at a time: a line of buttons per setting, a bar per label.

    The output holds the rows, so the buttons need neither Python nor a network, and show no
    number that is not in a row. Without scripts, as on GitHub or in a notebook that is not
    trusted, it is a picture of the first selection.

    Args:
      rows: mappings or dataclasses, one for each combination of the settings and `label`. Only
        the columns named below are stored.
      settings: columns with a line of buttons each. Their values, numbers or texts, are in the
        order in which they appear in the rows.
      label: column with the names of the bars.
      value: column with the length of a bar, a number of at least 0, or a text that stands in
        place of the bar and says why there is none.
      parts: at most four columns that add up to `value` within 1%. Where `value` is a text,
        they are not read.
      note: column with a text that stands beside a bar; "": none.
      first: setting -> value that is selected at first. The others begin with the value of
        their first button.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        *,
        settings: Sequence[str],
        label: str,
        value: str,
        unit: str,
        parts: Sequence[str] = (),
        note: str = "",
        first: Mapping[str, Any] | None = None,
        digits: int = 1,
    ) -> None:
        self.settings, self.parts, self.note = list(settings), list(parts), note
        self.label, self.value, self.bars = label, value, self.parts or [value]
        self.unit, self.digits = unit, digits
        self.columns = [*settings, label, value, *parts, *([note] if note else [])]
        table = style.as_dicts(rows)
        style.refuse_empty("rows, settings", table and settings)
        for row in table:
            length = row[value]
            if isinstance(length, str):
                continue
            total = sum(row[part] for part in self.bars)
            if not (0 <= length < math.inf and math.isclose(total, length, rel_tol=0.01)):
                raise ValueError(
                    f"{value}={length!r} must be the sum of {self.bars}, a finite number of at"
                    " least 0, or a text that says why there is none"
                )
        blank = dict.fromkeys([*parts, note])
        full = [blank | row for row in table]
        self.rows = [{name: _plain(row[name]) for name in self.columns} for row in full]
        keys = [*settings, label]
        counts = Counter(tuple(row[key] for key in keys) for row in self.rows)
        options = {key: list(dict.fromkeys(row[key] for row in self.rows)) for key in keys}
        for one in itertools.product(*options.values()):
            if counts[one] != 1:
                raise ValueError(f"rows must have one row for {keys} = {one}: {counts[one]}")
        self.chosen = {name: options[name][0] for name in settings} | dict(first or {})
        if unknown := [k for k, v in self.chosen.items() if v not in options.get(k, ())]:
            raise ValueError(f"first={first} must select what rows have: {unknown} do not")

    def __repr__(self) -> str:
        return f"<explorer of {len(self.rows)} rows: {', '.join(self.settings)}>"

    def picture(self) -> Figure:
        """Returns the still picture: the bars of the first selection."""
        shown = [r for r in self.rows if all(r[k] == v for k, v in self.chosen.items())]
        figure, [axes] = style.canvas(7.5, 0.45 * len(shown) + 1.4)
        numbers = [row for row in shown if not isinstance(row[self.value], str)]
        for place, row in enumerate(shown):
            if row not in numbers:
                style.write(axes, row[self.value], 0, place)
                continue
            left = 0.0
            for i, part in enumerate(self.bars):
                legend = part if row is numbers[0] and self.parts else None
                axes.barh(place, row[part], 0.6, left=left, label=legend, **style.fill(i, part))
                left += row[part]
            text = f"{row[self.value]:.{self.digits}f}"
            style.write(axes, f"{text}; {row[self.note]}" if self.note else text, left, place)
        axes.set_yticks(range(len(shown)), [str(row[self.label]) for row in shown])
        longest = max((row[self.value] for row in numbers), default=0) or 1
        width = (1.5 if self.note else 1.15) * longest
        axes.set(xlim=(0, width), ylim=(len(shown) - 0.5, -0.5), xlabel=self.unit)
        axes.grid(False)
        pairs = [f"{name}: {option}" for name, option in self.chosen.items()]
        selection = "; ".join(pair.replace(" ", "\N{NO-BREAK SPACE}") for pair in pairs)
        figure.suptitle(textwrap.fill(selection, 90), x=0.01, ha="left", fontsize=10)
        if self.parts and numbers:
            figure.legend(loc="outside lower center", ncols=len(self.parts))
        return figure

    def _repr_html_(self) -> str:
        """Returns the still picture, and a script that puts buttons and bars in its place."""
        fills = [
            "white" if name == style.IDLE else f"{hatch} {style.color(i, name)}".strip()
            for i, (name, hatch) in enumerate(zip(self.bars, HATCHES, strict=False))
        ]
        own = ("settings", "label", "value", "parts", "note", "unit", "digits", "chosen")
        data = {"columns": self.columns, "rows": [list(row.values()) for row in self.rows]}
        data |= {name: getattr(self, name) for name in own} | {"fills": fills}
        encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        selection = ", ".join(f"{name} {option}" for name, option in self.chosen.items())
        return _PAGE.substitute(
            id=f"explorer-{hashlib.sha256(encoded.encode()).hexdigest()[:10]}",
            still=f"data:image/png;base64,{base64.b64encode(png(self.picture())).decode()}",
            alt=html.escape(f"{self.value} for each {self.label}: {selection}"),
            data=encoded,
            color=style.COLORS[0],
        )


def _plain(value: Any) -> Any:  # for JSON
    return value.item() if hasattr(value, "item") else value
