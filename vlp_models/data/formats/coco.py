"""MSCOCO captions and instances, with an optional Karpathy split file, and VQA v2 questions.

The split of an image is the key of its file in params (`train`, `val`, `test`) or, with a Karpathy file, the split in
that file; files with all splits have the key `all` and need one. `params.val_fraction` of train becomes val, by a hash
of the image's id. Boxes are x, y, width, height and become corners. Crowd regions are groups, not objects, and are
skipped.

VQA v2 has a questions file and, unless the answers are hidden, an annotations file with ten answers each. Your own
files may lack `question_type` and `answer_type`, and an answer may be a number. `width` and `height` are optional.

If an annotation file gives an image's id to another file than the first one that lists it, its image and annotations of
this id are quarantined. So are questions about it, except those under the key of that first file.

A file that lists images without `annotations` is read for its images, such as image_info_test2015.json, which has those
of VQA v2's test questions: `captions: {test: [image_info_test2015.json]}`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vlp_models.data.formats.base import (
    RecordError,
    Tables,
    fills,
    get,
    get_id,
    get_sentence,
    get_size,
    get_text,
    image_row,
    is_number,
    is_utf8,
    join_id,
)
from vlp_models.data.formats.files import read_lines, read_records
from vlp_models.data.formats.splits import KarpathyEntry, check_splits, hold_out, photo_id, read_karpathy, safe_name
from vlp_models.data.names import FileNames
from vlp_models.data.tables import SPLITS
from vlp_models.errors import DataError
from vlp_models.params import SourceParams


@dataclass(frozen=True, kw_only=True)
class CocoParams(SourceParams):
    """Keys of the format coco.

    The key `all` stands for files that contain every split; the Karpathy file then assigns the splits.
    """

    file_keys: ClassVar[tuple[str, ...]] = (
        "captions",
        "instances",
        "karpathy",
        "questions",
        "annotations",
        "scene_graphs",
    )

    captions: dict[str, list[str]] = field(default_factory=dict)
    instances: dict[str, list[str]] = field(default_factory=dict)
    karpathy: str = ""
    questions: dict[str, list[str]] = field(default_factory=dict)  # VQA v2
    annotations: dict[str, list[str]] = field(default_factory=dict)  # VQA v2
    scene_graphs: str = ""  # synthetic scenes only: ground truth for the share of faithful captions


@fills("captions", "questions")
def read(name: str, params: CocoParams, base: Path) -> Tables:
    """Read a dataset in COCO format; `params.limit` keeps the first images of each split.

    Raises:
        DataError: a file is missing or not in the format, or files under `all` have no Karpathy file.
    """
    if not (params.captions or params.instances or params.karpathy):
        raise DataError(f"params.yaml: data.{name} lists no images; give captions, instances or a karpathy file")
    for section in ("captions", "instances", "questions", "annotations"):
        files_by_split = getattr(params, section)
        check_splits(f"data.{name}.{section}", files_by_split, also="all")
        if "all" in files_by_split and section in ("captions", "instances") and not params.karpathy:
            raise DataError(
                f"params.yaml: data.{name}.{section}.all: files of every split need data.{name}.karpathy, "
                f"the file with the splits; without one use the keys {', '.join(SPLITS)}"
            )
    root = base / params.root
    tables = Tables()
    images = _Images(name=name, root=root, params=params, tables=tables)
    # the Karpathy file first: it decides splits, and images may come from it alone
    if params.karpathy:
        images.entries = read_karpathy(root / params.karpathy, tables, sentences=not params.captions)
        if not params.captions:
            images.add_entries()
    # all images before their annotations: an annotation is checked against them
    for key, files in [*params.captions.items(), *params.instances.items()]:
        for file in files:
            images.read(root / file, key)
    for files in params.captions.values():
        for file in files:
            _read_captions(root / file, images, tables)
    for files in params.instances.values():
        for file in files:
            _read_objects(root / file, images, tables)
    _read_vqa(images, tables)
    if params.scene_graphs:
        _read_truth(root / params.scene_graphs, images, tables)
    return tables


@dataclass(frozen=True, kw_only=True)
class _FirstListing:
    """An image as it was listed first. key: of its annotation file in params; empty for the Karpathy file."""

    file_name: str
    path: str
    split: str
    key: str


@dataclass(kw_only=True)
class _Images:
    """The images read so far; `cut` has the ids that `limit` dropped, whose captions are dropped too."""

    name: str
    root: Path
    params: CocoParams
    tables: Tables
    entries: dict[str, KarpathyEntry] | None = None
    listed: dict[str, _FirstListing] = field(default_factory=dict)  # by id
    conflicts: dict[str, dict[Path, str]] = field(default_factory=dict)  # id -> annotation file -> another image file
    keys: dict[Path, str] = field(default_factory=dict)  # annotation file -> its key in params
    counts: dict[str, int] = field(default_factory=dict)  # split -> images kept
    cut: set[str] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)  # ids that the Karpathy file lacks
    listings: dict[Path, frozenset[str]] = field(default_factory=dict)
    names: FileNames = field(default_factory=FileNames)

    def read(self, path: Path, key: str) -> None:
        """Add the `images` list of one annotation file; captions and instances files list the same images."""
        folder = path.stem.rpartition("_")[2]  # the images of captions_train2017.json are in train2017/
        ids_here: set[str] = set()
        self.keys[path] = key
        for provenance, record in read_records(path, "images", "a COCO annotation file"):
            with self.tables.record("images", provenance):
                local = get_id(record, "id")
                file_name = safe_name(get_text(record, "file_name"))
                entry = self.entries.get(local) if self.entries is not None else None
                # An image without an entry in the Karpathy file has no split, so nothing can be done with it.
                if self.entries is not None and entry is None:
                    if local not in self.unlisted:  # reported once, although several files list the image
                        self.unlisted.add(local)
                        reason = f"image {local} is not in the Karpathy file, so it has no split"
                        self.tables.quarantine("images", join_id(self.name, local), "split_known", reason, provenance)
                    continue
                split = entry.split if entry else key
                file = self.find(file_name, [entry.filepath if entry else "", folder])
                is_new = local not in self.listed
                listing = _FirstListing(file_name=file_name, path=str(file), split=split, key=key)
                first = self.listed.setdefault(local, listing)
                if not _is_same(first, file_name, file):
                    conflicts = self.conflicts.setdefault(local, {})
                    if str(file) not in conflicts.values():  # reported once, as above
                        reason = self.describe_conflict(local, str(file))
                        self.tables.quarantine("images", join_id(self.name, local), "id_unique", reason, provenance)
                    conflicts[path] = str(file)
                    continue
                # a file that lists an image twice, or in another split, adds it again: validation reports it
                if is_new or local in ids_here or first.split != split:
                    self.add(local, file, split, get_size(record), provenance)
                ids_here.add(local)

    def describe_conflict(self, local: str, path: str) -> str:
        before, now = (os.path.relpath(file, self.root) for file in (self.listed[local].path, path))
        return f"image {local} was {before} before and is {now} here"

    def check_annotated(self, local: str, path: Path) -> None:
        """Check an image id of the annotation file `path`.

        Raises:
            RecordError: the image is another file there than in the file that listed it first.
        """
        if file := self.conflicts.get(local, {}).get(path):
            raise RecordError(self.describe_conflict(local, file), rule="id_unique")

    def check_question(self, local: str, key: str) -> None:
        """Check an image id of the questions under `key`.

        Raises:
            RecordError: the image is several files, and not the first one under this key alone.
        """
        conflicts = self.conflicts.get(local, {})
        if conflicts and (key != self.listed[local].key or key in {self.keys[path] for path in conflicts}):
            files = [self.listed[local].path, *dict.fromkeys(conflicts.values())]
            several = " and ".join(os.path.relpath(file, self.root) for file in files)
            raise RecordError(f"image {local} is {several}", rule="id_unique")

    def add_entries(self) -> None:
        """Add the images and captions of a Karpathy file that has no captions file."""
        for local, entry in (self.entries or {}).items():
            path = self.find(entry.filename, [entry.filepath])
            self.listed[local] = _FirstListing(file_name=entry.filename, path=str(path), split=entry.split, key="")
            self.add(local, path, entry.split, (None, None), entry.provenance)
            if local in self.cut:
                continue
            # the captions in the file, if there is no captions file
            for index, (sentence_id, text) in enumerate(entry.sentences):
                provenance = f"{entry.provenance}.sentences[{index}]"
                caption_id, image_id = join_id(self.name, sentence_id), join_id(self.name, local)
                self.tables.add_caption(caption_id, image_id, text, provenance)

    def add(
        self,
        local: str,
        path: Path,
        split: str,
        size: tuple[int | None, int | None],
        provenance: str,
    ) -> None:
        """Add one image; if it is listed twice, or in two splits, validation reports the second row."""
        image_id = join_id(self.name, local)
        split = hold_out(self.tables, self.params, image_id, photo_id(local), split)
        # `limit` counts images: what belongs to the others is dropped by `cut`
        if self.params.limit and self.counts.get(split, 0) >= self.params.limit:
            self.cut.add(local)
            return
        self.counts[split] = self.counts.get(split, 0) + 1
        self.tables["images"].append(
            image_row(
                image_id,
                source=self.name,
                split=split,
                path=str(path),
                provenance=provenance,
                width=size[0],
                height=size[1],
            )
        )

    def find(self, file_name: str, folders: list[str]) -> Path:
        """Return the file's path: in `images` or the dataset's root, or in one of `folders` below these."""
        # the exact name everywhere first, then one that differs in letter case or Unicode form
        directory = self.root / self.params.images
        for parent in (directory, self.root):
            for folder in [*folders, ""]:
                path = Path(os.path.normpath(parent / folder / file_name))
                if path.parent not in self.listings:  # list each directory once, not once per image
                    files = path.parent.iterdir() if path.parent.is_dir() else ()
                    self.listings[path.parent] = frozenset(file.name for file in files)
                if path.name in self.listings[path.parent]:
                    return path
        for parent in (directory, self.root):
            for folder in [*folders, ""]:
                candidates = self.names.find(parent / folder, file_name)
                if len(candidates) == 1:
                    return candidates[0]
        return Path(os.path.normpath(directory / file_name))


def _is_same(first: _FirstListing, file_name: str, path: Path) -> bool:
    """Return whether a file is that of the image, which another annotation file may name differently.

    One name in two folders is two files. If one of the paths has no file, the name decides: an image is looked for in
    the folder that its annotation file is named after, and only one of two annotation files may have that name.
    """
    return str(path) == first.path or (
        file_name == first.file_name and not (path.exists() and Path(first.path).exists())
    )


def _read_captions(path: Path, images: _Images, tables: Tables) -> None:
    for provenance, record in read_records(path, "annotations", "a COCO captions file", only_with="annotations"):
        with tables.record("captions", provenance):
            local = get_id(record, "id")
            image = get_id(record, "image_id")
            # Dropped with its image: such a caption is not a bad row.
            if image in images.cut:
                continue
            # from here on errors have the caption's id
            with tables.record("captions", provenance, join_id(images.name, local)):
                images.check_annotated(image, path)
                text = get_sentence(record, "caption")
                tables.add_caption(join_id(images.name, local), join_id(images.name, image), text, provenance)


def _read_objects(path: Path, images: _Images, tables: Tables) -> None:
    categories: dict[str, str] = {}
    for provenance, record in read_records(path, "categories", "a COCO instances file", only_with="annotations"):
        with tables.record("objects", provenance):
            categories[get_id(record, "id")] = get_text(record, "name")
    for provenance, record in read_records(path, "annotations", "a COCO instances file", only_with="annotations"):
        with tables.record("objects", provenance):
            local = get_id(record, "id")
            image = get_id(record, "image_id")
            if image in images.cut:
                continue
            # a box around a group is no box of an object
            if str(record.get("iscrowd")).lower() in ("1", "1.0", "true"):
                tables.skipped["crowd regions"] += 1
                continue
            # from here on errors have the object's id
            with tables.record("objects", provenance, join_id(images.name, local)):
                images.check_annotated(image, path)
                category = get_id(record, "category_id")
                if category not in categories:
                    raise RecordError(f"category_id {category} is not in the file's categories", rule="category_known")
                x1, y1, x2, y2 = _corners(record)
                tables["objects"].append(
                    {
                        "object_id": join_id(images.name, local),
                        "image_id": join_id(images.name, image),
                        "category": categories[category],
                        "x1": x1,
                        "y1": y1,
                        "x2": x2,
                        "y2": y2,
                        "attributes": _attributes(record),
                        "provenance": provenance,
                    }
                )


def _attributes(record: Any) -> list[str] | None:
    """Return a list of words, which some datasets add to COCO's fields; ignore any other use of the key."""
    value = record.get("attributes")
    return value if isinstance(value, list) and all(isinstance(word, str) and word for word in value) else None


def _corners(record: Any) -> tuple[float, float, float, float]:
    box = get(record, "bbox", list)
    if len(box) != 4 or not all(map(is_number, box)):
        raise RecordError(f"`bbox` is {str(box)[:60]}, expected x, y, width, height")
    x, y, width, height = (float(v) for v in box)
    return x, y, x + width, y + height


def _read_truth(path: Path, images: _Images, tables: Tables) -> None:
    """Read ground truth, one object per line; `image_id` may already have the dataset's name."""
    for provenance, record in read_lines(path, tables, "truth", "ground truth as JSON lines"):
        with tables.record("truth", provenance):
            local = get_id(record, "image_id").removeprefix(f"{images.name}/")
            if not is_utf8(json.dumps(record, ensure_ascii=False)):
                raise RecordError("contains bytes that are not UTF-8, or half a character", rule="text_utf8")
            if local not in images.cut:
                tables["truth"].append({**record, "image_id": join_id(images.name, local)})


def _read_vqa(images: _Images, tables: Tables) -> None:
    """Add the questions of every key of `params.questions`, joined with the annotations under the same key.

    Questions without an annotation (if their key has annotation files) and annotations without a question are
    quarantined. Questions about images that `limit` dropped are skipped. Answers stay as the annotators typed them: the
    metric and the answer vocabulary normalize them in different ways.
    """
    name, params, root = images.name, images.params, images.root
    for key in params.annotations:
        if key not in params.questions:
            raise DataError(f"params.yaml: data.{name}.annotations has `{key}`, but data.{name}.questions has not")
    for key, files in params.questions.items():
        labeled = bool(params.annotations.get(key))
        annotations: dict[str, tuple[str, Any]] = {}
        for file in params.annotations.get(key, []):
            # question id -> (provenance, annotation)
            _read_annotations(root / file, name, annotations, tables)
        # questions of this key; an annotation without one is reported
        used: set[str] = set()
        for file in files:
            for provenance, record in read_records(root / file, "questions", "a VQA v2 questions file"):
                with tables.record("questions", provenance):
                    local = get_id(record, "question_id")
                    used.add(local)
                    image = get_id(record, "image_id")
                    if image in images.cut:
                        continue
                    with tables.record("questions", provenance, join_id(name, local)):
                        images.check_question(image, key)
                        annotation = annotations.get(local)
                        if labeled and annotation is None:
                            raise RecordError("no annotation has its question_id", rule="annotation_found")
                        tables["questions"].append(
                            _row(name, record, annotation[1] if annotation else None, provenance)
                        )
        for local, (provenance, _) in annotations.items():
            if local not in used:
                reason = "no question has the question_id of this annotation"
                tables.quarantine("questions", join_id(name, local), "annotation_found", reason, provenance)


def _read_annotations(path: Path, name: str, into: dict[str, tuple[str, Any]], tables: Tables) -> None:
    for provenance, record in read_records(path, "annotations", "a VQA v2 annotations file"):
        with tables.record("questions", provenance):
            local = get_id(record, "question_id")
            # Of two annotations of one question, an unreadable first one is replaced.
            if local in into and _is_readable(into[local][1]):
                reason = f"question_id {local} is annotated again; {into[local][0]} is kept"
                tables.quarantine("questions", join_id(name, local), "id_unique", reason, provenance)
                continue
            into[local] = (provenance, record)


def _is_readable(annotation: Any) -> bool:
    try:
        get_id(annotation, "image_id")
        return bool(_answers(annotation))
    except RecordError:
        return False


def _answers(annotation: Any) -> list[str]:
    """Return the answers as text; a number is written as the annotator would type it, 2.0 as 2."""
    answers = []
    for answer in get(annotation, "answers", list):
        # VQA v2 has {"answer": ...}; other files may have the text itself
        value = get(answer if isinstance(answer, dict) else {"answer": answer}, "answer", (str, int, float))
        if isinstance(value, str):
            value = get_text({"answer": value}, "answer")
        answers.append(str(int(value) if isinstance(value, float) and value.is_integer() else value))
    return answers


def _answer_type(annotation: Any, answers: list[str]) -> str:
    """Return the optional `answer_type`, or VQA v2's type of the most frequent answer."""
    if isinstance(annotation.get("answer_type"), str) and annotation["answer_type"].strip():
        return get_text(annotation, "answer_type")
    # Without a type: yes or no, a number with at most one decimal point, or anything else.
    most_frequent = Counter(answer.strip().lower() for answer in answers).most_common(1)[0][0] if answers else ""
    if not most_frequent:
        return ""
    if most_frequent in ("yes", "no"):
        return "yes/no"
    return "number" if most_frequent.replace(".", "", 1).isdigit() else "other"


def _row(name: str, question: Any, annotation: Any, provenance: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "question_id": join_id(name, get_id(question, "question_id")),
        "image_id": join_id(name, get_id(question, "image_id")),
        "text": get_sentence(question, "question"),
        "question_type": "",
        "answer_type": "",
        "answers": [],
        "provenance": provenance,
    }
    if annotation is not None:
        if get_id(annotation, "image_id") != get_id(question, "image_id"):
            raise RecordError("its annotation is about another image", rule="annotation_found")
        # optional, as is `answer_type`
        kind = annotation.get("question_type")
        row["question_type"] = get_text(annotation, "question_type") if isinstance(kind, str) else ""
        answers = _answers(annotation)
        row |= {"answers": answers, "answer_type": _answer_type(annotation, answers)}
        if len(row["answers"]) == 1:  # in other formats one answer means the only right one
            raise RecordError("1 answer, expected 10", rule="ten_answers")
    return row
