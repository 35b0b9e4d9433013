"""Scenes of three boxes as in NLVR v1, towers of squares or scattered shapes without overlap, and how they are drawn.

The geometry follows NLVR's training split: boxes of 100x100 pixels, items of 10, 20 or 30 pixels whose position is
drawn over the whole box and clamped (so that a tenth, a fifth and over a quarter of them touch the right wall, and as
many the base), towers of 1 to 4 blocks of 20 pixels, one pixel apart. Images are 400x100 PNGs: three light gray boxes
with 50 pixels of dark gray between them. Colors and edges were measured on NLVR's training images: squares are sharp,
circles and triangles are smoothed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

from PIL import Image, ImageDraw

COLORS = ("yellow", "black", "blue")
SHAPES = ("circle", "square", "triangle")
SIZES = (10, 20, 30)
BOX = 100  # pixels a side
# A tower's blocks share one left edge, `TOWER_X`, and one side, `BLOCK`.
TOWER_X, BLOCK = 40, 20
TOWER_Y = (80, 59, 38, 17)  # base first
MAX_ITEMS = 7  # in a scattered box

# As NLVR's JSON spells them; the sentences use the names above.
_NLVR_COLOR = {"yellow": "Yellow", "black": "Black", "blue": "#0099ff"}
Edit = Callable[[random.Random, list[list["Item"]]], None]


class Item(NamedTuple):
    """`x`, `y`: top left pixel of its bounding square within its box; `size`: side of the square."""

    shape: str
    color: str
    size: int
    x: int
    y: int

    def gap_to_nearest_wall(self) -> int:
        # Distances to the left, top, right and bottom wall; 0 touches, and no item lies outside.
        return min(self.x, self.y, BOX - self.x - self.size, BOX - self.y - self.size)


Box = tuple[Item, ...]  # of a tower: base first


class Scene(NamedTuple):
    kind: Literal["tower", "scatter"]
    boxes: tuple[Box, Box, Box]

    def items(self) -> list[Item]:
        return [item for box in self.boxes for item in box]


def sample(rng: random.Random, kind: Literal["tower", "scatter"], max_items: int = MAX_ITEMS) -> Scene:
    """Return three random boxes; `max_items` limits a scattered one, towers have up to four blocks."""
    if kind == "tower":
        boxes = [_tower([rng.choice(COLORS) for _ in range(rng.randint(1, 4))]) for _ in range(3)]
    else:
        boxes = [_scatter(rng, [_any_item(rng) for _ in range(rng.randint(1, max_items))]) for _ in range(3)]
    return Scene(kind, (boxes[0], boxes[1], boxes[2]))


def rearrange(rng: random.Random, scene: Scene, max_items: int = MAX_ITEMS) -> Scene:
    """Return the same items in other boxes and positions: how NLVR makes two of the four images of each sentence."""
    items = scene.items()
    rng.shuffle(items)
    if scene.kind == "tower":
        # Draw among all splits of the same number of blocks into three towers, so no block is lost.
        heights = rng.choice([h for h in _HEIGHTS if sum(h) == len(items)])
        cut = [items[: heights[0]], items[heights[0] : heights[0] + heights[1]], items[heights[0] + heights[1] :]]
        boxes = [_tower([item.color for item in part]) for part in cut]
    else:
        # One item per box first, so that no box of the new scene is empty; the rest is spread over boxes with room.
        parts: list[list[Item]] = [[items.pop()] for _ in range(3)]
        for item in items:
            rng.choice([part for part in parts if len(part) < max_items]).append(item)
        boxes = [_scatter(rng, part) for part in parts]
    return Scene(scene.kind, (boxes[0], boxes[1], boxes[2]))


def edit(rng: random.Random, scene: Scene, max_items: int = MAX_ITEMS) -> Scene:
    """Return a scene that differs from `scene` in one detail: a color, a shape, a position, an item more or less."""
    boxes = [list(box) for box in scene.boxes]
    full = scene.kind == "scatter" and all(len(box) >= max_items for box in boxes)
    # With all boxes full `_add` would change nothing or exceed the limit.
    edits = _TOWER_EDITS if scene.kind == "tower" else [e for e in _SCATTER_EDITS if not (full and e is _add)]
    rng.choice(edits)(rng, boxes)
    # `_add` fills up to `MAX_ITEMS`, which is more than a smaller `max_items` allows: draw another edit.
    if scene.kind == "scatter" and any(len(box) > max_items for box in boxes):
        return edit(rng, scene, max_items)
    if scene.kind == "tower":
        # Edits leave the positions as they were: a tower's blocks are placed again from the base up.
        done = [_tower([item.color for item in box]) for box in boxes]
    else:
        done = [tuple(box) for box in boxes]
    return Scene(scene.kind, (done[0], done[1], done[2]))


def structured_rep(scene: Scene) -> list[list[dict[str, Any]]]:
    """Return the scene in NLVR's JSON form: the items of a box sorted by color."""
    return [
        [
            {
                "x_loc": item.x,
                "y_loc": item.y,
                "size": item.size,
                "type": item.shape,
                "color": _NLVR_COLOR[item.color],
            }
            # As in NLVR, whose lists are sorted by color: the order of a tower's blocks is in `y_loc` only.
            for item in sorted(box, key=lambda item: COLORS.index(item.color))
        ]
        for box in scene.boxes
    ]


# (left, middle, right) heights of every possible triple of towers.
_HEIGHTS = [(a, b, c) for a in range(1, 5) for b in range(1, 5) for c in range(1, 5)]


def _tower(colors: list[str]) -> Box:
    # `zip` stops at the shorter one: as many blocks as colors, from the base up.
    return tuple(Item("square", color, BLOCK, TOWER_X, y) for color, y in zip(colors, TOWER_Y, strict=False))


def _any_item(rng: random.Random) -> Item:
    return Item(rng.choice(SHAPES), rng.choice(COLORS), rng.choice(SIZES), 0, 0)


def _scatter(rng: random.Random, items: list[Item]) -> Box:
    placed: list[Item] = []
    for item in sorted(items, key=lambda item: -item.size):  # large items first: they need the space
        moved = _find_place(rng, item, placed)
        if moved is not None:
            # An item that finds no free position is left out, so a crowded box has fewer items than were drawn.
            placed.append(moved)
    return tuple(placed)


def _find_place(rng: random.Random, item: Item, placed: list[Item]) -> Item | None:
    """Return `item` moved to where it touches no other item, or None after 60 tries."""
    for _ in range(60):
        limit = BOX - item.size
        # Draw over the whole box and clamp: the items cut off at the right and the base touch these walls, as in
        # NLVR.
        moved = item._replace(x=min(rng.randrange(BOX), limit), y=min(rng.randrange(BOX), limit))
        # A gap of at least one pixel: two items never touch, so their outlines stay separate.
        if all(gap(moved, other) >= 1 for other in placed):
            return moved
    return None


def gap(a: Item, b: Item) -> int:
    """Return the larger of the horizontal and vertical distance between two squares; negative if they overlap."""
    # One of the two differences is the distance, the other is negative; both are negative where the sides overlap.
    across = max(a.x - b.x - b.size, b.x - a.x - a.size)
    down = max(a.y - b.y - b.size, b.y - a.y - a.size)
    return max(across, down)


def _some(rng: random.Random, boxes: list[list[Item]]) -> tuple[list[Item], int]:
    # Empty boxes are skipped: there is nothing to edit in them.
    box = rng.choice([box for box in boxes if box])
    return box, rng.randrange(len(box))


def _recolor(rng: random.Random, boxes: list[list[Item]]) -> None:
    box, at = _some(rng, boxes)
    box[at] = box[at]._replace(color=rng.choice([c for c in COLORS if c != box[at].color]))


def _reshape(rng: random.Random, boxes: list[list[Item]]) -> None:
    box, at = _some(rng, boxes)
    box[at] = box[at]._replace(shape=rng.choice([s for s in SHAPES if s != box[at].shape]))


def _move(rng: random.Random, boxes: list[list[Item]]) -> None:
    box, at = _some(rng, boxes)
    # Compare with the other items only; without a free position the item stays.
    box[at] = _find_place(rng, box[at], box[:at] + box[at + 1 :]) or box[at]


def _to_wall_or_off(rng: random.Random, boxes: list[list[Item]]) -> None:
    """Move one item to a wall or, if it was at one, a few pixels away from it."""
    box, at = _some(rng, boxes)
    item, limit = box[at], BOX - box[at].size
    if item.gap_to_nearest_wall() == 0:
        step = rng.randint(4, 9)
        # Clamp both coordinates at least `step` away from every wall.
        inner = item._replace(x=min(max(item.x, step), limit - step), y=min(max(item.y, step), limit - step))
    else:
        # Left, right, top or bottom wall, with the other coordinate unchanged.
        x, y = rng.choice([(0, item.y), (limit, item.y), (item.x, 0), (item.x, limit)])
        inner = item._replace(x=x, y=y)
    # The edit is dropped if it would make two items overlap.
    if all(gap(inner, other) >= 1 for k, other in enumerate(box) if k != at):
        box[at] = inner


def _add(rng: random.Random, boxes: list[list[Item]]) -> None:
    room = [box for box in boxes if len(box) < MAX_ITEMS]
    if not room:
        return
    box = rng.choice(room)
    item = _find_place(rng, _any_item(rng), box)
    if item is not None:
        box.append(item)


def _remove(rng: random.Random, boxes: list[list[Item]]) -> None:
    # A box keeps at least one item.
    many = [box for box in boxes if len(box) > 1]
    if many:
        box = rng.choice(many)
        box.pop(rng.randrange(len(box)))


def _swap_colors(rng: random.Random, boxes: list[list[Item]]) -> None:
    """Swap the colors of two items: every count over the whole image stays the same."""
    places = [(box, at) for box in boxes for at in range(len(box))]
    # With a single item the swap exchanges it with itself.
    (a, i), (b, j) = rng.sample(places, 2) if len(places) > 1 else (places[0], places[0])
    a[i], b[j] = a[i]._replace(color=b[j].color), b[j]._replace(color=a[i].color)


def _restack(rng: random.Random, boxes: list[list[Item]]) -> None:
    rng.shuffle(rng.choice(boxes))


def _add_block(rng: random.Random, boxes: list[list[Item]]) -> None:
    low = [box for box in boxes if len(box) < 4]
    if low:
        box = rng.choice(low)
        # Position 0, 0 is a placeholder: `edit` builds the tower again from its colors.
        box.insert(rng.randint(0, len(box)), Item("square", rng.choice(COLORS), BLOCK, 0, 0))


_TOWER_EDITS: list[Edit] = [_recolor, _swap_colors, _restack, _add_block, _remove]
_SCATTER_EDITS: list[Edit] = [_recolor, _reshape, _move, _to_wall_or_off, _add, _remove, _swap_colors]


# Three boxes of 100 pixels, 50 pixels apart: 3 * 100 + 2 * 50 = 400.
WIDTH, HEIGHT, STRIDE = 400, 100, 150
_PAINT = {"yellow": (255, 255, 0), "black": (0, 0, 0), "blue": (0, 153, 255)}
_BACKGROUND, _SEPARATOR = (211, 211, 211), (128, 128, 128)
_SMOOTH = 8  # each pixel averages 8x8 samples


def draw(scene: Scene, order: tuple[int, int, int] = (0, 1, 2)) -> Image.Image:
    """Return the scene as an RGB image, box `order[0]` leftmost."""
    image = Image.new("RGB", (WIDTH, HEIGHT), _SEPARATOR)
    for slot, index in enumerate(order):
        left = slot * STRIDE
        image.paste(_BACKGROUND, (left, 0, left + BOX, HEIGHT))
        for item in scene.boxes[index]:
            # The stamp is the mask: it blends the color into the background at smoothed edges.
            image.paste(_PAINT[item.color], (left + item.x, item.y), _stamp(item.shape, item.size))
    return image


@cache
def _stamp(shape: str, size: int) -> Image.Image:
    """Return how much of each pixel the shape covers, 0 to 255."""
    # Draw at eight times the size and average down, which smooths curved and slanted edges but not those of a square.
    big = size * _SMOOTH
    mask = Image.new("L", (big, big), 0)
    pen = ImageDraw.Draw(mask)
    if shape == "square":
        pen.rectangle((0, 0, big, big), fill=255)
    elif shape == "circle":
        pen.ellipse((0, 0, big - 1, big - 1), fill=255)
    else:
        pen.polygon([(big / 2 - 0.5, 0), (big - 1, big - 1), (0, big - 1)], fill=255)
    return mask.resize((size, size), Image.Resampling.BOX)
