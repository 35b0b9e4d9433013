"""Weights that a model starts with instead of random ones, for the stage `initial`.

    models.NAME.text_init       a BERT's weights for the text encoder
    models.NAME.image_init      timm's weights for the vision encoder of a model that reads pixels

Each function changes the model in place, logs what it did, and returns what the checkpoint's config.json records
(`provenance`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from vlp_models.common.io import hash_file
from vlp_models.common.log import get_logger
from vlp_models.common.packages import find_weights_file, library_of
from vlp_models.common.plugins import import_target
from vlp_models.data.bert_folder import CONFIG, find_folder, weights_file
from vlp_models.errors import CheckpointError, shorten_list
from vlp_models.models.convert import INIT_READERS, ImportedModel, ImportRequest
from vlp_models.models.partial_load import LoadReport, check_same_config, load_matching, summarize_names
from vlp_models.params import ModelParams
from vlp_models.pipeline.prepared_data import PreparedData

logger = get_logger(__name__)

# Tables whose first rows mean the same in BERT and in the models, even if the number of rows differs
TABLES = ("text_embedding.positions.weight", "text_embedding.types.weight")


def load_text_init(model: nn.Module, p: ModelParams, data: PreparedData, root: Path, where: str) -> dict[str, Any]:
    """Load a BERT's weights into the text encoder.

    Raises:
        MissingToolError: the package is not installed.
        DataError: no such folder, or it has no BERT tokenizer.
        CheckpointError: another architecture or other sizes, or a vocabulary that differs from data/tokenizer.
    """
    folder = find_folder(p.text_init, root, where)
    # the converter maps BERT's names to the family's
    request = ImportRequest(
        facts=data.facts,
        config=p.config,
        family=p.family,
        vocabulary=data.tokenizer.vocabulary,
        lowercase=data.tokenizer.lowercase,
    )
    imported: ImportedModel = import_target(INIT_READERS["text_init"])(folder, request)  # under the model's names
    report = load_matching(model, imported.weights, tables=TABLES)
    record = _summarize(model, report, imported)
    loaded = ", ".join(record["loaded"])
    logger.info("%s: %s of BERT's weights in %s", p.text_init, f"{_count(model, report):,}", loaded)
    for outcome, key in (("not loaded", "missing"), ("left out", "left_out")):
        if record[key]:
            logger.info("  %s: %s", outcome, ", ".join(record[key]))
    for note in imported.notes:
        logger.info("  %s", note)
    files = [folder / CONFIG, weights_file(folder)]
    return {"source": p.text_init, "files": {file.name: hash_file(file) for file in files}, **record}


def load_image_init(model: nn.Module, p: ModelParams, data: PreparedData, root: Path, where: str) -> dict[str, Any]:
    """Load timm's weights into the vision encoder: SOHO's CNN; VLMo's patches and vision experts, or its CNN stem.

    Raises:
        MissingToolError: the package is not installed.
        CheckpointError: the family reads no pixels, the weights have another architecture or size than the model, or
            the file does not exist.
    """
    request = ImportRequest(facts=data.facts, config=p.config, family=p.family, root=root, where=where)
    try:
        imported: ImportedModel = import_target(INIT_READERS["image_init"])(Path(p.image_init), request)
        # both as params.yaml has them: lists in place of tuples
        imported_config = json.loads(json.dumps(dict(imported.config)))
        config = json.loads(json.dumps(asdict(model.config)))  # type: ignore[call-overload]
        check_same_config(imported_config, config, imported.config)
        report = load_matching(model, imported.weights)
        if report.left_out:
            raise CheckpointError(f"the model has no place for {shorten_list(report.left_out)}")
    except CheckpointError as error:
        raise CheckpointError(f"params.yaml: `{where}: {p.image_init}`: {error}") from None
    modules = ", ".join(sorted({name.partition(".")[0] for name in report.loaded}))
    logger.info("%s: %s of %s weights in %s", p.image_init, f"{_count(model, report):,}", imported.origin, modules)
    for note in imported.notes:
        logger.info("  %s", note)
    # A library's weights are identified by their name, a file by its hash.
    file = None if library_of(p.image_init) else find_weights_file(p.image_init, root, where)
    files = {"files": {file.name: hash_file(file)}} if file else {}
    return {"source": p.image_init, **files, **_summarize(model, report, imported)}


def _summarize(model: nn.Module, report: LoadReport, imported: ImportedModel) -> dict[str, list[str]]:
    weights = model.state_dict()
    return {
        "loaded": summarize_names(report.loaded, weights),
        "missing": summarize_names(report.missing, weights),
        "left_out": [*summarize_names(report.left_out, imported.weights), *imported.left_out],
        "notes": list(imported.notes),
    }


def _count(model: nn.Module, report: LoadReport) -> int:
    """Return the number of loaded parameters."""
    weights = model.state_dict()
    return sum(weights[name].numel() for name in report.loaded)
