"""Readers of the files in Flickr8k_text.zip: captions, and the experts' and the crowd's judgments of captions.

Shape suffixes: N observations.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vlp_models.errors import DataError
from vlp_models.metrics.score import FloatArray

SCALE = 4  # of the experts

Captions = Mapping[str, Mapping[str, str]]  # image, without its suffix -> number of the caption -> text


@dataclass(frozen=True, kw_only=True, eq=False)
class Judgments:
    """Rated captions, one observation per rating.

    images         of each observation
    candidates     the captions
    references     by image
    ratings_N      higher is better
    other_experts_N  mean rating of the same caption by the other experts; None for the crowd
    left_out       pairs whose caption is among the references of the image
    """

    images: Sequence[str]
    candidates: Sequence[str]
    references: Mapping[str, Sequence[str]]
    ratings_N: FloatArray
    other_experts_N: FloatArray | None = None
    left_out: int = 0


def read_captions(file: Path) -> Captions:
    """Read Flickr8k.token.txt (IMAGE#NUMBER, tab, caption), or a CSV with the columns image and caption.

    Raises:
        DataError: a line is not of this layout; the message names it.
    """
    captions: dict[str, dict[str, str]] = {}
    if _lines(file)[:1] == ["image,caption"]:
        for line, row in enumerate(csv.reader(_lines(file)), 1):
            if len(row) != 2 or not all(row):
                raise DataError(f"{file}:{line}: expected an image and a caption")
            if line > 1:
                image_captions = captions.setdefault(_stem(row[0]), {})
                image_captions[str(len(image_captions))] = " ".join(row[1].split())
        return captions
    for where, fields in _rows(file, 2):
        image, number = _caption_id(fields[0], where)
        image_captions, text = captions.setdefault(image, {}), " ".join(fields[1].split())
        if number in image_captions:
            raise DataError(f"{where}: caption {fields[0]} is listed twice")
        if not text:
            raise DataError(f"{where}: caption {fields[0]} is empty")
        image_captions[number] = text
    return captions


def read_expert(file: Path, captions: Captions) -> Judgments:
    """Read ExpertAnnotations.txt: image, caption id and three ratings from 1 to 4, separated by tabs.

    Raises:
        DataError: a line is not of this layout, or its image or caption is unknown; the message names it.
    """
    images, candidates, ratings, others, left_out = [], [], [], [], 0
    for where, (image, caption, *texts) in _rows(file, 5):
        if any(text not in map(str, range(1, SCALE + 1)) for text in texts):
            raise DataError(f"{where}: ratings {', '.join(texts)}: each must be 1, 2, 3 or 4")
        stem, candidate = _look_up(image, caption, captions, where)
        if candidate in captions[stem].values():
            left_out += 1
            continue
        expert_ratings = [int(text) for text in texts]
        for rating in expert_ratings:
            images.append(stem)
            candidates.append(candidate)
            ratings.append(rating)
            others.append((sum(expert_ratings) - rating) / (len(expert_ratings) - 1))
    references = {stem: list(captions[stem].values()) for stem in images}
    return _checked(
        file,
        Judgments(
            images=images,
            candidates=candidates,
            references=references,
            ratings_N=np.array(ratings, np.float64),
            other_experts_N=np.array(others, np.float64),
            left_out=left_out,
        ),
    )


def read_crowd(file: Path, captions: Captions) -> Judgments:
    """Read CrowdFlowerAnnotations.txt: image, caption id, share of yes, number of yes and of no, separated by tabs.

    Raises:
        DataError: a line is not of this layout, its image or caption is unknown, its numbers disagree, or an image has
            no caption left as reference; the message names it.
    """
    images, candidates, ratings = [], [], []
    for where, (image, caption, share, yes, no) in _rows(file, 5):
        if not (yes.isdecimal() and no.isdecimal()) or int(yes) + int(no) == 0:
            raise DataError(f"{where}: {yes} yes and {no} no: both must be whole numbers, not both 0")
        rating = int(yes) / (int(yes) + int(no))
        if not _is_close(share, rating):
            raise DataError(f"{where}: a share of {share} is not that of {yes} yes and {no} no ({rating:.4f})")
        stem, candidate = _look_up(image, caption, captions, where)
        images.append(stem)
        candidates.append(candidate)
        ratings.append(rating)
    judged: dict[str, set[str]] = {}
    for stem, candidate in zip(images, candidates, strict=True):
        judged.setdefault(stem, set()).add(candidate)
    references = {stem: [text for text in captions[stem].values() if text not in judged[stem]] for stem in judged}
    if empty := [stem for stem, texts in references.items() if not texts]:
        raise DataError(f"{file}: all captions of {empty[0]} are judged for it, so it has no reference left")
    judgments = Judgments(
        images=images, candidates=candidates, references=references, ratings_N=np.array(ratings, np.float64)
    )
    return _checked(file, judgments)


def _checked(file: Path, judgments: Judgments) -> Judgments:
    if not len(judgments.ratings_N):
        raise DataError(f"{file}: no judgments")
    return judgments


def _is_close(share: str, rating: float) -> bool:
    try:
        return abs(float(share) - rating) < 1e-3
    except ValueError:
        return False


def _look_up(image: str, caption: str, captions: Captions, where: str) -> tuple[str, str]:
    """Return the image and the text of a caption."""
    owner, number = _caption_id(caption, where)
    if number not in captions.get(owner, {}):
        raise DataError(f"{where}: unknown caption {caption}")
    if not captions.get(_stem(image)):
        raise DataError(f"{where}: {image} has no caption to be its reference")
    return _stem(image), captions[owner][number]


def _caption_id(text: str, where: str) -> tuple[str, str]:
    image, mark, number = text.partition("#")
    if not image or not mark or not number.isdecimal():
        raise DataError(f"{where}: {text!r} is not a caption id such as 1000268201_693b08cb0e.jpg#0")
    return _stem(image), number


def _stem(image: str) -> str:
    """Return the name up to the first dot: one image is listed as both .jpg and .jpg.1."""
    return image.partition(".")[0]


def _rows(file: Path, fields: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the fields of each line."""
    for number, line in enumerate(_lines(file), 1):
        parts = line.split("\t")
        if len(parts) != fields:
            raise DataError(f"{file}:{number}: {len(parts)} tab-separated fields instead of {fields}: {line[:80]!r}")
        yield f"{file}:{number}", [field.strip() for field in parts]


def _lines(file: Path) -> list[str]:
    """Return the lines, without empty ones at the end."""
    try:
        return file.read_bytes().decode("utf-8").replace("\r\n", "\n").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from None
