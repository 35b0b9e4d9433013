"""The Kubernetes job as Prefect makes it of the template: secrets by reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from prefect.utilities.templating import apply_values

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"


def test_secrets_reach_the_container_by_reference() -> None:
    template = json.loads((FOLDER / "job-template.json").read_text())
    properties = template["variables"]["properties"]
    variables = yaml.safe_load((FOLDER / "prefect.yaml").read_text())["definitions"]["gpu"]["job_variables"]
    assert variables.keys() <= properties.keys()
    assert all(isinstance(value, str) for value in variables["env"].values()), "the API takes no references there"
    defaults = {name: entry["default"] for name, entry in properties.items() if "default" in entry}
    values = {**defaults, **variables}
    job: Any = apply_values(template["job_configuration"], values)
    (container,) = job["job_manifest"]["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "vlp-secrets", "optional": True}}]
    bare: Any = apply_values(template["job_configuration"], defaults)
    assert bare["job_manifest"]["spec"]["template"]["spec"]["containers"][0]["envFrom"] == []
