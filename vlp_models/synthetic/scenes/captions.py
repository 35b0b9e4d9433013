"""Captions of scenes: five annotators with different habits. All are truthful; one of them misspells."""

from __future__ import annotations

from collections import Counter

import numpy as np

from vlp_models.synthetic.scenes.language import LEXICON, NUMBERS, Description, misspell
from vlp_models.synthetic.scenes.scene import (
    COLORS,
    PLACES,
    RELATIONS,
    SHAPES,
    Scene,
    SceneObject,
    is_at,
    is_related,
)

CARELESS_CAPTIONS = 0.2  # share of the careless annotator's captions with misspellings
CARELESS_WORDS = 0.08  # share of misspelled words in such a caption; at least one
_MOST_COLORS = 4  # maximum number in "shapes in ..."
_MOST_PLACED = 3  # maximum number of objects with positions in one caption


def write_captions(scene: Scene, rng: np.random.Generator, misspelled: float = CARELESS_CAPTIONS) -> list[str]:
    """Return one caption per annotator, in a fixed order: counts, relations, salient object, positions, careless.

    misspelled: share of the careless annotator's captions that contain misspellings.
    """
    habits = (describe_counts, describe_relation, describe_salient, describe_places)
    texts = [habit(scene, rng) for habit in habits]
    # The careless annotator has the habit of one of the others, drawn for each scene.
    careless = habits[rng.integers(len(habits))](scene, rng)
    if rng.random() < misspelled:
        careless = _misspell_caption(careless, rng)
    # The careless annotator writes neither a capital letter nor a period.
    return [text[0].upper() + text[1:] + "." for text in texts] + [careless]


def describe_counts(scene: Scene, rng: np.random.Generator) -> str:
    """`three circles and a red star`: how many there are of each kind, or in total."""
    by_kind = Counter(Description(shape=item.shape, color=item.color) for item in scene.objects)
    by_shape = Counter(Description(shape=item.shape) for item in scene.objects)
    # In total, by kind if there are few kinds, or by shape.
    draw = rng.random()
    if draw < 0.12:
        groups = Counter({Description(): len(scene.objects)})
    elif len(by_kind) <= 3 and draw < 0.75:
        groups = by_kind
    else:
        groups = by_shape
    # The largest group first; ties in the order of shapes and colors.
    ordered = sorted(groups.items(), key=lambda group: (-group[1], _rank(group[0])))
    first_is_single = ordered[0][1] == 1
    article = "a" if rng.random() < 0.8 else "one"
    listed = _join_list([_group(description, count, article, rng) for description, count in ordered])
    return _add_frame(listed, "one" if first_is_single else "many", rng)


def describe_relation(scene: Scene, rng: np.random.Generator) -> str:
    """`a small red circle is left of a striped blue square`: a pair with a clear direction."""
    objects = scene.objects
    # Of different kinds, and in the direction that is clearly the larger one.
    pairs = [
        (a, relation, b)
        for a in objects
        for b in objects
        for relation in RELATIONS
        if a is not b and is_related(a, relation, b) and _is_main_direction(a, relation, b) and a.category != b.category
    ]
    if not pairs:
        return describe_salient(scene, rng)
    a, relation, b = pairs[rng.integers(len(pairs))]
    first = _noun_phrase(a, scene, rng, detail=0.3)
    second = _noun_phrase(b, scene, rng, detail=0.3)
    where = _pick("R", relation, rng, plain=0.7)
    if rng.random() < 0.4:
        return f"{_pick('I', 'one', rng)} {first} {where} {second}"
    verb = rng.choice(["", "is", "sits", "lies"], p=[0.3, 0.5, 0.1, 0.1])
    # An empty verb leaves two spaces.
    return f"{first} {verb} {where} {second}".replace("  ", " ")


def describe_salient(scene: Scene, rng: np.random.Generator) -> str:
    """`a large red circle in the middle`: the most salient object, which is the largest and most central one."""
    item = _by_salience(scene)[0]
    phrase = _noun_phrase(item, scene, rng, detail=0.6)
    if rng.random() < 0.35:
        return _add_frame(f"{phrase} {_pick('O', '', rng, plain=0.4)}", "one", rng, closing=0.0)
    position = _position_of(item)
    if position is None:
        return _add_frame(phrase, "one", rng)
    where = _pick("L", position, rng, plain=0.6)
    draw = rng.random()
    if draw < 0.35:
        return f"{phrase} is {where}"
    ending = " of the picture" if draw < 0.5 else ""
    return _add_frame(f"{phrase} {where}{ending}", "one", rng, closing=0.0)


def describe_places(scene: Scene, rng: np.random.Generator) -> str:
    """`a red circle at the top, a blue star in the middle and a black square on the left`; sometimes the colors."""
    if rng.random() < 0.2:
        return describe_colors(scene, rng)
    phrases = []
    # Two or three objects, the most salient one first.
    for item in _by_salience(scene)[: rng.integers(2, _MOST_PLACED + 1)]:
        position = _position_of(item)
        where = _pick("L", position, rng, plain=0.8) if position else ""
        phrases.append(f"{_noun_phrase(item, scene, rng, detail=0.15)} {where}".rstrip())
    return _add_frame(_join_list(phrases), "one", rng, closing=0.0)


def describe_colors(scene: Scene, rng: np.random.Generator) -> str:
    """`shapes in red , blue and green`: the colors, most frequent first."""
    tally = Counter(item.color for item in scene.objects)
    names = sorted(tally, key=lambda color: (-tally[color], COLORS.index(color)))
    noun = "shapes" if rng.random() < 0.7 else "objects"
    draw = rng.random()
    if draw < 0.3:
        return f"{rng.choice(['the', 'all the'])} {noun} are {_join_list(names)}"
    names = names[:_MOST_COLORS]
    if draw < 0.6:
        return _add_frame(f"{_join_list(names)} {noun}", "many", rng)
    if draw < 0.8:
        noun = f"{NUMBERS[len(scene.objects)]} {noun}"
    return _add_frame(f"{noun} in {_join_list(names)}", "many", rng, closing=0.0)


def _add_frame(text: str, number: str, rng: np.random.Generator, closing: float = 0.25) -> str:
    """Add an opening to half of the sentences, and a closing such as `in this picture` to some."""
    draw = rng.random()
    # Half of the sentences have no opening, a quarter one that agrees in number, a quarter any.
    if draw < 0.5:
        # The first three closings; `of the picture` only fits after a position.
        return text if rng.random() > closing else f"{text} {rng.choice(LEXICON['E'][''][:3])}"
    if draw < 0.75:
        return f"{_pick('I', number, rng, plain=0.75)} {text}"
    return f"{_pick('I', 'any', rng)} {text}"


def _noun_phrase(item: SceneObject, scene: Scene, rng: np.random.Generator, detail: float) -> str:
    """Return `the star` in some cases if it is the only one; else color, shape and some details."""
    if rng.random() < 0.12 and len(Description(shape=item.shape).find_in(scene)) == 1:
        return f"the {item.shape}"
    texture, after = "", ""
    # That an object is solid is rarely worth a word.
    if rng.random() < (0.15 * detail if item.texture == "solid" else detail):
        if item.texture != "solid" and rng.random() < 0.25:
            after = LEXICON["W"][item.texture][0]
        else:
            texture = _pick("X", item.texture, rng, plain=0.8)
    size = _pick("S", item.size, rng, plain=0.7) if rng.random() < detail else ""
    noun = "disc" if item.shape == "circle" and rng.random() < 0.15 else item.shape
    return " ".join(word for word in ("a", size, texture, item.color, noun, after) if word)


def _group(description: Description, count: int, article: str, rng: np.random.Generator) -> str:
    noun = description.shape or "shape"
    if count > 1:
        noun += "s"
    elif rng.random() < 0.05 and description.shape == "circle":
        noun = "disc"
    number = article if count == 1 else NUMBERS[count]
    return " ".join(filter(None, (number, description.color, noun)))


def _join_list(items: list[str]) -> str:
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]


def _pick(part: str, value: str, rng: np.random.Generator, plain: float = 0.5) -> str:
    """Return a phrase of the lexicon: the most common with probability `plain`, else any other."""
    phrases = LEXICON[part][value]
    if len(phrases) == 1 or rng.random() < plain:
        return phrases[0]
    return phrases[rng.integers(1, len(phrases))]


def _rank(description: Description) -> tuple[int, int]:
    """Return a key that orders descriptions by shape, then by color; those that name none come first."""
    shape = SHAPES.index(description.shape) if description.shape else -1
    color = COLORS.index(description.color) if description.color else -1
    return shape, color


def _is_main_direction(a: SceneObject, relation: str, b: SceneObject) -> bool:
    """Return whether a person would name this direction: it is the larger of the two differences, by a clear margin."""
    across, down = abs(a.x - b.x), abs(a.y - b.y)
    main, other = (across, down) if relation in ("left", "right") else (down, across)
    return main > 0.15 and main > 1.3 * other


def _by_salience(scene: Scene) -> list[SceneObject]:
    """Return the objects, large ones first, then central ones."""
    return sorted(scene.objects, key=lambda item: (item.size != "large", abs(item.x - 0.5) + abs(item.y - 0.5)))


def _position_of(item: SceneObject) -> str | None:
    """Return the position a person would name; None if it is ambiguous."""
    if is_at(item, "middle"):
        return "middle"
    # The nearest edge: minus the distance from each one, as fractions of the side
    nearness = {"top": -item.y, "bottom": item.y - 1, "left": -item.x, "right": item.x - 1}
    position = max(PLACES[1:], key=nearness.__getitem__)
    return position if is_at(item, position) else None


def _misspell_caption(text: str, rng: np.random.Generator) -> str:
    """Misspell some words, and at least one that can be misspelled."""
    words = text.split(" ")
    # Starting at a random word, which must be misspelled; if it cannot be, the next one must.
    must = rng.integers(len(words))
    for index in [*range(must, len(words)), *range(must)]:
        if index == must or rng.random() < CARELESS_WORDS:
            # A comma stays at the end of its word.
            bare = words[index].rstrip(",")
            misspelled = misspell(bare, rng)
            if misspelled == bare and index == must:
                must = (must + 1) % len(words)
            words[index] = misspelled + words[index][len(bare) :]
    return " ".join(words)
