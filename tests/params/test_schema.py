"""params.schema.json: up to date, accepts params.yaml with every preset, and refuses what `load_params` refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from vlp_models.cli.presets import list_presets
from vlp_models.cli.project import SCHEMA, template_files
from vlp_models.common.plugins import contrib_folders
from vlp_models.contrib import CONTRIB
from vlp_models.errors import ParamsError
from vlp_models.params import merged, parse_params

ROOT = Path(__file__).parents[2]
VALIDATOR = Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def read(path: Path) -> Any:
    """Read a YAML file as editors do: YAML 1.2, in which 1e-4 is a number."""
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def problems(raw: Any) -> list[str]:
    return [f"{error.json_path}: {error.message:.200}" for error in VALIDATOR.iter_errors(raw)]


def without_nulls(value: Any) -> Any:
    """Drop what a preset deletes with `null`."""
    if not isinstance(value, dict):
        return value
    return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}


def test_the_schema_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    if contrib_folders() != list(CONTRIB):
        pytest.skip("a folder of contrib is missing")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    from params_schema import params_schema

    text = params_schema()
    sys.modules.pop("params_schema")
    assert SCHEMA.read_text(encoding="utf-8") == text, "run `python docs/_ext/params_schema.py`"
    Draft202012Validator.check_schema(json.loads(text))


def test_editors_find_the_schema_next_to_params_yaml() -> None:
    first = (ROOT / "params.yaml").read_text(encoding="utf-8").partition("\n")[0]
    assert first == "# yaml-language-server: $schema=params.schema.json"
    assert (ROOT / "params.schema.json").samefile(template_files()["params.schema.json"])


@pytest.mark.parametrize("name", ["", *list_presets(ROOT)])
def test_params_yaml_is_valid_with_every_preset(name: str) -> None:
    raw = read(ROOT / "params.yaml")
    first = list_presets(ROOT)[name].read_text(encoding="utf-8").partition("\n")[0] if name else ""
    for below in re.findall(r"vlp use ([\w-]+)", first):
        raw = without_nulls(merged(raw, read(list_presets(ROOT)[below])))
    assert not problems(raw)


@pytest.mark.parametrize("path", [ROOT / "params.yaml", *list_presets(ROOT).values()], ids=lambda path: path.stem)
def test_yaml_means_the_same_in_both_versions(path: Path) -> None:
    """50_000_000 and `yes` are a number and true in YAML 1.1, which we read, and texts in 1.2, which editors read."""
    values = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
    assert not re.search(r"[:,\[{ ](\d+_[\d_]+|yes|no|on|off|0\d+)\s*([,\]}]|$)", values, re.M | re.I)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pretrain.tden.max_epoch", 3),
        ("defaults.finetune.batch_size", 0),
        ("defaults.finetun", {}),
        ("finetune.tden-vqa.start", "tden"),
        ("evaluate.splits", ["tset"]),
        ("features.min_score", 1.0),
        ("features.max_regions", 0),
        ("shards.images_per_shard", 0),
        ("detector.batch_size", 0),
        ("detector.feature_dim", 0),
        ("generate.scenes.seed", -1),
        ("generate.scenes.train", -1),
        ("generate.scenes.val", -1),
        ("generate.scenes.questions_per_image", -1),
        ("generate.scenes.misspelled", 1.5),
        ("generate.scenes.boilerplate", -0.1),
        ("pretrain.tden.accumulate", 0),
        ("pretrain.tden.max_epochs", -1),
        ("pretrain.tden.max_steps", -1),
        ("pretrain.tden.seed", -1),
        ("pretrain.tden.recipe.objectives.mlm", -1.0),
        ("detector.backbone", "resnet"),
        ("models.tden.seed", "one"),
        ("models.a/b", {"family": "tden"}),
        ("data.scenes", {"root": "data/raw/scenes"}),
        ("trainer.devices", True),
        ("shards", None),
        ("tokenizer.strip_accents", "yes"),
        ("tracking.model_prefix", "a'b"),
        ("pretrain.tden.recipe.objectives.mlm", "much"),
        ("plugins", {"task": {"mine": "plugins.mine:Mine"}}),
    ],
)
def test_what_the_checker_refuses_is_refused(key: str, value: object) -> None:
    raw = read(ROOT / "params.yaml")
    *parents, last = key.split(".")
    node = raw
    for parent in parents:
        node = node[parent]
    node[last] = value
    with pytest.raises(ParamsError):
        parse_params(raw)
    assert problems(raw)


def test_config_keys_are_those_of_the_family() -> None:
    raw = read(ROOT / "params.yaml")
    raw["models"]["tden"]["config"]["hiden"] = 128
    assert any("'hiden' was unexpected" in problem for problem in problems(raw))
    raw["models"]["tden"]["family"] = "a_plugin"
    assert not problems(raw)
