"""Whether an image took part in making an input of the models: the detector, the tokenizer, a training's provenance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json
from vlp_models.common.plugins import Table, import_target
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.data.answers import build_answer_vocabulary
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError, MissingToolError
from vlp_models.params import TokenizerParams
from vlp_models.params.data import DetectorParams
from vlp_models.pipeline.lineage import PROVENANCE
from vlp_models.pipeline.stages.tokenizer import make_tokenizer, read_texts

# detector, vision_warmup -> `module:function` that returns the first step that used one of some images
FIRST_STEPS = Table("first_steps", {})


def load_provenance(work: Path) -> tuple[Mapping[str, Any], str]:
    """Return the provenance and detector id of the training whose resume state is in `work`.

    Raises:
        DataError: the file is missing or not valid JSON.
    """
    record = read_json(work / PROVENANCE)
    return record["provenance"], record["detector_id"]


def first_detector_step(p: DetectorParams, workspace: Workspace, image_ids: Set[str]) -> int | None:
    """Return the first step, from 1, in which a detector was trained on one of these images, or None.

    Computed from the current data/validated.

    Raises:
        DataError: `validate` has not run.
        MissingToolError: contrib/detector does not exist.
    """
    return _first_step("detector")(p, workspace, image_ids) if p.source == "train" else None


def first_warmup_step(record: Mapping[str, Any], workspace: Workspace, image_ids: Set[str]) -> int | None:
    """Return the first step of a recorded warm-up (`provenance.vision_warmup`) that used one of these images, or None.

    Raises: see `first_detector_step`.
    """
    return _first_step("vision_warmup")(record, workspace, image_ids)


def _first_step(kind: str) -> Callable[..., int | None]:
    if kind not in FIRST_STEPS:
        raise MissingToolError("vlp_models/contrib/detector is not installed")
    function: Callable[..., int | None] = import_target(FIRST_STEPS[kind])
    return function


def shapes_tokenizer(p: TokenizerParams, workspace: Workspace, image_ids: Set[str]) -> bool:
    """Return whether data/tokenizer would differ without the texts of these images, by building it again.

    Args:
        p: the params that it was built with, including `sources`.

    Raises:
        DataError: `validate` or `tokenizer` has not run, or data/tokenizer is not what these params give on all texts.
    """
    # Built twice from the same code: with all texts, which must give data/tokenizer, and without the images.
    current = Tokenizer.load(require_output(workspace.tokenizer, "tokenizer"))
    from_texts = p.source == "train" or p.trim

    def build(without: Set[str]) -> tuple[Sequence[str], list[str]]:
        validated = require_output(workspace.validated, "validate")
        with read_texts(validated, p.sources, workspace, without) as (texts, questions, _):
            vocabulary: Sequence[str] = current.vocabulary
            if from_texts:
                vocabulary = make_tokenizer(p, texts, workspace).vocabulary if len(texts) else ()
            return vocabulary, build_answer_vocabulary(questions, p.min_answer_count)

    complete = build(frozenset())
    if complete != (current.vocabulary, read_json(workspace.tokenizer / "answers.json")):
        raise DataError(
            f"{workspace.tokenizer}: does not match params.yaml and {workspace.validated}; run `vlp run` first"
        )
    return build(image_ids) != complete
