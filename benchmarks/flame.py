"""Draw where the time below one function goes: a flame graph as an SVG without scripts, from sampled stacks.

    pip install py-spy
    OMP_NUM_THREADS=1 py-spy record --native --rate 100 --format raw --output stacks.txt -- \\
        python benchmarks/roofline.py --work decoding --size middle --models tden --repeats 60
    python benchmarks/flame.py stacks.txt --below TDEN.step --output flame.svg

A box is a function, as wide as the share of the samples in which it ran; what it called is above it. Colors: Python
(blue), libraries (orange). Also prints the functions in which most samples ended.
"""

from __future__ import annotations

import argparse
import html
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

WIDTH, ROW, LETTER = 1200, 16, 6.2  # pixels: of the drawing, of a row's height, of a letter's width
SMALLEST = 0.004  # share of a box that is drawn


@dataclass
class Box:
    """A function in its place: samples, and what it called."""

    samples: int = 0
    calls: dict[str, Box] = field(default_factory=dict)


def short(name: str) -> str:
    """Return a function's name without template arguments, line and library."""
    name = re.sub(r" \((?:[^()]*)\)$", "", name)
    while (plain := re.sub(r"<[^<>]*>", "", name)) != name:
        name = plain
    return name.replace("(anonymous namespace)::", "")


def below(lines: list[str], function: str) -> tuple[Box, Counter[str]]:
    """Return the tree of the stacks from `function` on, and the samples that ended in each function.

    lines: `outermost;...;innermost COUNT`, as `py-spy record --format raw` writes them.
    """
    tree, ends = Box(), Counter[str]()
    for line in lines:
        stack, count = line.rsplit(" ", 1)
        names = [(short(frame), ".py:" in frame) for frame in stack.split(";")]
        start = next((i for i, (name, _) in enumerate(names) if name == function), None)
        if start is None:
            continue
        tree.samples += int(count)
        box = tree
        for name, is_python in names[start:]:
            box = box.calls.setdefault(("p" if is_python else "l") + name, Box())
            box.samples += int(count)
        ends[names[-1][0]] += int(count)
    return tree, ends


def draw(tree: Box) -> str:
    """Return the SVG."""
    boxes: list[str] = []

    def add(box: Box, left: float, row: int) -> int:
        """Draw what a box called, from `left` on; return the highest row."""
        highest = row
        for key, call in sorted(box.calls.items(), key=lambda item: -item[1].samples):
            share = call.samples / tree.samples
            if share >= SMALLEST:
                width, name = share * WIDTH, html.escape(key[1:])
                color = "#a8c8f0" if key[0] == "p" else "#f3c08a"
                label = html.escape(key[1:][: max(0, int(width / LETTER) - 1)])
                boxes.append(
                    f'<g transform="translate({left:.1f} {{{row}}})"><title>{name}: {share:.1%}</title>'
                    f'<rect width="{width:.1f}" height="{ROW - 1}" fill="{color}"/>'
                    f'<text x="2" y="{ROW - 5}">{label}</text></g>'
                )
                highest = max(highest, add(call, left, row + 1))
            left += share * WIDTH
        return highest

    height = (add(tree, 0, 0) + 1) * ROW
    placed = re.sub(r"\{(\d+)\}", lambda match: str(height - ROW - int(match[1]) * ROW), "\n".join(boxes))
    style = 'font-family="monospace" font-size="10"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>\n{placed}\n</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", type=Path, help="what py-spy wrote")
    parser.add_argument("--below", required=True, help="the function that is 100%%, e.g. TDEN.step")
    parser.add_argument("--output", type=Path, required=True, help="the SVG to write")
    parsed = parser.parse_args()
    tree, ends = below(parsed.stacks.read_text(encoding="utf-8").splitlines(), parsed.below)
    if not tree.samples:
        parser.error(f"{parsed.stacks}: no sample is below {parsed.below}")
    parsed.output.write_text(draw(tree), encoding="utf-8")
    print(f"{tree.samples} samples below {parsed.below}; most ended in")
    for name, samples in ends.most_common(12):
        print(f"{samples / tree.samples:6.1%}  {name}")


if __name__ == "__main__":
    main()
