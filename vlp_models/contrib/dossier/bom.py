"""A bill of materials in CycloneDX 1.6 (ECMA-424): the model with its card, its files, datasets, weights and packages.

As JSON by hand: the library of CycloneDX has no model cards. Its validator checks the result in the tests.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from vlp_models.contrib.dossier.facts import Facts
from vlp_models.registry.borrowed import borrowed_sources

# of a version, which nothing changes later
TAGS = ("run", "seed", "variant_hash", "content", "weights", "lineage", "git_commit", "hashes", "command")


def write_bom(facts: Facts) -> dict[str, Any]:
    """Return the bill of materials; equal facts give equal bytes."""
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _model(facts)},
        "components": [*_files(facts), *_datasets(facts), *_weights(facts), *_packages(facts)],
        "compositions": [{"aggregate": "incomplete"}],  # installed packages are in requirements.lock alone
    }
    # Another bill has another number.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bom, sort_keys=True))
    return {**bom, "serialNumber": f"urn:uuid:{number}"}


def _model(facts: Facts) -> dict[str, Any]:
    return {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": facts.name,
        "version": str(facts.version),
        "properties": _properties({"registered": facts.registered, **{name: facts.tags.get(name) for name in TAGS}}),
        "modelCard": {
            "modelParameters": {
                "task": facts.lineage["task"],
                "modelArchitecture": facts.lineage["family"],
                "datasets": [{"ref": f"data:{name}"} for name in facts.lineage["params"]["data"]],
            },
            "quantitativeAnalysis": {"performanceMetrics": [*_metrics(facts)]},
        },
    }


def _properties(values: Mapping[str, str | None]) -> list[dict[str, str]]:
    return [{"name": f"vlp:{name}", "value": value} for name, value in values.items() if value]


def _metrics(facts: Facts) -> list[dict[str, Any]]:
    metrics = []
    for score in facts.scores:
        if score.get("value") is None:
            continue
        entry = {"type": score["metric"], "value": str(score["value"]), "slice": f"{score['dataset']} {score['split']}"}
        if score.get("low") is not None:
            bounds = {"lowerBound": str(score["low"]), "upperBound": str(score["high"])}
            entry["confidenceInterval"] = bounds
        metrics.append(entry)
    return metrics


def _files(facts: Facts) -> list[dict[str, Any]]:
    return [
        {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}
        for name, digest in {**facts.files, **facts.code}.items()
    ]


def _datasets(facts: Facts) -> list[dict[str, Any]]:
    hashes = facts.lineage.get("dvc", {})
    components = []
    for name, source in facts.lineage["params"]["data"].items():
        described = {"type": "dataset", "name": name}
        component = {"type": "data", "bom-ref": f"data:{name}", "name": name, "data": [described]}
        # As DVC identifies a folder: the MD5 of its list of files, which is the hash of no file.
        folders = {path: hashes.get(path) for path in (source.get("root", ""), f"data/interim/{name}")}
        if properties := _properties({f"dvc:{path}": md5 for path, md5 in folders.items()}):
            component["properties"] = properties
        components.append(component)
    return components


def _weights(facts: Facts) -> list[dict[str, Any]]:
    return [
        {"type": "machine-learning-model", "bom-ref": f"weights:{number}", "name": source, "description": role}
        for number, (role, source, _) in enumerate(dict.fromkeys(borrowed_sources(facts.lineage)))
    ]


def _packages(facts: Facts) -> list[dict[str, Any]]:
    components = []
    for name, package in sorted(facts.lineage.get("packages", {}).items()):
        version = str(package.get("version", "")) if isinstance(package, dict) else str(package)
        components.append({"type": "library", "bom-ref": f"package:{name}", "name": name, "version": version})
    return components
