"""DAQUAR (Malinowski and Fritz 2014): questions about indoor photos of NYU Depth v2, each with one right answer.

A file has two lines per question: `what is on the desk in the image3 ?` and `book, tape_dispenser`. `all_qa_pairs.txt`
has all of them, and `train_images_list.txt` and `test_images_list.txt` divide the photos; or files such as
`qa.894.raw.train.txt` have one split each (`params.questions` names others, e.g. those of 37 classes). Photos are
`<params.images>/image3.jpg` or .png, or in `nyu_depth_images/`. There is no official val: `val_fraction: 0.1` holds out
a tenth of train's photos. The id of a question is its line, with the split of a file of one split: `train-17`. If
several files have one key, the file's name is part of it: `train-qa.894.raw.train-17`.

`image3` in a question becomes `image`: the number would let a text-only model memorize a photo's answers. An answer
with several things is a set: they are sorted, so that equal sets are equal texts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from vlp_models.contrib.research_formats.lists import ListedParams, read_lists
from vlp_models.data.formats.base import RecordError, Tables, fills, get_text, image_row, join_id
from vlp_models.data.formats.files import read_text, require_directory
from vlp_models.data.formats.splits import check_splits, hold_out
from vlp_models.data.images import FORMATS
from vlp_models.data.names import Names
from vlp_models.errors import DataError

ALL = "all_qa_pairs.txt"
LISTS = {"train": "train_images_list.txt", "test": "test_images_list.txt"}
FILES = {"train": "qa.894.raw.train.txt", "test": "qa.894.raw.test.txt"}
PHOTO_FOLDER = "nyu_depth_images"
PHOTO = re.compile(r"\b(image)\s*([0-9]+)\b")


@dataclass(frozen=True, kw_only=True)
class DaquarParams(ListedParams):
    """Keys of the format daquar."""

    file_keys: ClassVar[tuple[str, ...]] = (*ListedParams.file_keys, "questions")

    questions: dict[str, list[str]] = field(default_factory=dict)  # files by split, in place of the usual ones


@fills("questions")
def read(name: str, params: DaquarParams, base: Path) -> Tables:
    """Read DAQUAR; `params.limit` keeps the first questions of each split.

    Raises:
        DataError: the folder or its files are missing, or a file has no question about a photo.
    """
    root = require_directory(
        base, params.root, f"get DAQUAR from its authors' page and set data.{name}.root to its folder"
    )
    tables = Tables()
    files = _files(name, params, root)
    # `all_qa_pairs.txt` names no splits, so lists of photos must; other files are of one split each
    listed = "all" in files or bool(params.split_files) or bool(params.karpathy)  # else the split is that of the file
    lists = read_lists(name, params, root, LISTS, tables).splits if listed else {}
    names = Names(lists)
    # where the photos are, and the suffix of each
    folder = next((root / f for f in (params.images, PHOTO_FOLDER) if (root / f).is_dir()), root / params.images)
    photos = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in FORMATS] if folder.is_dir() else []
    endings = {path.stem: path.suffix for path in photos}
    counts: Counter[str] = Counter()
    splits: dict[str, str] = {}  # photo -> split
    for file_split, files_of_split in files.items():
        for file, prefix in _prefixes(file_split, files_of_split).items():
            for number, question, answer in _pairs(root / file, tables):
                provenance = f"{Path(file).name}:{number}"
                row_id = join_id(name, f"{prefix}{number}")
                with tables.record("questions", provenance, row_id):
                    # the last `image3` of a question names its photo
                    photo = f"image{PHOTO.findall(question)[-1][1]}"
                    photo = names.match(photo) or photo
                    if listed and photo not in lists:
                        tables.skipped["questions about unlisted photos"] += 1
                        continue
                    image_id = join_id(name, photo)
                    split = hold_out(tables, params, image_id, photo, lists[photo] if listed else file_split)
                    # a photo in two splits would leak answers
                    if splits.get(photo, split) != split:
                        raise RecordError(f"{photo} is {split} here and {splits[photo]} before", rule="split_disjoint")
                    if params.limit and counts[split] >= params.limit:
                        continue
                    # a set: sorted, and each thing once
                    parts = get_text({"answer": answer}, "answer").split(",")
                    answers = sorted({part.strip() for part in parts} - {""})
                    if not answers:
                        raise RecordError("no answer")
                    # the number would let a text-only model memorize a photo's answers
                    text = PHOTO.sub(r"\1", " ".join(get_text({"question": question}, "question").split()))
                    counts[split] += 1
                    # a photo is added with its first question
                    if photo not in splits:
                        splits[photo] = split
                        path = os.path.normpath(folder / f"{photo}{endings.get(photo, '.jpg')}")
                        image = image_row(image_id, source=name, split=split, path=path, provenance=provenance)
                        tables["images"].append(image)
                    tables["questions"].append(
                        {
                            "question_id": row_id,
                            "image_id": image_id,
                            "text": text,
                            "question_type": _kind(text),
                            "answer_type": "number" if answers[0].isdigit() else "other",
                            "answers": [", ".join(answers)],
                            "provenance": provenance,
                        }
                    )
    return tables


def _files(name: str, params: DaquarParams, root: Path) -> dict[str, list[str]]:
    """Return split, or `all`, -> files."""
    check_splits(f"data.{name}.questions", params.questions, also="all")
    if params.questions:
        return params.questions
    if (root / ALL).is_file():
        return {"all": [ALL]}
    files = {split: [file] for split, file in FILES.items() if (root / file).is_file()}
    if not files:
        raise DataError(f"{root}: contains neither {ALL} nor {', '.join(FILES.values())}; is it DAQUAR's folder?")
    return files


def _prefixes(key: str, files: list[str]) -> dict[str, str]:
    """Return file -> what the ids of its questions start with, different for each file of a key."""
    split = "" if key == "all" else f"{key}-"
    if len(files) == 1:
        return {files[0]: split}
    stems = {file: PurePosixPath(file).stem for file in files}
    distinct = len(set(stems.values())) == len(stems)  # else files of one name in different folders
    return {file: f"{split}{stem if distinct else file}-" for file, stem in stems.items()}


def _pairs(path: Path, tables: Tables) -> Iterator[tuple[int, str, str]]:
    """Yield (line number of the question, question, answer).

    A question names its photo and an answer does not, so a missing line costs its own pair and not all that follow.
    """
    lines = read_text(path, "DAQUAR's questions and answers").split("\n")
    # non-empty lines with their numbers; a question is at `index`, its answer at `index + 1`
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    index = pairs = 0
    while index < len(numbered):
        number, line = numbered[index]
        answered = index + 1 < len(numbered) and not PHOTO.search(numbered[index + 1][1])
        if PHOTO.search(line) and answered:
            pairs += 1
            yield number, line, numbered[index + 1][1]
            index += 2
            continue
        reason = "a question without an answer" if PHOTO.search(line) else "a question names its photo, as in `image3`"
        tables.quarantine("questions", "", "record_readable", f"{reason}: {line[:60]!r}", f"{path.name}:{number}")
        index += 1
    if not pairs:
        raise DataError(f"{path}: no question about a photo, with its answer on the next line; is it DAQUAR's?")


def _kind(question: str) -> str:
    """Return the type of a question, by which answers differ most."""
    words = question.lower().split()
    if words[:2] == ["how", "many"]:
        return "how many"
    return "what color" if {"color", "colour"} & set(words[:4]) else words[0]  # plain-ok
