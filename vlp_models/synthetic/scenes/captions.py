"""Five annotators with different habits describe a scene. All they say is true; one can't always spell."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from vlp_models.params import GeneratorParams
from vlp_models.synthetic.scenes.language import LEXICON, NUMBERS, Description
from vlp_models.synthetic.scenes.language import misspelled as slip_of
from vlp_models.synthetic.scenes.scene import (
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    Scene,
    SceneObject,
    located,
    related,
)

CARELESS_CAPTIONS = 0.2  # share of the careless annotator's captions that hold misspellings
CARELESS_WORDS = 0.08  # share of the words of such a caption; at least one
_MOST_COLOURS = 4  # that "shapes in ..." lists
_MOST_PLACED = 3  # objects whose places one caption tells


def captions(scene: Scene, rng: np.random.Generator, misspelled: float = CARELESS_CAPTIONS) -> list[str]:
    """One caption from each annotator, in a fixed order: who counts, relates, points, places, is careless.

    misspelled: share of the last one's captions that hold misspellings.
    """
    habits = (count, relate, point, place)
    texts = [habit(scene, rng) for habit in habits]
    careless = habits[rng.integers(len(habits))](scene, rng)
    if rng.random() < misspelled:
        careless = _slip(careless, rng)
    return [text[0].upper() + text[1:] + "." for text in texts] + [careless]


def count(scene: Scene, rng: np.random.Generator) -> str:
    """`three circles and a red star`: how many there are of each, or in all."""
    by_kind = Counter(Description(shape=o.shape, colour=o.colour) for o in scene.objects)
    by_shape = Counter(Description(shape=o.shape) for o in scene.objects)
    draw = rng.random()
    if draw < 0.12:
        groups = Counter({Description(): len(scene.objects)})
    elif len(by_kind) <= 3 and draw < 0.75:
        groups = by_kind
    else:
        groups = by_shape
    ordered = sorted(groups.items(), key=lambda g: (-g[1], _rank(g[0])))
    first_is_one = ordered[0][1] == 1
    one = "a" if rng.random() < 0.8 else "one"
    listed = _listed([_group(what, n, one, rng) for what, n in ordered])
    return _framed(listed, "one" if first_is_one else "many", rng)


def relate(scene: Scene, rng: np.random.Generator) -> str:
    """`a small red circle is left of a striped blue square`: a pair whose direction is plain to see."""
    objects = scene.objects
    pairs = [
        (a, relation, b)
        for a in objects
        for b in objects
        for relation in RELATIONS
        if a is not b and related(a, relation, b) and _mainly(a, relation, b) and a.category != b.category
    ]
    if not pairs:
        return point(scene, rng)
    a, relation, b = pairs[rng.integers(len(pairs))]
    first, second = (_noun_phrase(o, scene, rng, detail=0.3) for o in (a, b))
    where = _pick("R", relation, rng, plain=0.7)
    if rng.random() < 0.4:
        return f"{_pick('I', 'one', rng)} {first} {where} {second}"
    verb = rng.choice(["", "is", "sits", "lies"], p=[0.3, 0.5, 0.1, 0.1])
    return f"{first} {verb} {where} {second}".replace("  ", " ")


def point(scene: Scene, rng: np.random.Generator) -> str:
    """`a large red circle in the middle`: the salient object, which is the largest and most central one."""
    item = _by_salience(scene)[0]
    phrase = _noun_phrase(item, scene, rng, detail=0.6)
    if rng.random() < 0.35:
        return _framed(f"{phrase} {_pick('O', '', rng, plain=0.4)}", "one", rng, closing=0.0)
    place = _place_of(item)
    if place is None:
        return _framed(phrase, "one", rng)
    where = _pick("L", place, rng, plain=0.6)
    draw = rng.random()
    if draw < 0.35:
        return f"{phrase} is {where}"
    ending = " of the picture" if draw < 0.5 else ""
    return _framed(f"{phrase} {where}{ending}", "one", rng, closing=0.0)


def place(scene: Scene, rng: np.random.Generator) -> str:
    """`a red circle at the top, a blue star in the middle and a black square on the left`; now and then the colours."""
    if rng.random() < 0.2:
        return sum_up(scene, rng)
    phrases = []
    for item in _by_salience(scene)[: rng.integers(2, _MOST_PLACED + 1)]:
        at = _place_of(item)
        where = _pick("L", at, rng, plain=0.8) if at else ""
        phrases.append(f"{_noun_phrase(item, scene, rng, detail=0.15)} {where}".rstrip())
    return _framed(_listed(phrases), "one", rng, closing=0.0)


def sum_up(scene: Scene, rng: np.random.Generator) -> str:
    """`shapes in red , blue and green`: the colours, the most frequent first."""
    tally = Counter(o.colour for o in scene.objects)
    names = sorted(tally, key=lambda c: (-tally[c], COLOURS.index(c)))
    noun = "shapes" if rng.random() < 0.7 else "objects"
    draw = rng.random()
    if draw < 0.3:
        return f"{rng.choice(['the', 'all the'])} {noun} are {_listed(names)}"
    names = names[:_MOST_COLOURS]
    if draw < 0.6:
        return _framed(f"{_listed(names)} {noun}", "many", rng)
    if draw < 0.8:
        noun = f"{NUMBERS[len(scene.objects)]} {noun}"
    return _framed(f"{noun} in {_listed(names)}", "many", rng, closing=0.0)


def _framed(text: str, number: str, rng: np.random.Generator, closing: float = 0.25) -> str:
    """Half of the sentences begin with the thing itself; some end with `in this picture`."""
    draw = rng.random()
    if draw < 0.5:
        return text if rng.random() > closing else f"{text} {rng.choice(LEXICON['E'][''][:3])}"
    if draw < 0.75:
        return f"{_pick('I', number, rng, plain=0.75)} {text}"
    return f"{_pick('I', 'any', rng)} {text}"


def _noun_phrase(item: SceneObject, scene: Scene, rng: np.random.Generator, detail: float) -> str:
    """`the star` where it is the only one and the annotator feels like it; else colour, shape and some details."""
    if rng.random() < 0.12 and len(Description(shape=item.shape).among(scene)) == 1:
        return f"the {item.shape}"
    texture, after = "", ""
    if rng.random() < (0.15 * detail if item.texture == "solid" else detail):
        if item.texture != "solid" and rng.random() < 0.25:
            after = LEXICON["W"][item.texture][0]
        else:
            texture = _pick("X", item.texture, rng, plain=0.8)
    size = _pick("S", item.size, rng, plain=0.7) if rng.random() < detail else ""
    noun = "disc" if item.shape == "circle" and rng.random() < 0.15 else item.shape
    return " ".join(word for word in ("a", size, texture, item.colour, noun, after) if word)


def _group(what: Description, n: int, one: str, rng: np.random.Generator) -> str:
    noun = what.shape or "shape"
    if n > 1:
        noun += "s"
    elif rng.random() < 0.05 and what.shape == "circle":
        noun = "disc"
    return " ".join(word for word in (one if n == 1 else NUMBERS[n], what.colour, noun) if word)


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _pick(part: str, value: str, rng: np.random.Generator, plain: float = 0.5) -> str:
    """A phrase of the lexicon: the plainest with chance `plain`, else any other."""
    phrases = LEXICON[part][value]
    if len(phrases) == 1 or rng.random() < plain:
        return phrases[0]
    return phrases[rng.integers(1, len(phrases))]


def _rank(what: Description) -> tuple[int, int]:
    return (
        SHAPES.index(what.shape) if what.shape else -1,
        COLOURS.index(what.colour) if what.colour else -1,
    )


def _mainly(a: SceneObject, relation: str, b: SceneObject) -> bool:
    """Whether the direction is the one a person would name: the larger of the two differences, and a clear one."""
    across, down = abs(a.x - b.x), abs(a.y - b.y)
    main, other = (across, down) if relation in ("left", "right") else (down, across)
    return main > 0.15 and main > 1.3 * other


def _by_salience(scene: Scene) -> list[SceneObject]:
    """The large objects first, then the central ones."""
    return sorted(scene.objects, key=lambda o: (o.size != "large", abs(o.x - 0.5) + abs(o.y - 0.5)))


def _place_of(item: SceneObject) -> str | None:
    """The place a person would name; None where none is plain."""
    place = "middle" if located(item, "middle") else max(PLACES[1:], key=lambda p: _towards(item, p))
    return place if located(item, place) else None


def _towards(item: SceneObject, place: str) -> float:
    return {"top": -item.y, "bottom": item.y - 1, "left": -item.x, "right": item.x - 1}[place]


def _slip(text: str, rng: np.random.Generator) -> str:
    """Misspells some words, and at least one of those that can be."""
    words = text.split(" ")
    must = rng.integers(len(words))
    for at in [*range(must, len(words)), *range(must)]:
        if at == must or rng.random() < CARELESS_WORDS:
            bare = words[at].rstrip(",")
            slip = slip_of(bare, rng)
            if slip == bare and at == must:
                must = (must + 1) % len(words)
            words[at] = slip + words[at][len(bare) :]
    return " ".join(words)


# What stands around a sentence, `{}`. No phrase is the beginning or the end of an annotator's sentence.
BOILERPLATE = (
    "stock photo of {}",
    "royalty free picture: {}",
    "{} buy now",
    "{} free shipping",
    "click to enlarge {}",
    "{} hd wallpaper download",
    "photo gallery - {}",
    "{} (page 1 of 3)",
)
_MIN_WORDS = 2  # that losing words leaves
_PLURALS = {shape + "s" for shape in SHAPES} | {"discs"}
NOUNS = frozenset({*SHAPES, "disc", *_PLURALS})  # the words that have a hypernym


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How often each fault occurs, 0 to 1.

    mismatched   of the alt texts, describe another scene
    hypernyms    of the nouns, replaced by `shape`
    dropped_words  of the words, left out
    boilerplate  of the alt texts, stand between words that say nothing about the picture
    """

    mismatched: float = 0.25
    hypernyms: float = 0.10
    dropped_words: float = 0.06
    boilerplate: float = 0.30

    @classmethod
    def of(cls, params: GeneratorParams) -> Noise:
        return cls(
            mismatched=params.mismatched,
            hypernyms=params.hypernyms,
            dropped_words=params.dropped_words,
            boilerplate=params.boilerplate,
        )


@dataclass(frozen=True, kw_only=True)
class AltText:
    """text: what the web says. clean: the sentence before its faults, true of the scene that it describes.
    mismatched: that is another scene than the image's."""

    text: str
    clean: str
    mismatched: bool


def alt_text(scene: Scene, other: Scene, rng: np.random.Generator, noise: Noise) -> AltText:
    """One alt text for `scene`; where it is mismatched, it describes `other`."""
    mismatched = bool(rng.random() < noise.mismatched)
    described = other if mismatched else scene
    told = captions(described, rng, misspelled=0.0)
    clean = told[rng.integers(len(told))]
    words = [hypernym(word) if rng.random() < noise.hypernyms else word for word in clean.split()]
    words = _lose(words, noise.dropped_words, rng)
    text = " ".join(words)
    if rng.random() < noise.boilerplate:
        text = BOILERPLATE[rng.integers(len(BOILERPLATE))].format(text)
    return AltText(text=text, clean=clean, mismatched=mismatched)


def hypernym(word: str) -> str:
    """`squares,` -> `shapes,`; a word that names no shape stays."""
    bare = word.rstrip(".,")
    if bare.lower() not in NOUNS:
        return word
    return ("shapes" if bare.lower() in _PLURALS else "shape") + word[len(bare) :]


def without_boilerplate(text: str) -> tuple[str, bool]:
    """The sentence in an alt text, and whether there were other words around it."""
    for phrase in BOILERPLATE:
        before, after = phrase.split("{}")
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            return text[len(before) : len(text) - len(after)], True
    return text, False


def _lose(words: list[str], share: float, rng: np.random.Generator) -> list[str]:
    kept = rng.random(len(words)) >= share
    if kept.sum() < min(_MIN_WORDS, len(words)):
        return words
    return [word for word, stays in zip(words, kept, strict=True) if stays]
