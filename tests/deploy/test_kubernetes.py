"""The shipped manifests against the API's schema, as Prefect's worker sends them. No cluster is needed."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="not installed: kubernetes-validate")

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
VERSION = "1.33"
TEMPLATE = json.loads((FOLDER / "job-template.json").read_text())
PREFECT = yaml.safe_load((FOLDER / "prefect.yaml").read_text())
DEPLOYMENTS, POOLS = PREFECT["deployments"], PREFECT["definitions"]


def job(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a run: the template filled in by Prefect's own code, changed as its worker does."""
    from prefect.utilities.templating import apply_values

    defaults = {k: v["default"] for k, v in TEMPLATE["variables"]["properties"].items() if "default" in v}
    values = {**defaults, "name": "run", "command": "prefect flow-run execute", **variables}
    unknown = set(values) - set(TEMPLATE["variables"]["properties"])
    assert not unknown, f"the template has no variable {unknown}"
    manifest: dict[str, Any] = apply_values(copy.deepcopy(TEMPLATE["job_configuration"]["job_manifest"]), values)
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    container["args"] = shlex.split(container["args"])
    return manifest


def jobs() -> list[Any]:
    pools = {f"{d['name']} {d['entrypoint'].partition(':')[2]}": d["work_pool"]["job_variables"] for d in DEPLOYMENTS}
    pools |= {name: pool["job_variables"] for name, pool in POOLS.items()}
    return [pytest.param(variables, id=name) for name, variables in pools.items()]


@pytest.mark.parametrize("variables", jobs())
def test_job_is_valid_and_restricted(variables: dict[str, Any]) -> None:
    manifest = job({**variables, "image": "registry.example.org/vlp@sha256:0"})
    kubernetes_validate.validate(manifest, VERSION, strict=True)
    pod = manifest["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    launching = variables == POOLS["launching"]["job_variables"]
    assert pod["automountServiceAccountToken"] is launching
    assert pod["serviceAccountName"] == ("vlp-launcher" if launching else "default")
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for volume in pod["volumes"]:
        assert set(volume) & {"persistentVolumeClaim", "emptyDir"}, "nothing of the node"
        assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])
        assert container["envFrom"] == [{"secretRef": {"name": "vlp-secrets", "optional": True}}]
        plain = {entry["name"] for entry in container["env"]}
        assert not [name for name in plain if any(word in name for word in ("KEY", "SECRET", "PASSWORD", "WEBHOOK"))]


def test_new_data_starts_the_same_run_as_on_one_machine() -> None:
    one_machine = yaml.safe_load((FOLDER.parent.parent / "prefect.yaml").read_text())["deployments"]
    wanted = {d["entrypoint"]: d.get("triggers") for d in one_machine if "retrain" in d["entrypoint"]}
    assert {d["entrypoint"]: d.get("triggers") for d in DEPLOYMENTS if "retrain" in d["entrypoint"]} == wanted
    assert all(wanted.values())


def test_check_finds_a_mistake() -> None:
    """`env` takes strings, not references to a secret."""
    manifest = job({"image": "x", "env": {"VLP_WEBHOOK": {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}}})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_workspace_objects_are_valid() -> None:
    objects = list(yaml.safe_load_all((FOLDER / "workspace.yaml").read_text()))
    assert [item["kind"] for item in objects] == ["Namespace", "PersistentVolumeClaim"]
    for item in objects:
        kubernetes_validate.validate(item, VERSION, strict=True)
    assert (
        objects[1]["metadata"]["name"]
        == job({"image": "x"})["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    )


def test_rights_to_create_train_jobs_are_valid_and_no_others() -> None:
    objects = list(yaml.safe_load_all((FOLDER / "trainjobs.yaml").read_text()))
    for item in objects:
        kubernetes_validate.validate(item, VERSION, strict=True)
    rules = [rule for item in objects for rule in item.get("rules", ())]
    changing = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    changing = {(resource, verb) for resource, verb in changing if verb not in ("get", "list")}
    assert changing == {("trainjobs", "create"), ("trainjobs", "delete")}


def test_pods_of_the_ray_cluster_are_valid_and_have_the_locked_version() -> None:
    spec = yaml.safe_load((FOLDER / "ray.yaml").read_text())["spec"]
    locked = (FOLDER.parent.parent / "requirements-cluster.lock").read_text()
    assert f"ray=={spec['rayVersion']} " in locked.replace("ray[client,train]", "ray")
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)
