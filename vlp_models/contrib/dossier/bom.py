"""A bill of materials in CycloneDX 1.6 (ECMA-424): the model with its card, its files, datasets, weights and packages.

As JSON by hand: the library of CycloneDX has no model cards. Its validator checks the result in the tests.
"""

from __future__ import annotations

import uuid
from typing import Any

from vlp_models.contrib.dossier.facts import Facts
from vlp_models.registry.borrowed import borrowed_sources

# of a version, which nothing changes later
TAGS = ("run", "seed", "variant_hash", "content", "weights", "lineage", "git_commit", "hashes", "command")


def write_bom(facts: Facts) -> dict[str, Any]:
    """Return the bill of materials; equal facts give equal bytes."""
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{facts.title} {facts.content}')}",
        "version": 1,
        "metadata": {"timestamp": facts.made, "component": _model(facts)},
        "components": [*_files(facts), *_datasets(facts), *_weights(facts), *_packages(facts)],
    }


def _model(facts: Facts) -> dict[str, Any]:
    return {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": facts.name,
        "version": str(facts.version),
        "properties": [{"name": f"vlp:{name}", "value": facts.tags[name]} for name in TAGS if facts.tags.get(name)],
        "modelCard": {
            "modelParameters": {
                "approach": {"type": "supervised"},
                "task": facts.lineage["task"],
                "architectureFamily": facts.lineage["family"],
                "modelArchitecture": facts.lineage["variant"],
                "datasets": [{"ref": f"data:{name}"} for name in facts.lineage["params"]["data"]],
            },
            "quantitativeAnalysis": {"performanceMetrics": [*_metrics(facts)]},
        },
    }


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
        for name, digest in facts.files.items()
    ]


def _datasets(facts: Facts) -> list[dict[str, Any]]:
    hashes = facts.lineage.get("dvc", {})
    components = []
    for name, source in facts.lineage["params"]["data"].items():
        described = {"type": "dataset", "name": name, "classification": "not recorded"}
        component = {"type": "data", "bom-ref": f"data:{name}", "name": name, "data": [described]}
        # A folder's hash in DVC's cache ends with `.dir`; its 32 digits are an MD5.
        md5 = str(hashes.get(f"data/interim/{name}") or hashes.get(source.get("root", "")) or "").removesuffix(".dir")
        components.append(component | ({"hashes": [{"alg": "MD5", "content": md5}]} if len(md5) == 32 else {}))
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
