"""Flickr8k (Hodosh et al. 2013) and Flickr30k (Young et al. 2014): five captions per photo, a list of photos per split.

Captions come in one of three kinds of file. A `.token` file has lines of `<file>#<0-4><tab><caption>`, a csv with
quotes has the columns `image,caption` without numbers, and a csv of Flickr30k has `image_name| comment_number| comment`
without quotes.

Flickr8k: as its authors send it, `Flickr8k.token.txt` and the official split
`Flickr_8k.{trainImages,devImages,testImages}.txt`, one file name per line; these may be in `Flickr8k_text/`, the photos
in `Flicker8k_Dataset/` (sic). As copies have it: `captions.txt` and `Images/`, to which you add the official lists.
Official dev is val here. `split_files: {train: [Flickr_8k.trainImages.txt], test: [Flickr_8k.devImages.txt]}` with
`val_fraction: 0.1` report on dev and validate on a tenth of train. The token file has captions of photos that are in no
list; they are skipped and counted.

Flickr30k: `results_20130124.token`, or `results.csv` in copies. The splits are those of Flickr30k Entities
(`train.txt`, `val.txt`, `test.txt`, ids without a suffix) or of the Karpathy file `params.karpathy` (29,000, 1,014 and
1,000 photos). The photos are in `flickr30k-images/` or in `params.images`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vlp_models.contrib.research_formats.lists import ListedParams, photo_folder, read_lists, text_folders
from vlp_models.data.formats.base import RecordError, Tables, fills, get_id, get_sentence, image_row, join_id
from vlp_models.data.formats.files import open_lines, read_csv, require_directory
from vlp_models.data.formats.splits import hold_out, photo_id, safe_name, stem
from vlp_models.data.names import Names
from vlp_models.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Captioned:
    """One caption. `number` is its number among the photo's captions, as written."""

    file: str
    number: str
    text: str
    provenance: str


def read_quoted(path: Path, tables: Tables) -> Iterator[Captioned]:
    """Yield the rows of a csv with the columns image and caption; captions are numbered per photo, in their order."""
    # per photo
    numbers: Counter[str] = Counter()
    for provenance, row in read_csv(path, tables, "captions", ("image", "caption")):
        file = row["image"].strip()
        yield Captioned(file=file, number=str(numbers[file]), text=row["caption"], provenance=provenance)
        numbers[file] += 1


def _lines(
    path: Path, tables: Tables, parse: Callable[[str], tuple[str, str, str]], *, header: bool = False
) -> Iterator[Captioned]:
    """Yield the captions that `parse` finds in the lines of a file; malformed lines are quarantined.

    Args:
        parse: line -> file name of the photo, number and text of its caption; raises `RecordError`.
        header: the first line names columns.
    """
    good, bad, first = 0, 0, 0
    for number, line in enumerate(open_lines(path, "captions of photos"), start=1):
        if not line.strip() or (header and number == 1):
            continue
        provenance = f"{path.name}:{number}"
        try:
            file, caption, text = parse(line.rstrip("\r"))
        except RecordError as error:
            bad, first = bad + 1, first or number
            tables.quarantine("captions", "", error.rule, str(error), provenance)
            continue
        good += 1
        yield Captioned(file=file, number=caption, text=text, provenance=provenance)
    # another kind of file, not one with a few bad lines
    if bad and not good:
        raise DataError(f"{path}:{first}: none of the {bad} lines is a photo's file name, a number and a caption")


def _token(line: str) -> tuple[str, str, str]:
    name, tab, text = line.partition("\t")
    # 1000092795.jpg#0
    # Split at the last `#`: a file name may contain one.
    file, sign, number = name.strip().rpartition("#")
    if not (tab and sign and file and number.isascii() and number.isdigit()):
        raise RecordError("not <file>#<number>, a tab and a caption")
    return file, number, text


def _piped(line: str) -> tuple[str, str, str]:
    # a caption may contain the separator
    parts = [part.strip() for part in line.split("|", 2)]
    if len(parts) != 3 or not (parts[0] and parts[1].isascii() and parts[1].isdigit()):
        raise RecordError("not a file, a number and a caption separated by |")
    return parts[0], parts[1], parts[2]


FLICKR8K_LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "val": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}
CaptionReader = Callable[[Path, Tables], Iterator[Captioned]]
FLICKR8K_CAPTIONS: dict[str, CaptionReader] = {
    "Flickr8k.token.txt": partial(_lines, parse=_token),
    "captions.txt": read_quoted,
}
FLICKR30K_LISTS = {"train": "train.txt", "val": "val.txt", "test": "test.txt"}
FLICKR30K_CAPTIONS: dict[str, CaptionReader] = {
    "results_20130124.token": partial(_lines, parse=_token),
    "results.csv": partial(_lines, parse=_piped, header=True),
}


@fills("captions")
def read_flickr8k(name: str, params: ListedParams, base: Path) -> Tables:
    """Read Flickr8k.

    Raises:
        DataError: the folder, the captions or the lists of photos are missing, or the captions are in neither format.
    """
    root = require_directory(base, params.root, "Flickr8k comes on request; set data.<name>.root to its folder")
    files = {folder / file: reader for file, reader in FLICKR8K_CAPTIONS.items() for folder in text_folders(root)}
    return _read(name, params, root, "Flickr8k", files, FLICKR8K_LISTS)


@fills("captions")
def read_flickr30k(name: str, params: ListedParams, base: Path) -> Tables:
    """Read Flickr30k.

    Raises:
        DataError: the folder, the captions or the lists of photos are missing, or the captions are in neither format.
    """
    root = require_directory(base, params.root, "Flickr30k comes on request; set data.<name>.root to its folder")
    files = {root / file: reader for file, reader in FLICKR30K_CAPTIONS.items()}
    return _read(name, params, root, "Flickr30k", files, FLICKR30K_LISTS)


def _read(
    name: str,
    params: ListedParams,
    root: Path,
    dataset: str,
    files: Mapping[Path, CaptionReader],
    lists: Mapping[str, str],
) -> Tables:
    """Read the first caption file that exists, and the photos' splits.

    Photos that are in no list, and listed photos without a caption, are skipped and counted; `params.limit` keeps the
    first photos of each split.
    """
    tables = Tables()
    # the authors' file comes before those of copies
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        names = ", ".join(dict.fromkeys(path.name for path in files))
        raise DataError(f"{root}: contains none of {names}; is it {dataset}'s folder?")
    splits = read_lists(name, params, root, lists, tables).splits
    folder = photo_folder(root, params.images)
    # Lists and files may differ in letter case and Unicode form.
    listed = Names(splits)
    photos: dict[str, str] = {}  # photo -> its first file name
    counts: Counter[str] = Counter()  # split -> photos
    cut: set[str] = set()  # photos beyond the limit
    for line in files[path](path, tables):
        with tables.record("captions", line.provenance):
            file = safe_name(get_id({"file": line.file}, "file"))
            # lists name photos by Flickr's id, captions by file name
            photo, image_id = listed.match(photo_id(file)), join_id(name, stem(file))
            if photo is None:
                tables.skipped["captions of unlisted photos"] += 1
                continue
            caption_id = f"{image_id}#{line.number}"
            with tables.record("captions", line.provenance, caption_id):
                if photos.get(photo, file) != file:
                    raise RecordError(f"photo {photo} was {photos[photo]} before and is {file} here", rule="id_unique")
                if photo not in photos:
                    # a photo is added with its first caption
                    photos[photo], split = file, hold_out(tables, params, image_id, photo, splits[photo])
                    if params.limit and counts[split] >= params.limit:
                        cut.add(photo)
                    else:
                        counts[split] += 1
                        location, provenance = os.path.normpath(folder / file), line.provenance
                        row = image_row(image_id, source=name, split=split, path=location, provenance=provenance)
                        tables["images"].append(row)
                # captions of photos beyond the limit are dropped with them
                if photo not in cut:
                    text = get_sentence({"caption": line.text}, "caption")
                    tables.add_caption(caption_id, image_id, text, line.provenance)
    # copies of the datasets often lack some captions
    bare = len(splits.keys() - photos.keys())
    if bare:
        tables.skipped["listed photos without a caption"] += bare
    return tables
