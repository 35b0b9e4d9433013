"""Small charts as inline SVG. Colors are classes of the page's style sheet, so they follow light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

Point = tuple[float, float]

CURVE_WIDTH, CURVE_HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 42, 12, 10, 28
MAX_POINTS = 240
LETTER, LINE = 7.5, 13.0  # at most: width and height of a box label's letter, in pixels of the picture
MAX_LINES = 6  # the number of colors in the style sheet


def line_chart(lines: Mapping[str, Sequence[Point]], title: str, colors: Mapping[str, int] | None = None) -> Markup:
    """Draw lines over steps. Non-finite points are left out; the vertical axis ends at the 99th percentile.

    Args:
        lines: name -> (step, value); the first one is drawn below the others. All have one unit: there is one axis.
        colors: name -> number of its color; two lines of one color are a training (solid) and its validation (dashed).
            Default: a color per line.
    """
    colors = colors or {name: number for number, name in enumerate(lines)}
    visible = {}
    for name, points in lines.items():
        finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        # A number beyond the style sheet's colors has no class there, so its line is left out.
        if finite and colors.get(name, MAX_LINES) < MAX_LINES:
            visible[name] = _thin(finite)
    if not visible:
        return Markup("")
    # The vertical axis starts at 0 or below and leaves out the highest percent, so a spike does not flatten the rest.
    xs = [x for points in visible.values() for x, _ in points]
    ys = sorted(y for points in visible.values() for _, y in points)
    x_low, x_high = min(xs), max(xs)
    ticks = nice_ticks(min(0.0, ys[0]), ys[min(len(ys) - 1, int(len(ys) * 0.99))])
    y_low, y_high = ticks[0], ticks[-1]

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        # A single step is in the middle.
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = min(1.0, (y - y_low) / (y_high - y_low))
        # Pixels count from the top, values from the bottom; values above the axis are drawn at its end.
        return LEFT + across * (CURVE_WIDTH - LEFT - RIGHT), TOP + (1 - up) * (CURVE_HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>"
    ]
    for tick in ticks:
        _, y = to_pixels(x_low, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{CURVE_WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in nice_ticks(x_low, x_high):
        if x_low <= tick <= x_high:
            x, _ = to_pixels(tick, y_low)
            parts.append(f'<text class="axis" x="{x:.1f}" y="{CURVE_HEIGHT - 8}" text-anchor="middle">{tick:g}</text>')
    colors_used: set[int] = set()
    for name, points in visible.items():
        color = colors[name]
        # The second line of a color is the validation.
        dashed = " dashed" if color in colors_used else ""
        colors_used.add(color)
        path = " ".join("{:.1f},{:.1f}".format(*to_pixels(x, y)) for x, y in points)
        line = f'<polyline class="line c{color}{dashed}" points="{path}"><title>{escape(name)}</title></polyline>'
        parts.append(line)
        if dashed:  # a validation has few points
            for point in points:
                x, y = to_pixels(*point)
                parts.append(f'<circle class="dot c{color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    parts.append("</svg>")
    return Markup("".join(parts))


def boxes_overlay(width: float, height: float, boxes: Sequence[tuple[Sequence[float], str]]) -> Markup:
    """Draw labeled boxes over an image of `width` x `height`. A label without room for it is left out, its box is not.

    boxes: ((x1, y1, x2, y2) as fractions, label), the most important first.
    """
    parts = [f'<svg class="boxes" viewBox="0 0 {width:.0f} {height:.0f}" aria-hidden="true">']
    labels: list[tuple[float, float, float]] = []  # left end, right end and baseline of those that are drawn
    for index, ((x1, y1, x2, y2), label) in enumerate(boxes):
        x, y, w, h = x1 * width, y1 * height, (x2 - x1) * width, (y2 - y1) * height
        color = f"c{index % MAX_LINES}"
        parts.append(f'<rect class="{color}" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"/>')
        # Shortened to the picture's width, with two pixels of margin on either side.
        max_letters = int((width - 4) / LETTER)
        text = label if len(label) <= max_letters else label[: max_letters - 1] + "…"
        length = LETTER * len(text)
        left = min(x + 2, width - 2 - length)  # a label that would be cut off ends at the picture's edge
        # Above the box, below it, at its upper and at its lower edge: the first that is free and within the picture.
        for text_y in (y - 3, y + h + LINE - 2, y + LINE, y + h - 4):
            in_picture = LINE - 3 <= text_y <= height - 3
            near = [label for label in labels if abs(text_y - label[2]) < LINE]
            if in_picture and not any(left < end + 4 and start < left + length + 4 for start, end, _ in near):
                labels.append((left, left + length, text_y))
                parts.append(f'<text class="{color}" x="{left:.1f}" y="{text_y:.1f}">{escape(text)}</text>')
                break
    parts.append("</svg>")
    return Markup("".join(parts))


def nice_ticks(low: float, high: float) -> list[float]:
    """Return about six round numbers that span [low, high]."""
    if not high > low:
        high = low + 1
    # The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that reaches from low to high in six ticks.
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    # The tolerance keeps a tick that rounding has moved past its end.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _thin(points: Sequence[Point]) -> list[Point]:
    """Average adjacent points, so that at most MAX_POINTS remain."""
    # (N) points -> at most MAX_POINTS means of `size` points each
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]
