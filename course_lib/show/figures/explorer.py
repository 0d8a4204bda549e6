"""An explorer: a table that Python computed, buttons that choose among its rows, and bars."""

import base64
import dataclasses
import hashlib
import html
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from string import Template
from typing import Any

from matplotlib.figure import Figure

from course_lib.show.figures import style
from course_lib.show.figures.moving import png

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


@dataclasses.dataclass(frozen=True, repr=False)
class Explorer:
    """A table with buttons that a notebook displays. See `explorer`.

    Attributes:
      columns: names of the columns.
      rows: one list per row, in the order of `columns`.
      settings, label, value, parts, note: columns, by their use.
      unit: of the numbers of `value`.
      digits: after the decimal point.
      chosen: the settings of the still picture.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    settings: Sequence[str]
    label: str
    value: str
    parts: Sequence[str]
    note: str
    unit: str
    digits: int
    chosen: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<explorer of {len(self.rows)} rows: {', '.join(self.settings)}>"

    def picture(self) -> Figure:
        """Returns the still picture: the bars of the first selection."""
        shown = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        shown = [row for row in shown if all(row[k] == v for k, v in self.chosen.items())]
        figure, axes = style.canvas(7.5, 0.45 * len(shown) + 1.4)
        parts = self.parts or [self.value]
        numbers = [row for row in shown if not isinstance(row[self.value], str)]
        for place, row in enumerate(shown):
            if isinstance(row[self.value], str):
                style.write(axes, row[self.value], 0, place)
                continue
            left = 0.0
            for i, part in enumerate(parts):
                look = style.fill(i, part)
                legend = part if row is numbers[0] and self.parts else None
                axes.barh(place, row[part], 0.6, left=left, label=legend, **look)
                left += row[part]
            text = f"{row[self.value]:.{self.digits}f}"
            style.write(axes, f"{text}; {row[self.note]}" if self.note else text, left, place)
        axes.set_yticks(range(len(shown)), [str(row[self.label]) for row in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        longest = max((row[self.value] for row in numbers), default=0) or 1
        axes.set_xlim(0, 1.5 * longest if self.note else 1.15 * longest)
        axes.set_xlabel(self.unit)
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
            for i, (name, hatch) in enumerate(
                zip(self.parts or [self.value], HATCHES, strict=False)
            )
        ]
        data = dataclasses.asdict(self) | {"fills": fills}
        encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        still = base64.b64encode(png(self.picture())).decode()
        selection = ", ".join(f"{name} {option}" for name, option in self.chosen.items())
        return _PAGE.substitute(
            id=f"explorer-{hashlib.sha256(encoded.encode()).hexdigest()[:10]}",
            still=f"data:image/png;base64,{still}",
            alt=html.escape(f"{self.value} for each {self.label}: {selection}"),
            data=encoded,
            color=style.COLORS[0],
        )


def explorer(
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
) -> Explorer:
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
      unit: of `value`.
      parts: at most four columns that add up to `value` within 1%. Where `value` is a text,
        they are not read.
      note: column with a text that stands beside a bar; "": none.
      first: setting -> value that is selected at first. The others begin with the value of
        their first button.
      digits: after the decimal point of each number on the screen.

    Raises:
      ValueError: if there are no rows or settings; if a column is unknown, or used twice; if a
        combination has no row, or two; if a value is no finite number of at least 0; if parts
        do not add up; or if `first` selects what no row has.
    """
    table = style.as_dicts(rows)
    if not table or not settings:
        raise ValueError(
            f"rows={table[:1]}, settings={list(settings)} must hold at least one row and one"
            " setting: there is nothing to choose"
        )
    if len(parts) > len(HATCHES):
        raise ValueError(f"parts={list(parts)} must be at most {len(HATCHES)}: as many hatches")
    uses = {"settings": settings, "label": [label], "value": [value], "parts": parts}
    columns = _columns(table, uses | {"note": [note] if note else []})
    table = [{name: _plain(row.get(name)) for name in columns} for row in table]
    for row in table:
        _check_numbers(row, value, parts)
    options = {name: list(dict.fromkeys(row[name] for row in table)) for name in settings}
    _check_combinations(table, [*settings, label])
    chosen = {name: values[0] for name, values in options.items()}
    for name, option in (first or {}).items():
        if option not in options.get(name, ()):
            raise ValueError(
                f"first={dict(first or {})} must select what rows have: {name!r} is one of"
                f" {options.get(name, list(options))}"
            )
        chosen[name] = _plain(option)
    stored = [[row[name] for name in columns] for row in table]
    return Explorer(
        columns, stored, list(settings), label, value, list(parts), note, unit, digits, chosen
    )


def _columns(
    table: Sequence[Mapping[str, Any]], uses: Mapping[str, Sequence[str]]
) -> list[str]:
    """Returns the columns that are stored: those that an argument names.

    Raises:
      ValueError: if a row lacks one of them, or if one has two uses.
    """
    columns: list[str] = []
    for argument, names in uses.items():
        for name in names:
            if name in columns:
                raise ValueError(f"{argument}={name!r} must be a column without another use")
            columns.append(name)
            for row in table:
                without_bar = isinstance(row.get(uses["value"][0]), str)
                if name not in row and not (without_bar and argument in ("parts", "note")):
                    raise ValueError(
                        f"{argument}={name!r} must be a column of every row; one has the"
                        f" columns {list(row)}"
                    )
    return columns


def _plain(number: Any) -> Any:
    """Returns NumPy's numbers as Python's, which JSON knows."""
    return number.item() if hasattr(number, "item") else number


def _check_numbers(row: Mapping[str, Any], value: str, parts: Sequence[str]) -> None:
    """Refuses a row whose bar cannot be drawn."""
    if isinstance(row[value], str):
        return
    for name in (value, *parts):
        number = row[name]
        is_number = isinstance(number, int | float) and math.isfinite(number) and number >= 0
        if not is_number:
            raise ValueError(
                f"{name}={number!r} must be a finite number of at least 0: the length of a bar."
                f" For a row without a bar, {value!r} is a text that says why"
            )
    total = sum(row[name] for name in parts)
    if parts and not math.isclose(total, row[value], rel_tol=0.01):
        raise ValueError(
            f"parts={list(parts)} must add up to {value!r}: {total:g} is not {row[value]:g}"
        )


def _check_combinations(table: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """Refuses a table that has no row, or two rows, for a combination of the keys' values."""
    seen = set()
    for row in table:
        combination = tuple(row[key] for key in keys)
        if combination in seen:
            raise ValueError(
                f"rows must have one row for {_named(keys, combination)}, not two: remove one,"
                " or name the column in which they differ in settings"
            )
        seen.add(combination)
    every: list[tuple[Any, ...]] = [()]
    for key in keys:
        values = dict.fromkeys(row[key] for row in table)
        every = [(*start, each) for start in every for each in values]
    if missing := [each for each in every if each not in seen]:
        raise ValueError(
            f"rows must have a row for {_named(keys, missing[0])}: add it, with a text as its"
            f" value if there is no number ({len(missing)} of {len(every)} rows are missing)"
        )


def _named(keys: Sequence[str], combination: Sequence[Any]) -> str:
    return ", ".join(f"{key}={each!r}" for key, each in zip(keys, combination, strict=True))
