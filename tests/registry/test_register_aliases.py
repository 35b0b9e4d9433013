"""The alias `challenger` is on the version that registered.json names, or on none."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlp_models.common.workspace import Workspace
from vlp_models.params import load_params
from vlp_models.pipeline.stages import register
from vlp_models.registry import client as registry_client
from vlp_models.registry import serving_cache, versions
from vlp_models.registry.receipts import find_challenger, read_registered

ROOT = Path(__file__).parents[2]
NAME = "vlp-vqa"


class Aliases:
    """MLflow's aliases of models."""

    def __init__(self, **aliases: str) -> None:
        self.aliases = aliases

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self.aliases[alias] = version

    def delete_registered_model_alias(self, name: str, alias: str) -> None:
        del self.aliases[alias]

    def find(self, name: str, alias: str) -> SimpleNamespace | None:
        return SimpleNamespace(version=self.aliases[alias]) if alias in self.aliases else None


@pytest.mark.parametrize(
    ("is_challenger", "before", "after"),
    [
        (True, {"challenger": "1"}, {"challenger": "2"}),
        (False, {"challenger": "1", "champion": "1"}, {"champion": "1"}),
        (False, {}, {}),
    ],
    ids=["a new one", "none any more", "never one"],
)
def test_the_alias_follows_the_receipts(
    is_challenger: bool, before: dict[str, str], after: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aliases = Aliases(**before)
    bundled = SimpleNamespace(task="vqa", is_challenger=is_challenger)
    tags = dict.fromkeys(("run", "model", "family", "variant"), "a")
    record = SimpleNamespace(tags=tags, content="c", run="a", lineage={"facts": {}})
    version = SimpleNamespace(name=NAME, version=2, created=True)

    def replace(module: Any, name: str, result: Any) -> None:
        monkeypatch.setattr(module, name, lambda *arguments: result)

    replace(register, "_make_bundles", [bundled])
    replace(register, "_make_record", record)
    replace(register, "send_unsent", None)
    replace(registry_client, "connect", aliases)
    replace(registry_client, "tracking_errors", contextlib.nullcontext())
    replace(serving_cache, "refresh_serving_cache", None)
    replace(versions, "register", version)
    monkeypatch.setattr(versions, "find_version_by_alias", lambda client, name, alias: client.find(name, alias))
    workspace = Workspace(tmp_path)
    register.run(load_params(ROOT / "params.yaml"), workspace)
    assert aliases.aliases == after
    challenger = find_challenger(read_registered(workspace.reports)["vqa"])
    assert str((challenger or {}).get("version")) == str(after.get("challenger"))
