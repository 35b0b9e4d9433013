"""augment NAME: captions of training images alone, new ones, and a fine-tuning that learns from them or its control."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from toy_dataset import write_workspace

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.augment import captions as augment
from vlp_models.contrib.augment.captions import choose, training_images
from vlp_models.contrib.augment.samples import AugmentedDataset, GeneratedCaption, read_generated
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import SCHEMAS, read_table, write_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.decoding.search import Hypothesis
from vlp_models.models.meta_model import image_kinds
from vlp_models.params import AugmentParams, Params, parse_params, read_yaml
from vlp_models.pipeline.check_params import check_runs, find_in_use
from vlp_models.pipeline.dvc.dvc_yaml import render
from vlp_models.pipeline.dvc.graph import NOTHING, build_pipeline
from vlp_models.pipeline.stages import finetune, pretrain

XGPT = {"family": "xgpt", "config": {"hidden": 16, "heads": 2, "intermediate": 32, "layers": 1, "init_std": 0.1}}
WRITER = {"task": "captioning", "start": "pretrain/xgpt", "max_epochs": 6, "optimizer": {"lr": 1e-2}}
SECTIONS: dict[str, Any] = {
    "models": {"xgpt": XGPT},
    "pretrain": {"xgpt": {"model": "xgpt", "max_epochs": 1, "recipe": {"mix": "alternate", "objectives": {"ic": 1.0}}}},
    "finetune": {
        "writer": WRITER,
        "more": {"task": "retrieval", "start": "pretrain/tden", "augment": "extra", "max_steps": 6},
        "control": {
            "task": "retrieval",
            "start": "pretrain/tden",
            "augment": {"captions": "extra", "control": True},
            "max_steps": 6,
        },
    },
}
AUGMENT = {"extra": {"start": "finetune/writer", "captions": 2, "samples": 6, "max_caption_len": 8, "top_p": 1.0}}


def validated_images(workspace: Workspace) -> list[dict[str, Any]]:
    """The images table that these shards were made of."""
    rows = []
    for split in ("train", "val", "test"):
        ids = ShardDataset(workspace.shards, split, "images", regions=False).image_ids()
        rows += [
            {"image_id": i, "source": "toy", "split": split, "path": f"{i}.png", "sha256": f"hash of {i}"} for i in ids
        ]
    return rows


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Params, Workspace]:
    """A workspace in which XGPT has learned to caption and has written."""
    root = tmp_path_factory.mktemp("augment")
    source = (Path(__file__).parents[3] / "params.yaml").read_text()
    assert "augment" not in yaml.safe_load(source)  # the section is there only where someone wants it
    params = with_augment(root)
    workspace = Workspace(root)
    workspace.validated.mkdir(parents=True)
    write_table(validated_images(workspace), "images", workspace.validated)
    pretrain.run(params, workspace, "xgpt")
    pretrain.run(params, workspace, "tden")
    finetune.run(params, workspace, "writer")
    augment.run(params, workspace, "extra")
    return params, workspace


def with_augment(root: Path) -> Params:
    plain = {k: v for k, v in SECTIONS.items() if k != "finetune"}
    write_workspace(root, **plain, finetune={"writer": WRITER})
    raw = read_yaml(root / "params.yaml")
    raw["augment"] = AUGMENT
    raw["finetune"] |= SECTIONS["finetune"]
    (root / "params.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(raw)), sort_keys=False))
    return parse_params(raw)


def test_captions_are_new_different_and_of_training_images(written: tuple[Params, Workspace]) -> None:
    _, workspace = written
    directory = workspace.augmented("extra")
    rows = read_table("captions", directory).to_pylist()
    train = ShardDataset(workspace.shards, "train", "images", regions=False).references()
    tokenizer = Tokenizer.load(workspace.tokenizer)
    assert rows and {row["image_id"] for row in rows} <= train.keys()
    texts: dict[str, list[str]] = {}
    for row in rows:
        texts.setdefault(row["image_id"], []).append(row["text"])
        assert row["provenance"] == "augment extra: finetune/writer"
        assert tokenizer.split(row["text"]) not in [tokenizer.split(text) for text in train[row["image_id"]]]
    assert max(map(len, texts.values())) == 2 and all(len(set(extra)) == len(extra) for extra in texts.values())
    assert len({row["caption_id"] for row in rows}) == len(rows)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["stage"] == "augment@extra" and manifest["params"]["samples"] == 6
    assert manifest["counts"]["captions"] == len(rows) and manifest["counts"]["images"] == len(train) == 44
    assert set(manifest["counts"]) == {"images", "captions", "repeated", "empty", "unfinished", "special"}
    assert manifest["counts"]["repeated"] > 0  # a captioner that has learned anything records what people extra


def test_the_same_params_write_the_same_bytes(written: tuple[Params, Workspace]) -> None:
    params, workspace = written
    file = workspace.augmented("extra") / "captions.parquet"
    before = file.read_bytes()
    augment.run(params, workspace, "extra")
    assert file.read_bytes() == before
    other = dataclasses.replace(params.augment["extra"], seed=2)
    augment.run(dataclasses.replace(params, augment={"extra": other}), workspace, "extra")
    assert file.read_bytes() != before
    augment.run(params, workspace, "extra")


def test_retrieval_trains_on_them_and_its_control_on_equally_many(written: tuple[Params, Workspace]) -> None:
    params, workspace = written
    count = len(read_table("captions", workspace.augmented("extra")))
    for name in ("more", "control"):
        finetune.run(params, workspace, name)
    reports = {name: json.loads(workspace.training(f"finetune/{name}").read_text()) for name in ("more", "control")}
    for report in reports.values():
        assert report["train_samples"] == 44 + count and report["steps"] == 6
    assert reports["more"]["samples"] == reports["control"]["samples"]
    assert reports["more"]["loss"] != reports["control"]["loss"]


@pytest.mark.parametrize("control", [False, True])
def test_sample_of_a_generated_caption(written: tuple[Params, Workspace], control: bool) -> None:
    """Its image's regions, and the written text or, in the control, the image's own once more."""
    _, workspace = written
    base = ShardDataset(workspace.shards, "train", "captions")
    extra = read_generated(workspace.augmented("extra"), workspace.shards)
    more = AugmentedDataset(base, extra, control=control)
    assert len(more) == len(base) + len(extra)
    own = {sample.image_id: sample for sample in (base[i] for i in range(len(base)))}
    for place, caption in enumerate(extra):
        sample = more[len(base) + place]
        assert (sample.sample_id, sample.image_id) == (caption.caption_id, caption.image_id)
        assert sample.text == (own[caption.image_id].text if control else caption.text)
        assert sample.regions is not None
        assert (sample.regions.features == own[caption.image_id].regions.features).all()
    assert [more[i].sample_id for i in range(5)] == [base[i].sample_id for i in range(5)]
    with pytest.raises(DataError, match="no image of this run's `sources` has a generated caption"):
        AugmentedDataset(base, [GeneratedCaption(caption_id="a", image_id="b", text="c")], control=control)


def images(**changes: dict[str, str]) -> pa.Table:
    """Two training images and one of each other split; changes: of the row with this id."""
    rows = [
        {"image_id": name, "source": source, "split": split, "sha256": f"hash of {name}"}
        for name, source, split in (
            ("a", "one", "train"),
            ("b", "two", "train"),
            ("v", "one", "val"),
            ("t", "two", "test"),
        )
    ]
    return pa.Table.from_pylist([row | changes.get(row["image_id"], {}) for row in rows], schema=SCHEMAS["images"])


def test_images_of_an_evaluation_split_are_refused() -> None:
    assert training_images(images(), []) == {"a", "b"} and training_images(images(), ["one"]) == {"a"}
    with pytest.raises(DataError, match=r"1 images of the test split, such as a: .*Name other `sources`"):
        training_images(images(t={"sha256": "hash of a"}), [])  # the same picture under another dataset's name
    with pytest.raises(DataError, match="of the val split, such as v"):
        training_images(pa.concat_tables([images(), images(v={"split": "train"}).slice(2, 1)]), [])
    assert training_images(images(t={"sha256": "hash of a"}), ["two"]) == {"b"}
    assert training_images(images(a={"sha256": ""}, t={"sha256": ""}), []) == {"a", "b"}  # not known is not equal
    with pytest.raises(DataError, match="no training images in three"):
        training_images(images(), ["three"])


def test_leakage_stops_the_stage_before_it_writes(written: tuple[Params, Workspace]) -> None:
    params, workspace = written
    rows = validated_images(workspace)
    before = (workspace.augmented("extra") / "captions.parquet").read_bytes()
    leaking = [row | {"sha256": rows[0]["sha256"]} if row["split"] == "test" else row for row in rows]
    try:
        write_table(leaking, "images", workspace.validated)
        with pytest.raises(DataError, match=f"of 1 images of the test split, such as {rows[0]['image_id']}"):
            augment.run(params, workspace, "extra")
        write_table(rows[1:], "images", workspace.validated)
        with pytest.raises(DataError, match="1 images of the train split are not in the validated tables"):
            augment.run(params, workspace, "extra")
    finally:
        write_table(rows, "images", workspace.validated)
    assert (workspace.augmented("extra") / "captions.parquet").read_bytes() == before


def test_captions_of_held_out_images_are_refused(written: tuple[Params, Workspace], tmp_path: Path) -> None:
    _, workspace = written
    held_out = ShardDataset(workspace.shards, "test", "images", regions=False).image_ids()[0]
    row = {"caption_id": "x", "image_id": held_out, "text": "a star", "provenance": "by hand"}
    write_table([row], "captions", tmp_path)
    with pytest.raises(DataError, match=f"of 1 images of the test split, such as {held_out}"):
        read_generated(tmp_path, workspace.shards)


def test_most_probable_new_texts_are_chosen(written: tuple[Params, Workspace]) -> None:
    from vlp_models.tasks.base import load_task_model

    _, workspace = written
    captioner = load_task_model(workspace.checkpoint("finetune/writer"))
    word = {token: i for i, token in enumerate(captioner.tokenizer.vocabulary)}

    def extra(text: str, score: float) -> Hypothesis:
        return Hypothesis(ids=[word[w] for w in text.split()], score=score)

    p = AugmentParams(**AUGMENT["extra"])
    drawn = [
        extra("a red star", -4.0),
        extra("a star", -2.7),  # likelier a token than the next, for all it is shorter
        extra("a blue star", -3.2),
        extra("a blue star", -3.2),
        extra("the star", -9.0),
        extra("", -0.1),
        extra("a [UNK] star", -0.2),
        extra("the star the star the star a red", -0.3),  # all of `max_caption_len`, and no [SEP]
    ]
    why_not = {"repeated": 2, "empty": 1, "unfinished": 1, "special": 1}
    assert choose(captioner, drawn, ["A  red star"], p) == (["a blue star", "a star"], why_not)
    more = dataclasses.replace(p, captions=9, samples=9)
    assert choose(captioner, drawn, ["a red star"], more)[0] == ["a blue star", "a star", "the star"]


def sections(**changes: Any) -> dict[str, Any]:
    raw = read_yaml(Path(__file__).parents[3] / "params.yaml")
    raw["models"] = {**raw["models"], "xgpt": XGPT}
    raw["pretrain"] = {**raw["pretrain"], **SECTIONS["pretrain"]}
    raw["finetune"] = {**raw["finetune"], **SECTIONS["finetune"], **changes.pop("finetune", {})}
    raw["augment"] = {"extra": {**AUGMENT["extra"], **changes.pop("extra", {})}}
    return raw


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": {"start": "pretrain/xgpt"}}, "must be a fine-tuning of the task captioning"),
        ({"extra": {"start": "finetune/tden-vqa"}}, "of the task captioning"),
        ({"extra": {"samples": 1}}, "`samples: 1` must be at least `captions: 2`"),
        ({"extra": {"top_p": 0.0}}, "top_p: 0.0` should be greater than 0"),
        ({"extra": {"sources": ["scene"]}}, "did you mean `scenes`"),
        (
            {"finetune": {"more": {"task": "retrieval", "start": "pretrain/tden", "augment": "extr"}}},
            "did you mean `extra`",
        ),
        (
            {"finetune": {"more": {"task": "vqa", "start": "pretrain/tden", "augment": {"control": True}}}},
            "requires `augment.captions`",
        ),
        ({"finetune": {"writer": {**WRITER, "augment": "extra"}}}, "whose captions writer writes itself"),
        (
            {"finetune": {"other": {"task": "retrieval", "start": "finetune/more", "augment": "extra"}}, "extra": {}},
            "",  # a chain is none of it
        ),
    ],
)
def test_invalid_params_are_explained(changes: dict[str, Any], message: str) -> None:
    if not message:
        parse_params(sections(**changes))
        return
    with pytest.raises(ParamsError, match=message):
        parse_params(sections(**changes))


def test_tasks_that_do_not_train_on_captions_refuse_them() -> None:
    vqa = {"task": "vqa", "start": "pretrain/tden", "augment": "extra"}
    with pytest.raises(ParamsError, match="vqa with these options does not train on captions"):
        check_runs(parse_params(sections(finetune={"more": vqa})))
    check_runs(parse_params(sections()))


def test_texts_per_image_needs_a_supporting_task_and_no_stream() -> None:
    check_runs(parse_params(sections(finetune={"writer": {**WRITER, "texts_per_image": 2}})))
    writer = {**WRITER, "texts_per_image": 2, "options": {"self_critical": {"samples": 2}}}
    with pytest.raises(
        ParamsError, match=r"`finetune\.writer\.texts_per_image: 2`: with these options captioning .*remove it"
    ):
        check_runs(parse_params(sections(finetune={"writer": writer})))
    found = {"task": "retrieval", "start": "pretrain/tden", "texts_per_image": 2}
    with pytest.raises(ParamsError, match=r"with these options retrieval reads one image per text"):
        check_runs(parse_params(sections(finetune={"more": found})))
    check_runs(parse_params(sections(finetune={"more": {**found, "options": {"scorer": "pairs"}}})))
    raw = sections(finetune={"more": {"task": "vqa", "start": "pretrain/tden", "texts_per_image": 2}})
    check_runs(parse_params(raw))
    raw["trainer"]["stream"] = {"address": "s3://bucket/shards"}
    with pytest.raises(ParamsError, match=r"texts_per_image` and `trainer\.stream\.address` require different orders"):
        check_runs(parse_params(raw))


def test_dvc_yaml_has_the_stage_if_params_yaml_does() -> None:
    raw = sections()
    stages = generated(raw)
    entries, deps = stages["finetune"]["foreach"], stages["finetune"]["do"]["deps"]
    assert entries["more"]["input_0"] == "data/augmented/extra" and entries["tden-vqa"]["input_0"] == NOTHING
    assert "${item.input_0}" in deps and "augment" in stages["plan"]["params"]
    learns = "data/contents/regions/trained_on/images/all.json"
    assert stages["augment"]["foreach"] == {
        "extra": {"start": "finetune/writer", "family": "xgpt", "trained_on": learns}
    }
    plain = read_yaml(Path(__file__).parents[3] / "params.yaml")
    assert "augment" not in render(generated(plain))


def generated(raw: dict[str, Any]) -> dict[str, Any]:
    params = parse_params(raw)
    return build_pipeline(params, raw, kinds=image_kinds(params), used=find_in_use(params))
