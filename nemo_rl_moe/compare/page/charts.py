"""Charts as SVG with the page's colours. Coordinates are those of a phone's width, so that text can be read there."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.compare.page.shell import colour, escape, stroke
from nemo_rl_moe.compare.run_data import Series

_WIDTH, _HEIGHT = 340, 170
_WIDE = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 22
_POINTS = 400
_BINS = 16
# Characters that fit beside the axis.
_LONGEST_TICK = 7
_LARGEST = 1e100


@dataclass(frozen=True)
class Frame:
    """Plot area and the ranges that it shows."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: int = _WIDTH
    height: int = _HEIGHT

    def px(self, values: NDArray | float) -> NDArray:
        """Horizontal positions."""
        low, high = self.x
        return _LEFT + (np.asarray(values, dtype=np.float64) - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def py(self, values: NDArray | float) -> NDArray:
        """Vertical positions."""
        low, high = self.y
        return (
            self.height
            - _BOTTOM
            - (np.asarray(values, dtype=np.float64) - low) / (high - low) * (self.height - _TOP - _BOTTOM)
        )


def curves(
    title: str,
    unit: str,
    lines: Sequence[tuple[str, Series | None]],
    window: tuple[int, int] | None,
) -> str:
    """A figure of series over steps; nothing when none has a point.

    Args:
        title: of the figure.
        unit: of the values.
        lines: name and series, in the order of the legend; None keeps its colour free.
        window: steps that are compared, shaded. Their values set the range, so that a warm-up step cannot flatten all
            the rest; None takes all steps.
    """
    drawn = [None if s is None else Series(s.steps, _drawable(s.values)) for _, s in lines]
    shown = [(i, lines[i][0], s) for i, s in enumerate(drawn) if s is not None and np.isfinite(s.values).any()]
    if not shown:
        return ""
    frame = _frame([s for _, _, s in shown], window)
    parts = [_window(frame, window)] if window else []
    parts += _axes(frame)
    thinned = [thin(s) for _, _, s in shown]
    for (i, _, _), series in zip(shown, thinned, strict=True):
        parts.append(_line(frame, series, i))
    steps = np.unique(np.concatenate([s.steps for s in thinned]))
    points = {
        "width": frame.width,
        "steps": steps.tolist(),
        "x": np.round(frame.px(steps), 1).tolist(),
        "lines": [{"name": name, "values": _at(s, steps)} for _, name, s in shown],
    }
    return _figure(title, unit, frame, parts, points)


def histogram(title: str, unit: str, samples: Sequence[tuple[str, NDArray[np.float64] | None]]) -> str:
    """A figure of how values spread; shares of each run's steps, so that runs of unequal length compare."""
    drawn = [(i, _drawable(v)) for i, (_, v) in enumerate(samples) if v is not None]
    shown = [(i, v[np.isfinite(v)]) for i, v in drawn if np.isfinite(v).any()]
    if not shown:
        return ""
    edges = _edges(np.concatenate([v for _, v in shown]))
    shares = [(i, np.histogram(v, edges)[0] / len(v)) for i, v in shown]
    top = max(float(s.max()) for _, s in shares)
    frame = Frame((float(edges[0]), float(edges[-1])), (0.0, top * 1.08))
    parts = _axes(frame, percent=True)
    base = float(frame.py(0.0))
    for i, share in shares:
        x, y = np.repeat(frame.px(edges), 2)[1:-1], np.repeat(frame.py(share), 2)
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        first, last = f"{x[0]:.1f},{base:.1f}", f"{x[-1]:.1f},{base:.1f}"
        parts.append(f'<polygon points="{first} {path} {last}" style="fill:{colour(i)};opacity:.22"/>')
        parts.append(f'<polyline class="line" points="{path}" style="{stroke(i)}"/>')
        mean = float(frame.px(float(np.mean(shown[[k for k, _ in shown].index(i)][1]))))
        parts.append(
            f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="{_TOP}" y2="{base:.1f}" style="stroke:{colour(i)};'
            'stroke-dasharray:3 3;stroke-width:1.4"/>'
        )
    return _figure(title, unit, frame, parts, None)


def stacked(
    title: str,
    unit: str,
    steps: NDArray[np.int64],
    parts: Sequence[tuple[str, int, NDArray[np.float64]]],
    total: NDArray[np.float64],
) -> str:
    """Figures of parts that add up, one column a step: one over the whole page, and one for a phone instead of it.

    Args:
        title: of the figure.
        unit: of the values.
        steps: int64 [N]; of many, a column has the means of neighbours.
        parts: name, colour and float64 [N], from the bottom up.
        total: float64 [N], read out with the parts.
    """
    if not len(steps):
        return ""
    kinds = ((_WIDE, "wide"), (_WIDTH, "narrow"))
    return "".join(_stacked(title, unit, steps, parts, total, width, kind) for width, kind in kinds)


def _stacked(
    title: str,
    unit: str,
    steps: NDArray[np.int64],
    parts: Sequence[tuple[str, int, NDArray[np.float64]]],
    total: NDArray[np.float64],
    width: int,
    kind: str,
) -> str:
    parts = [(name, number, np.nan_to_num(_drawable(values))) for name, number, values in parts]
    groups = np.array_split(np.arange(len(steps)), min(len(steps), width // 3))
    means = [(name, number, _group_means(values, groups)) for name, number, values in parts]
    at = np.array([steps[g[0]] for g in groups])
    height = np.sum([values for _, _, values in means], axis=0)
    half = 0.5 * float(np.diff(at).min()) if len(at) > 1 else 0.5
    frame = Frame((float(at[0] - half), float(at[-1] + half)), (0.0, _robust_top(height)), width, 220)
    left, right = frame.px(at - half * 0.92), frame.px(at + half * 0.92)
    marks = _axes(frame)
    below = np.zeros(len(at))
    for _, number, values in means:
        low, high = frame.py(below), frame.py(below + values)
        rects = "".join(
            f"M{a:.1f} {b:.1f}H{c:.1f}V{d:.1f}H{a:.1f}Z" for a, b, c, d in zip(left, low, right, high, strict=True)
        )
        clip = f"url(#plot{width}x{frame.height})"
        marks.append(f'<path class="area" d="{rects}" style="fill:{colour(number)}" clip-path="{clip}"/>')
        below = below + values
    points = {
        "width": width,
        "steps": at.tolist(),
        "x": np.round(frame.px(at), 1).tolist(),
        "lines": [
            {"name": n, "values": _rounded(v)} for n, _, v in [*means[::-1], ("total", 0, _group_means(total, groups))]
        ],
    }
    return _figure(title, unit, frame, marks, points, kind)


def forest(change: float | None, low: float | None, high: float | None, limit: float, kind: str) -> str:
    """A change and its interval on a line through zero, for a table's cell.

    Args:
        limit: change at either end of the line.
        kind: class of its colour.
    """
    if change is None or limit <= 0:
        return ""

    def at(value: float) -> float:
        return 70 + 66 * max(-1.0, min(1.0, value / limit))

    bar = ""
    if low is not None and high is not None:
        bar = f'<line x1="{at(low):.1f}" x2="{at(high):.1f}" y1="9" y2="9" stroke="currentColor" stroke-width="3"/>'
    return (
        f'<svg class="{kind}" viewBox="0 0 140 18" aria-hidden="true"><line x1="70" x2="70" y1="1" y2="17" '
        f'style="stroke:var(--soft);opacity:.6"/>{bar}'
        f'<circle cx="{at(change):.1f}" cy="9" r="3.6" fill="currentColor"/></svg>'
    )


def thin(series: Series) -> Series:
    """At most 400 points: of each stretch of steps the lowest and the highest, so that no spike is lost.

    One that was not finite is kept besides in each stretch that has any: it breaks the line.
    """
    if len(series.steps) <= _POINTS:
        return series
    starts = np.linspace(0, len(series.steps), _POINTS // 2, endpoint=False).astype(np.int64)
    stretch = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(series.steps)))
    bad, finite = (np.flatnonzero(np.isfinite(series.values) == known) for known in (False, True))
    # Sorted by value within each stretch, the first and the last of it are its extremes.
    order = finite[np.lexsort((series.values[finite], stretch[finite]))]
    first, last = np.diff(stretch[order], prepend=-1) > 0, np.diff(stretch[order], append=len(starts)) > 0
    broken = bad[np.diff(stretch[bad], prepend=-1) > 0]
    kept = np.unique(np.concatenate([order[first], order[last], broken]))
    return Series(series.steps[kept], series.values[kept])


def ticks(low: float, high: float, least: int = 3) -> list[float]:
    """Round numbers inside a range: as few as there can be, but at least so many."""
    size = 10.0 ** math.floor(math.log10(high - low))
    for step in (size * m for m in (5, 2, 1, 0.5, 0.2, 0.1)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 >= least:
            break
    return [i * step for i in range(first, last + 1)]


def _drawable(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values whose sums and quotients a float can hold: others, of damaged files, are left out or drawn as 0."""
    size = np.abs(values)
    return np.where(size > _LARGEST, np.nan, np.where(size < 1 / _LARGEST, 0.0, values))


def _frame(shown: Sequence[Series], window: tuple[int, int] | None) -> Frame:
    inside = [_inside(s, window) for s in shown]
    values = np.concatenate([v for v in inside if len(v)] or [s.values for s in shown])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    pad = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
    steps = np.concatenate([s.steps for s in shown])
    first, last = float(steps.min()), float(steps.max())
    return Frame((first - 0.5, last + 0.5) if first == last else (first, last), (low - pad, high + pad))


def _inside(series: Series, window: tuple[int, int] | None) -> NDArray[np.float64]:
    values = series.values
    if window is not None:
        values = values[(series.steps >= window[0]) & (series.steps <= window[1])]
    return values[np.isfinite(values)]


def _group_means(values: NDArray[np.float64], groups: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    return np.array([values[group].mean() for group in groups])


def _robust_top(total: NDArray[np.float64]) -> float:
    """The highest column, unless a few (the warm-up, a validation) are far above all others: those are cut."""
    usual = float(np.quantile(total, 0.95))
    return min(float(total.max()), 1.6 * usual) * 1.05 or 1.0


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = float(values.min()), float(values.max())
    if low == high:
        low, high = low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)
    return np.linspace(low, high, _BINS + 1)


def _line(frame: Frame, series: Series, number: int) -> str:
    """A line that is broken where a value was not finite, and dots where it would be none."""
    x, y, good = frame.px(series.steps), frame.py(series.values), np.isfinite(series.values)
    runs = np.split(np.arange(len(x)), np.flatnonzero(~good))
    parts = []
    for run in runs:
        own = [i for i in run if good[i]]
        if len(own) > 1:
            path = " ".join(f"{x[i]:.1f},{y[i]:.1f}" for i in own)
            parts.append(f'<polyline class="line" points="{path}" style="{stroke(number)}"/>')
        if len(own) == 1 or len(series.steps) <= 12:
            parts += [f'<circle cx="{x[i]:.1f}" cy="{y[i]:.1f}" r="2.8" style="fill:{colour(number)}"/>' for i in own]
    return f'<g clip-path="url(#plot{frame.width}x{frame.height})">{"".join(parts)}</g>'


def _window(frame: Frame, window: tuple[int, int]) -> str:
    low, high = (float(v) for v in frame.px(np.clip(window, *frame.x)))
    height = frame.height - _TOP - _BOTTOM
    return f'<rect class="window" x="{low:.1f}" y="{_TOP}" width="{max(1.0, high - low):.1f}" height="{height}"/>'


def _axes(frame: Frame, *, percent: bool = False) -> list[str]:
    parts = []
    values = ticks(*frame.y)
    offset = 0.0 if percent else _offset(frame.y, values)
    span = frame.y[0] - offset, frame.y[1] - offset
    for value in values:
        y = float(frame.py(value))
        text = f"{100 * value:.0f} %" if percent else _tick(value - offset, span)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    if offset:
        parts.append(f'<text x="{_LEFT + 3}" y="{_TOP + 10}">{offset:.9g} + …</text>')
    for value in ticks(*frame.x, least=3 if frame.width == _WIDTH else 6):
        x = float(frame.px(value))
        if percent or value == int(value):
            text = _tick(value, frame.x) if percent else f"{value:.0f}"
            parts.append(f'<text x="{x:.1f}" y="{frame.height - 7}" text-anchor="middle">{text}</text>')
    return parts


def _offset(span: tuple[float, float], values: Sequence[float]) -> float:
    """What to take off all ticks, so that values that hardly differ from one another have labels that fit; mostly 0."""
    if max((len(_tick(value, span)) for value in values), default=0) <= _LONGEST_TICK:
        return 0.0
    return round((span[0] + span[1]) / 2, -math.floor(math.log10(span[1] - span[0])) - 1)


def _tick(value: float, span: tuple[float, float]) -> str:
    size = max(abs(span[0]), abs(span[1]))
    if abs(value) < 1e-9 * size:
        return "0"
    if size >= 1e5 or size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    digits = max(0, 1 - math.floor(math.log10(span[1] - span[0])))
    return f"{value:.{digits}f}"


def _at(series: Series, steps: NDArray[np.int64]) -> list[float | None]:
    at = np.minimum(np.searchsorted(series.steps, steps), len(series.steps) - 1)
    return _rounded(np.where(series.steps[at] == steps, series.values[at], np.nan))


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    return [_json(value) for value in values.tolist()]


def _json(value: float | None) -> float | None:
    """Six significant digits are more than a read-out shows."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _figure(title: str, unit: str, frame: Frame, parts: Sequence[str], points: dict | None, kind: str = "") -> str:
    data = f' data-points="{escape(json.dumps(points, separators=(",", ":")))}"' if points else ""
    mark = (
        f'<line class="mark" style="display:none;stroke:var(--ink);stroke-width:1" y1="{_TOP}" '
        f'y2="{frame.height - _BOTTOM}"/>'
    )
    clip = (
        f'<clipPath id="plot{frame.width}x{frame.height}"><rect x="{_LEFT}" y="{_TOP - 4}" '
        f'width="{frame.width - _LEFT - _RIGHT + 4}" height="{frame.height - _TOP - _BOTTOM + 4}"/></clipPath>'
    )
    label = f"{title}{f' in {unit}' if unit else ''}"
    caption = f'{escape(title)} <span class="soft">{escape(unit)}</span>'
    return (
        f"<figure{f' class={kind}' if kind else ''}{data}><figcaption>{caption}</figcaption>"
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{escape(label)}">'
        f"<defs>{clip}</defs>{''.join(parts)}{mark}</svg></figure>"
    )
