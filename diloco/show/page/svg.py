"""Draws figures as SVG: panels of marks over two axes. Pure: equal figures give equal text.

Colours are Okabe and Ito's, which colour-blind people can distinguish; series of different colours
also differ by a dash, a hatch or a word. A colour is given twice: as an attribute, for saved
figures, and as a class, for the page's themes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

# Elements without an end tag.
VOID = frozenset({"input", "meta", "link"})
# Characters that XML forbids: a saved figure is an XML file.
_CONTROL = {code: "?" for code in range(32) if chr(code) not in "\t\n\r"}


class Markup(str):
    """Text that is valid HTML or SVG, and must not be escaped."""

    __slots__ = ()


NOTHING = Markup()


def element(tag: str, attributes: Mapping[str, object] | None = None, *children: str) -> Markup:
    """Returns an element of HTML or SVG.

    Args:
        tag: the element's name.
        attributes: values by name; they are escaped. True: an attribute without a value.
        children: the content; what is not `Markup` is escaped.
    """
    said = "".join(_attribute(name, value) for name, value in (attributes or {}).items())
    if tag in VOID:
        return Markup(f"<{tag}{said}>")
    return Markup(f"<{tag}{said}>{joined(*children)}</{tag}>")


def joined(*children: str) -> Markup:
    """Joins texts into markup; what is not `Markup` is escaped."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else escape(child.translate(_CONTROL))
            for child in children
        )
    )


def _attribute(name: str, value: object) -> str:
    return f" {name}" if value is True else f' {name}="{escape(str(value).translate(_CONTROL))}"'


def data_block(value: Any) -> Markup:
    """Returns an element `script` with a value as JSON, in which `<`, `>` and `&` are escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(f'<script type="application/json">{text}</script>')


def short(value: float | None) -> float | None:
    """Returns a value rounded to five significant digits; None for None, infinity and NaN."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


Column = npt.NDArray[np.float64]
Kind = Literal["line", "steps", "band", "boxes", "points", "rules", "texts"]

LOOKS = {
    "blue": "#0072b2", "red": "#c14e00", "green": "#00795a", "purple": "#a8487f",
    "orange": "#e69f00", "sky": "#56b4e9", "ink": "#202020", "grey": "#7f7f7f",
    "yellow": "#f0e442", "paper": "#ffffff", "soft": "#555c63", "grid": "#e2e4e6",
}  # fmt: skip
CYCLE = ("blue", "red", "green", "purple", "orange", "sky", "ink", "grey")
DASHES = ("", "6 3", "8 3 2 3", "2 2")
# Boxes of these looks are hatched.
HATCHES = {"yellow": "M0 6L6 0", "orange": "M2.5 3h1", "paper": "M0 0L6 6M0 6L6 0"}
# Shapes of points, as paths relative to the point.
SHAPES = {"dot": "h0", "cross": "m-4-4l8 8m0-8l-8 8", "start": "m-2-5l8 5l-8 5z"}
WIDTH, HEIGHT = 480, 230
# Pixels of a letter's width and of a line's height.
LETTER, LINE = 5.9, 15
NAME = 28
# The number of opacities that are distinguished.
SHADES = 8
# The greatest value that an axis shows, and the inverse of the least: others go to its end.
GREATEST = 1e300


def _none() -> Column:
    return np.zeros(0)


@dataclass(frozen=True, kw_only=True)
class PlotMark:
    """The drawing of one series; the columns that its kind uses have the same length.

    Attributes:
        kind: "line": through (x, y); "steps": of height y, from x to `to`; "band": between low and
            high along x; "boxes": from x to `to` and from low to high; "points": at (x, y);
            "rules": vertical lines at x, from low to high; "texts": at (x, y).
        name: the series' name; "": it is not in the legend.
        look: the colour, one of `LOOKS`.
        dash: dashes of a line, as in SVG's stroke-dasharray; "": none.
        shade: opacity of each box, 0 to 1.
        shape: shape of points, one of `SHAPES`.
    """

    kind: Kind
    x: Column
    y: Column = field(default_factory=_none)
    to: Column = field(default_factory=_none)
    low: Column = field(default_factory=_none)
    high: Column = field(default_factory=_none)
    shade: Column = field(default_factory=_none)
    texts: Sequence[str] = ()
    name: str = ""
    look: str = "blue"
    dash: str = ""
    shape: str = "dot"

    def data(self) -> dict[str, Any]:
        """Returns kind, name and non-empty columns as JSON values, for tooltips and CSV."""
        columns = ("x", "y", "to", "low", "high", "shade")
        found = {name: [*map(short, getattr(self, name).tolist())] for name in columns}
        return {"kind": self.kind, "name": self.name} | {
            name: values for name, values in found.items() if values
        }


def line(x: Column, y: Column, look: str, name: str = "", dash: str = "") -> PlotMark:
    """Returns a line through the points (x, y)."""
    return PlotMark(kind="line", x=x, y=y, look=look, name=name, dash=dash)


def step_line(x: Column, y: Column, look: str, name: str) -> PlotMark:
    """Returns steps: the height is y[i] from x[i] to x[i + 1]."""
    return PlotMark(kind="steps", x=x, to=np.append(x[1:], x[-1:]), y=y, look=look, name=name)


def bars(
    edges: tuple[Column, Column], ends: tuple[Column, Column], look: str, name: str = ""
) -> PlotMark:
    """Returns boxes from edges[0] to edges[1] along x, and from ends[0] to ends[1] along y."""
    return PlotMark(kind="boxes", x=edges[0], to=edges[1], low=ends[0], high=ends[1], look=look,
                name=name)  # fmt: skip


def points(x: Column, y: Column, look: str, name: str = "", shape: str = "dot") -> PlotMark:
    """Returns one mark of the given shape at each point (x, y)."""
    return PlotMark(kind="points", x=x, y=y, look=look, name=name, shape=shape)


def rules(x: Column, low: Column, high: Column, name: str = "") -> PlotMark:
    """Returns vertical lines at `x`, from `low` to `high`."""
    return PlotMark(kind="rules", x=x, low=low, high=high, look="ink", name=name)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a panel.

    Attributes:
        low, high: the ends of the axis; None: from the panel's marks.
        log: whether the axis is logarithmic.
        names: names in place of numbers, at 0, 1, 2 ...; on a y axis the first name is on top.
    """

    label: str = ""
    low: float | None = None
    high: float | None = None
    log: bool = False
    names: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A drawing of marks over two axes; width and height are pixels."""

    marks: Sequence[PlotMark]
    title: str = ""
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    width: int = WIDTH
    height: int = HEIGHT
    legend: bool = True


class Drawn(NamedTuple):
    """A drawn panel.

    Attributes:
        svg: the drawing.
        data: the panel's numbers as JSON values, for the page's script.
        words: the title, and the last value of each named line, for screen readers.
    """

    svg: Markup
    data: dict[str, Any]
    words: str


class _Scale(NamedTuple):
    """Maps an axis's values to pixels: `low` to `begin`, `high` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool

    def __call__(self, values: npt.ArrayLike) -> Column:
        edges = np.asarray([self.low, self.high])
        found = np.clip(np.asarray(values, np.float64), -GREATEST, GREATEST)
        if self.log:
            edges, found = np.log10(edges), np.log10(np.maximum(found, self.low / 10))
        share = (found - edges[0]) / (edges[1] - edges[0])
        return np.asarray(self.begin + np.clip(share, 0, 1) * (self.end - self.begin))

    def ticks(self) -> list[float]:
        """Returns round values on the axis, about five."""
        if not self.log:
            rough = (self.high - self.low) / 6
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(power * part for part in (1, 2, 5, 10) if power * part >= rough)
            first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
            return [step * count for count in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        parts = (1, 2, 5) if len(powers) < 4 else (1,)
        found = [part * 10.0**power for power in powers for part in parts]
        found = [value for value in found if self.low <= value <= self.high]
        return found[:: 1 + len(found) // 8]


def draw(panel: Panel, ident: str) -> Drawn:
    """Draws a panel; `ident` begins the ids in the SVG, and must be unique on the page."""
    legend = _legend(panel) if panel.legend else []
    across, down = _range(panel, "x"), _range(panel, "y")
    names = [_cut(name) for name in panel.y.names]
    labels = names or [f"{value:g}" for value in _Scale(*down, 0, 1, panel.y.log).ticks()]
    left = 12 + LETTER * max(map(len, labels), default=1) + (LINE if panel.y.label else 0)
    top = 8 + LINE * bool(panel.title) + LINE * len(legend)
    bottom = panel.height - 18 - (LINE if panel.x.label else 0)
    x = _Scale(*across, left, panel.width - 12, panel.x.log)
    y = _Scale(*down, *((top, bottom) if names else (bottom, top)), panel.y.log)
    used = {mark.look for mark in panel.marks if mark.kind == "boxes" and mark.look in HATCHES}
    svg = element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {panel.width} {panel.height}",
            "width": panel.width, "height": panel.height, "aria-hidden": "true",
            "font-family": "system-ui, sans-serif", "font-size": 11, "class": "drawing",
        },
        *[_hatch(ident, look) for look in sorted(used)],
        _text(8, 13, panel.title, "ink", {"font-weight": "bold"}),
        *[row for rank, entries in enumerate(legend)
          for row in _legend_row(entries, LINE * (rank + 1 + bool(panel.title)) - 3, ident)],
        *_axes(panel, x, y, names),
        *[_painted(mark, _shape(mark, x, y, ident)) for mark in panel.marks],
    )  # fmt: skip
    data = {
        "title": panel.title, "x": panel.x.label, "y": panel.y.label, "names": [*panel.y.names],
        "across": list(x), "down": list(y), "marks": [mark.data() for mark in panel.marks],
    }  # fmt: skip
    return Drawn(svg, data, _words(panel))


def _words(panel: Panel) -> str:
    newest = [
        f"{mark.name} {mark.y[np.isfinite(mark.y)][-1]:.4g}"
        for mark in panel.marks
        if mark.name and mark.kind in ("line", "steps") and np.isfinite(mark.y).any()
    ]
    return ", ".join([panel.title, *newest][not panel.title :])


def _range(panel: Panel, which: Literal["x", "y"]) -> tuple[float, float]:
    """Returns the least and the greatest value that a panel's axis shows."""
    axis: Axis = getattr(panel, which)
    if axis.names:
        return -0.5, len(axis.names) - 0.5
    columns = ("x", "to") if which == "x" else ("y", "low", "high")
    values = np.concatenate([_none(), *(getattr(m, name) for m in panel.marks for name in columns)])
    values = values[np.isfinite(values) & (values > 0 if axis.log else True)]
    values = np.clip(values, 1 / GREATEST if axis.log else -GREATEST, GREATEST)
    low, high = (values.min(), values.max()) if values.size else (1.0, 1.0)
    if axis.log:
        found = low / 1.2, high * 1.2
    else:
        room = 0.05 * (high - low) if which == "y" or axis.low is None else 0.0
        found = low - room, high + room
    low = found[0] if axis.low is None else axis.low
    high = found[1] if axis.high is None else axis.high
    if high - low <= 1 / GREATEST:
        high = low + (abs(low) if abs(low) > 1 / GREATEST else 1.0)
    return float(low), float(high)


def _axes(panel: Panel, x: _Scale, y: _Scale, names: Sequence[str]) -> list[Markup]:
    bottom, left = max(y.begin, y.end), x.begin
    made = []
    for value, at in _places(x, [_cut(name) for name in panel.x.names], 40):
        made.append(_grid_line(at, min(y.begin, y.end), at, bottom))
        made.append(_text(at, bottom + 13, value, "soft", {"text-anchor": "middle"}))
    for value, at in _places(y, names, 12):
        made.append(_grid_line(left, at, x.end, at))
        made.append(_text(left - 5, at + 4, value, "soft", {"text-anchor": "end"}))
    middle = (left + x.end) / 2
    where = {"text-anchor": "middle"}
    if panel.x.label:
        made.append(_text(middle, panel.height - 5, panel.x.label, "soft", where))
    if panel.y.label:
        turned = where | {"transform": f"rotate(-90 12 {(y.begin + y.end) / 2:.0f})"}
        made.append(_text(12, (y.begin + y.end) / 2, panel.y.label, "soft", turned))
    return made


def _places(scale: _Scale, names: Sequence[str], apart: float) -> list[tuple[str, float]]:
    """Returns text and pixel of each tick.

    Args:
        scale: the axis's scale.
        names: names in place of numbers; if they would be nearer than `apart`, some are left out.
        apart: least distance of names in pixels.
    """
    if not names:
        ticks = scale.ticks()
        return [(f"{value:g}", at) for value, at in zip(ticks, scale(ticks).tolist(), strict=True)]
    room = max(1, math.ceil(len(names) * apart / abs(scale.end - scale.begin)))
    places = range(0, len(names), room)
    return [(names[place], float(scale(place))) for place in places]


def _cut(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


def _grid_line(x: float, y: float, to_x: float, to_y: float) -> Markup:
    return element("path", _colour("grid") | {"d": f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}",
                                              "stroke": "currentColor"})  # fmt: skip


def _text(x: float, y: float, text: str, look: str, more: dict[str, str] | None = None) -> Markup:
    where = {"x": f"{x:.1f}", "y": f"{y:.1f}", "fill": "currentColor"}
    return element("text", where | _colour(look) | (more or {}), text) if text else Markup()


def _colour(look: str) -> dict[str, object]:
    return {"class": look, "color": LOOKS[look]}


def _hatch(ident: str, look: str) -> Markup:
    size = {"width": 6, "height": 6}
    return element(
        "pattern",
        {"id": f"{ident}-{look}", "patternUnits": "userSpaceOnUse", **size},
        element("rect", _colour(look) | {"fill": "currentColor", **size}),
        element("path", _colour("ink") | {"stroke": "currentColor", "d": HATCHES[look]}),
    )


def _legend(panel: Panel) -> list[list[PlotMark]]:
    """Returns the named marks for the legend, in rows that fit the panel's width."""
    named = {mark.name: mark for mark in reversed(panel.marks) if mark.name}
    rows: list[list[PlotMark]] = []
    used = 0.0
    for mark in reversed(named.values()):
        needed = 30 + LETTER * len(_cut(mark.name))
        if not rows or used + needed > panel.width - 16:
            rows.append([])
            used = 0.0
        rows[-1].append(mark)
        used += needed
    return rows


def _legend_row(entries: Sequence[PlotMark], y: float, ident: str) -> list[Markup]:
    made, x = [], 8.0
    for mark in entries:
        at = np.asarray([x]), np.asarray([y - 4])
        if mark.kind in ("boxes", "band"):
            edges = (at[0], at[0] + 14, at[1] - 4, at[1] + 4)
            shape = _boxes(edges, _fill(mark, ident))
        elif mark.kind == "points":
            shape = _points(mark, at[0] + 7, at[1])
        else:
            shape = _stroke(f"M{x} {y - 4}h14", mark.dash)
        made += [_painted(mark, shape), _text(x + 19, y, _cut(mark.name), "soft")]
        x += 30 + LETTER * len(_cut(mark.name))
    return made


def _painted(mark: PlotMark, shape: Markup) -> Markup:
    return element("g", _colour(mark.look), shape)


def _shape(mark: PlotMark, x: _Scale, y: _Scale, ident: str) -> Markup:
    """Returns the SVG of a mark."""
    match mark.kind:
        case "line":
            return _stroke(_path(_known(x, mark.x), _known(y, mark.y)), mark.dash)
        case "steps":
            along = np.stack([mark.x, mark.to], axis=1).ravel()
            return _stroke(_path(x(along), _known(y, np.repeat(mark.y, 2))), mark.dash)
        case "band":
            whole = np.isfinite(mark.low) & np.isfinite(mark.high)
            along, low, high = x(mark.x[whole]), y(mark.low[whole]), y(mark.high[whole])
            path = _path(np.append(along, along[::-1]), np.append(high, low[::-1]))
            return element("path", {"d": path, "fill": "currentColor", "fill-opacity": 0.16})
        case "points":
            return _points(mark, x(mark.x), y(mark.y))
        case "rules":
            parts = zip(
                x(mark.x).tolist(), y(mark.low).tolist(), y(mark.high).tolist(), strict=True
            )
            return _stroke(
                "".join(f"M{at:.1f} {low:.1f}V{high:.1f}" for at, low, high in parts), ""
            )
        case "texts":
            anchor = {"text-anchor": "middle", "font-size": "10"}
            places = zip(x(mark.x).tolist(), y(mark.y).tolist(), mark.texts, strict=True)
            return joined(*[_text(at, down + 4, text, mark.look, anchor)
                            for at, down, text in places])  # fmt: skip
        case "boxes":
            edges = (x(mark.x), x(mark.to), y(mark.low), y(mark.high))
            return _shaded(mark, edges, _fill(mark, ident))


def _known(scale: _Scale, values: Column) -> Column:
    return np.where(np.isfinite(values), scale(np.nan_to_num(values)), np.nan)


def _path(x: Column, y: Column) -> str:
    """Returns the SVG path through the points (x, y), interrupted where a coordinate is NaN."""
    parts, begins = [], True
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        known = math.isfinite(across + down)
        if known:
            place = f"{across:.1f} {down:.1f}"
            # A point between two unknown ones is a line of no length, visible by its round ends.
            parts.append(f"M{place}h0" if begins else f"L{place}")
        begins = not known
    return "".join(parts)


def _stroke(path: str, dash: str = "") -> Markup:
    look = {"d": path, "fill": "none", "stroke": "currentColor", "stroke-width": 1.6,
            "stroke-linecap": "round"}  # fmt: skip
    return element("path", look | ({"stroke-dasharray": dash} if dash else {}))


def _points(mark: PlotMark, x: Column, y: Column) -> Markup:
    shape = SHAPES[mark.shape]
    path = "".join(
        f"M{across:.1f} {down:.1f}{shape}"
        for across, down in zip(x.tolist(), y.tolist(), strict=True)
        if math.isfinite(across + down)
    )
    width = 6 if mark.shape == "dot" else 1.6
    return element(
        "path",
        {"d": path, "stroke": "currentColor", "stroke-width": width, "stroke-linecap": "round",
         "fill": "currentColor"},
    )  # fmt: skip


def _fill(mark: PlotMark, ident: str) -> str:
    return f"url(#{ident}-{mark.look})" if mark.look in HATCHES else "currentColor"


def _shaded(mark: PlotMark, edges: tuple[Column, ...], fill: str) -> Markup:
    if not mark.shade.size:
        return _boxes(edges, fill)
    levels = np.ceil(SHADES * np.nan_to_num(mark.shade)).astype(int)
    return joined(
        *[
            _boxes([edge[levels == level] for edge in edges], fill, level / SHADES)
            for level in np.unique(levels[levels > 0])
        ]
    )


def _boxes(edges: Sequence[Column], fill: str, opacity: float = 1.0) -> Markup:
    x, to, low, high = edges
    sizes = np.round(np.stack([x, low, to - x, high - low], axis=1), 1)
    path = "".join(
        f"M{across:g} {down:g}h{wide:g}v{tall:g}h{-wide:g}z"
        for across, down, wide, tall in sizes.tolist()
        if wide and tall and math.isfinite(across + down + wide + tall)
    )
    outline = {"stroke": "currentColor", "stroke-width": 0.4} if fill != "currentColor" else {}
    return element("path", {"d": path, "fill": fill, "fill-opacity": opacity, **outline})
