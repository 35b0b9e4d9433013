"""VQA v2: a questions file and, except where the answers are hidden, an annotations file with ten answers each."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from vlp_models.data.formats.base import (
    RecordError,
    Tables,
    get,
    get_id,
    get_sentence,
    get_text,
    join_id,
    read_records,
)
from vlp_models.errors import DataError
from vlp_models.params import SourceParams


def read(name: str, params: SourceParams, root: Path, cut: Set[str], tables: Tables) -> None:
    """Adds the questions of every key of `params.questions`, joined with the annotations under the same key.

    A question without an annotation where its key has annotation files is set aside, and so is an annotation without
    a question. Questions on the images `cut` are skipped. Answers stay as the annotators typed them: the metric and
    the answer vocabulary normalise them in their own ways.

    Raises:
        DataError: a file is missing or not in the format, or annotations have no questions.
    """
    for key in params.annotations:
        if key not in params.questions:
            raise DataError(f"params: data.{name}.annotations has `{key}`, but data.{name}.questions has not")
    for key, files in params.questions.items():
        labelled = bool(params.annotations.get(key))
        annotations: dict[str, tuple[str, Any]] = {}
        for file in params.annotations.get(key, []):
            _read_annotations(root / file, name, annotations, tables)
        used: set[str] = set()
        for file in files:
            for provenance, record in read_records(root / file, "questions", "a VQA v2 questions file"):
                with tables.record("questions", provenance):
                    local = get_id(record, "question_id")
                    used.add(local)
                    if get_id(record, "image_id") in cut:
                        continue
                    with tables.record("questions", provenance, join_id(name, local)):
                        annotation = annotations.get(local)
                        if labelled and annotation is None:
                            raise RecordError("no annotation has its question_id", rule="annotation_found")
                        tables["questions"].append(
                            _row(name, record, annotation[1] if annotation else None, provenance)
                        )
        for local, (provenance, _) in annotations.items():
            if local not in used:
                reason = "no question has the question_id of this annotation"
                tables.set_aside("questions", join_id(name, local), "annotation_found", reason, provenance)


def _read_annotations(path: Path, name: str, into: dict[str, tuple[str, Any]], tables: Tables) -> None:
    for provenance, record in read_records(path, "annotations", "a VQA v2 annotations file"):
        with tables.record("questions", provenance):
            local = get_id(record, "question_id")
            if local in into:
                reason = f"question_id {local} is annotated again; {into[local][0]} is kept"
                tables.set_aside("questions", join_id(name, local), "id_unique", reason, provenance)
                continue
            into[local] = (provenance, record)


def _row(name: str, question: Any, annotation: Any, provenance: str) -> dict[str, Any]:
    row = {
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
        row["question_type"] = get_text(annotation, "question_type")
        row["answer_type"] = get_text(annotation, "answer_type")
        row["answers"] = [get_text(answer, "answer") for answer in get(annotation, "answers", list)]
        if len(row["answers"]) == 1:  # elsewhere that is a question with one right answer
            raise RecordError("1 answer, expected 10", rule="ten_answers")
    return row
