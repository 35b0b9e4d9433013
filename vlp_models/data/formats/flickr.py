"""What Flickr8k and Flickr30k share: five captions a photo, by the photo's file name, in one of three kinds of file.

A `.token` file has lines of `<file>#<0-4><tab><caption>`. A csv with quotes has the columns `image,caption`, without
numbers. A csv of Flickr30k has `image_name| comment_number| comment` and no quotes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vlp_models.data.formats.base import RecordError, Tables, get_id, get_sentence, image_row, join_id
from vlp_models.data.formats.files import open_lines, read_csv, require_directory
from vlp_models.data.formats.splits import photo_folder, photo_id, read_lists, safe_name, stem, text_folders
from vlp_models.errors import DataError
from vlp_models.params import SourceParams


@dataclass(frozen=True, kw_only=True)
class Captioned:
    """One line. `number` is the caption's among those of its photo, as written."""

    file: str
    number: str
    text: str
    provenance: str


def read_tokens(path: Path, tables: Tables) -> Iterator[Captioned]:
    """The lines of a `.token` file; a line of another form is set aside.

    Raises:
        DataError: the file is missing, or none of its lines is of the form.
    """
    return _lines(path, tables, _token)


def read_piped(path: Path, tables: Tables) -> Iterator[Captioned]:
    """The lines of Flickr30k's `results.csv`, behind its header; a line of another form is set aside."""
    return _lines(path, tables, _piped, header=True)


def read_quoted(path: Path, tables: Tables) -> Iterator[Captioned]:
    """The rows of a csv with the columns image and caption; they are numbered photo by photo, in their order."""
    numbers: Counter[str] = Counter()
    for provenance, row in read_csv(path, tables, "captions", ("image", "caption")):
        file = row["image"].strip()
        yield Captioned(file=file, number=str(numbers[file]), text=row["caption"], provenance=provenance)
        numbers[file] += 1


def fill(
    tables: Tables, name: str, params: SourceParams, lines: Iterator[Captioned], splits: Mapping[str, str], folder: Path
) -> None:
    """Adds photos and captions. A photo that no list has is left out and counted, as is a listed one without a caption;
    `params.limit` keeps the first photos of each split.

    Args:
        splits: photo id -> split.
        folder: of the photos.
    """
    files: dict[str, str] = {}  # photo -> the file it was first met as
    kept: Counter[str] = Counter()  # split -> photos
    cut: set[str] = set()  # photos beyond the limit
    for line in lines:
        with tables.record("captions", line.provenance):
            file = safe_name(get_id({"file": line.file}, "file"))
            photo, image_id = photo_id(file), join_id(name, stem(file))
            if photo not in splits:
                tables.skipped["captions of photos that no list has"] += 1
                continue
            caption_id = f"{image_id}#{line.number}"
            with tables.record("captions", line.provenance, caption_id):
                if files.get(photo, file) != file:
                    raise RecordError(f"photo {photo} was {files[photo]} before, and is {file} here", rule="id_unique")
                if photo not in files:
                    files[photo], split = file, splits[photo]
                    if params.limit and kept[split] >= params.limit:
                        cut.add(photo)
                    else:
                        kept[split] += 1
                        path = os.path.normpath(folder / file)
                        row = image_row(image_id, source=name, split=split, path=path, provenance=line.provenance)
                        tables["images"].append(row)
                if photo not in cut:
                    text = get_sentence({"caption": line.text}, "caption")
                    row = {"caption_id": caption_id, "image_id": image_id, "text": text, "provenance": line.provenance}
                    tables["captions"].append(row)
    bare = len(splits.keys() - files.keys())
    if bare:
        tables.skipped["listed photos without a caption"] += bare


def _lines(
    path: Path, tables: Tables, parse: Callable[[str], tuple[str, str, str]], *, header: bool = False
) -> Iterator[Captioned]:
    good = bad = 0
    for number, line in enumerate(open_lines(path, "captions of photos"), start=1):
        if not line.strip() or (header and number == 1):
            continue
        provenance = f"{path.name}:{number}"
        try:
            file, caption, text = parse(line.rstrip("\r"))
        except RecordError as error:
            bad += 1
            tables.quarantine("captions", "", error.rule, str(error), provenance)
            continue
        good += 1
        yield Captioned(file=file, number=caption, text=text, provenance=provenance)
    if bad and not good:
        raise DataError(f"{path}: none of its {bad} lines is a photo's file name, a number and a caption")


def _token(line: str) -> tuple[str, str, str]:
    name, tab, text = line.partition("\t")
    file, sign, number = name.strip().rpartition("#")
    if not (tab and sign and file and number.isascii() and number.isdigit()):
        raise RecordError("not <file>#<number>, a tab and a caption")
    return file, number, text


def _piped(line: str) -> tuple[str, str, str]:
    parts = [part.strip() for part in line.split("|", 2)]
    if len(parts) != 3 or not (parts[0] and parts[1].isascii() and parts[1].isdigit()):
        raise RecordError("not a file, a number and a caption with | between")
    return parts[0], parts[1], parts[2]


FLICKR8K_LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "val": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}
FLICKR8K_CAPTIONS = {"Flickr8k.token.txt": read_tokens, "captions.txt": read_quoted}


def read_flickr8k(name: str, params: SourceParams, base: Path) -> Tables:
    """
    Raises:
        DataError: the folder, the captions or the lists of photos are missing, or the captions are in neither form.
    """
    root = require_directory(base, params.root, "Flickr8k comes on request; set data.<name>.root to its folder")
    tables = Tables()
    there = [(folder / file, reader) for file, reader in FLICKR8K_CAPTIONS.items() for folder in text_folders(root)]
    found = next(((path, reader) for path, reader in there if path.is_file()), None)
    if found is None:
        raise DataError(f"{root}: holds none of {', '.join(FLICKR8K_CAPTIONS)}; is it Flickr8k's folder?")
    path, reader = found
    listed = read_lists(name, params, root, FLICKR8K_LISTS, tables)
    fill(tables, name, params, reader(path, tables), listed.splits, photo_folder(root, params.images))
    return tables


FLICKR30K_LISTS = {"train": "train.txt", "val": "val.txt", "test": "test.txt"}
FLICKR30K_CAPTIONS = {"results_20130124.token": read_tokens, "results.csv": read_piped}


def read_flickr30k(name: str, params: SourceParams, base: Path) -> Tables:
    """
    Raises:
        DataError: the folder, the captions or the lists of photos are missing, or the captions are in neither form.
    """
    root = require_directory(base, params.root, "Flickr30k comes on request; set data.<name>.root to its folder")
    tables = Tables()
    found = next(
        ((root / file, reader) for file, reader in FLICKR30K_CAPTIONS.items() if (root / file).is_file()), None
    )
    if found is None:
        raise DataError(f"{root}: holds none of {', '.join(FLICKR30K_CAPTIONS)}; is it Flickr30k's folder?")
    path, reader = found
    listed = read_lists(name, params, root, FLICKR30K_LISTS, tables)
    fill(tables, name, params, reader(path, tables), listed.splits, photo_folder(root, params.images))
    return tables
