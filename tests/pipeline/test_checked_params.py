"""params.yaml is checked once: equal params, code and packages are not checked again, and nothing else is forgotten."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vlp_models.cli.presets import list_presets, merge_overlay
from vlp_models.errors import ParamsError
from vlp_models.models.meta_model import image_kinds
from vlp_models.params import Params, load_params
from vlp_models.pipeline import check_params as checks
from vlp_models.pipeline import checked_params
from vlp_models.pipeline.check_params import check_runs, find_in_use
from vlp_models.pipeline.checked_params import READ, RUNS, PlanFacts, check_params

ROOT = Path(__file__).parents[2]


class Only:
    """A section whose keys may be read in part only."""

    def __init__(self, section: Any, keys: tuple[str, ...], where: str) -> None:
        self._section, self._keys, self._where = section, keys, where

    def __getattr__(self, name: str) -> Any:
        assert name in self._keys, f"{self._where}.{name} is read: add it to READ in pipeline/checked_params.py"
        return getattr(self._section, name)


def guarded(params: Params) -> Params:
    """Return params that fail if anything outside READ is read."""
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        section, keys = getattr(params, field.name), READ.get(field.name)
        if field.name in RUNS and keys:
            sections[field.name] = {name: Only(run, keys, f"{field.name}.{name}") for name, run in section.items()}
        elif keys != ():
            sections[field.name] = Only(section, keys or (), field.name)
    return dataclasses.replace(params, **sections)


@pytest.mark.parametrize("preset", ["", "tiny", "scenes-tasks", "vlmo", "soho", "xgpt", "unified-vlp"])
def test_the_check_reads_nothing_that_its_identity_leaves_out(preset: str, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    params = merge_overlay(tmp_path / "params.yaml", list_presets()[preset] if preset else None, []).params
    check_runs(guarded(params))
    find_in_use(guarded(params))
    image_kinds(guarded(params))


def plain(facts: PlanFacts) -> tuple[list[Any], str]:
    """Return the facts with their order; JSON has no tuples."""
    return list(facts.kinds.items()), json.dumps(vars(facts.used))


def test_equal_params_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, calls = load_params(ROOT / "params.yaml"), list[Params]()
    monkeypatch.setattr(checks, "check_runs", lambda found: (calls.append(found), check_runs(found)))
    first = check_params(params, tmp_path)
    longer = dataclasses.replace(params.finetune["tden-vqa"], max_epochs=99, seed=7)
    same = dataclasses.replace(params, finetune={**params.finetune, "tden-vqa": longer})
    again = check_params(same, tmp_path)
    assert len(calls) == 1
    assert plain(again) == plain(PlanFacts(kinds=image_kinds(params), used=find_in_use(params)))

    too_long = dataclasses.replace(params.finetune["tden-vqa"], max_text_len=600)
    wrong = dataclasses.replace(params, finetune={**params.finetune, "tden-vqa": too_long})
    for _ in range(2):  # errors are not remembered
        with pytest.raises(ParamsError, match="max_text_len: 600"):
            check_params(wrong, tmp_path)
    assert len(calls) == 3

    code = tmp_path / "code"  # the check runs again on other code
    code.mkdir()
    (code / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(checked_params, "ROOT", code)
    check_params(params, tmp_path)
    check_params(params, tmp_path)
    assert len(calls) == 4
    (code / "a.py").write_text("x = 2\n")
    check_params(params, tmp_path)
    assert len(calls) == 5

    (tmp_path / ".work" / "plan" / "checked.json").write_text("{damaged")
    assert plain(check_params(params, tmp_path)) == plain(first) and len(calls) == 6
