"""shards and tokenizer, run on tables and features written the way the stages before them write them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shard_files import read_shard

from vlp_models.common.io import hash_path
from vlp_models.common.workspace import Workspace
from vlp_models.data.features import write_chunk, write_index
from vlp_models.data.inputs import InputReader, ModelInputs, RegionInput
from vlp_models.data.pixels import PixelInput
from vlp_models.data.sample import RegionArrays
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import write_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.data.views import VIEWS
from vlp_models.errors import DataError, MissingToolError, ParamsError
from vlp_models.params import Params, load_params
from vlp_models.pipeline.stages import shards, tokenizer

SPLIT_OF = {0: "train", 1: "train", 2: "train", 3: "val", 4: "test"}
COLORS = ["red", "green", "blue", "yellow", "purple"]


def regions_of(number: int) -> RegionArrays:
    n = number % 3
    return RegionArrays(
        features=np.full((n, 4), number, np.float16),
        boxes=np.full((n, 4), 0.5, np.float32),
        class_probs=np.full((n, 2), 0.5, np.float16),
        scores=np.ones(n, np.float32),
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path)
    made.validated.mkdir(parents=True)
    made.features.mkdir(parents=True)
    rows: dict[str, list[dict[str, Any]]] = {"images": [], "captions": [], "questions": []}
    for number in reversed(SPLIT_OF):  # tables need not be sorted
        of_image, color = {"image_id": f"scenes/{number}", "provenance": ""}, COLORS[number]
        path = tmp_path / f"{number}.{'webp' if number == 1 else 'png'}"
        Image.new("RGB", (20, 10), color).save(path)
        size = {"width": 20, "height": 10, "sha256": ""}
        rows["images"].append(of_image | size | {"source": "scenes", "split": SPLIT_OF[number], "path": path.name})
        for i in (1, 0):
            rows["captions"].append(of_image | {"caption_id": f"scenes/{number}#{i}", "text": f"a {color} cube"})
        question = {"question_id": f"scenes/{number}?", "text": f"is it {color}?", "question_type": "is it"}
        answers = [color] * 10 if number != 4 else []
        rows["questions"].append(of_image | question | {"answer_type": "yes/no", "answers": answers})
    statement = {"statement_id": "scenes/3!", "image_id": "scenes/3", "text": "it is yellow", "label": None}
    rows["statements"] = [statement | {"group": "3", "provenance": ""}]
    for name, table in rows.items():
        write_table(table, name, made.validated)
    write_chunk(made.features, 0, [(f"scenes/{number}", regions_of(number)) for number in SPLIT_OF])
    write_index(made.features)
    manifest = {"detector_id": "abc", "feature_dim": 4, "classes": ["background", "cube"]}
    (made.features / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return made


@pytest.fixture
def params() -> Params:
    loaded = load_params(Path(__file__).parents[2] / "params.yaml")
    return dataclasses.replace(
        loaded,
        shards=dataclasses.replace(loaded.shards, images_per_shard=2, pixels=True),
        tokenizer=dataclasses.replace(loaded.tokenizer, vocab_size=200, min_frequency=1, min_answer_count=1),
    )


def test_shards_store_every_row_with_its_image(workspace: Workspace, params: Params) -> None:
    shards.run(params, workspace)
    for split in ("train", "val", "test"):
        numbers = [number for number in SPLIT_OF if SPLIT_OF[number] == split]
        images = ShardDataset(workspace.shards, split, "images", pixels=True)
        assert [sample.image_id for sample in images] == [f"scenes/{number}" for number in numbers]
        for number, sample in zip(numbers, images, strict=True):
            assert sample["captions"] == (f"a {COLORS[number]} cube",) * 2
            assert sample.regions is not None
            np.testing.assert_array_equal(sample.regions.features, regions_of(number).features)
            assert sample.pixels is not None and sample.pixels[1:4] == b"PNG"  # the WebP file as well
        captions = ShardDataset(workspace.shards, split, "captions")
        assert [sample.sample_id for sample in captions] == [f"scenes/{n}#{i}" for n in numbers for i in (0, 1)]
    assert ShardDataset(workspace.shards, "test", "questions")[0]["answers"] == ()
    assert ShardDataset(workspace.shards, "val", "statements")[0]["label"] is None

    manifest = json.loads((workspace.shards / "manifest.json").read_text(encoding="utf-8"))
    counts = manifest["counts"]["train"]
    assert counts.keys() == {*VIEWS, "regions", "shards"}
    made = {name: count for name, count in counts.items() if count}
    assert made == {
        "images": 3,
        "captions": 6,
        "questions": 3,
        "regions": 3,
        "shards": 2,
    }
    assert (manifest["detector_id"], manifest["feature_dim"], manifest["num_classes"]) == ("abc", 4, 2)
    _, first = next(read_shard(workspace.shards / "train-00000000.tar"))
    assert first["json"]["width"] == 20 and [c["id"] for c in first["json"]["captions"]] == ["scenes/0#0", "scenes/0#1"]


PIXELS = ModelInputs(image=PixelInput(height=8, width=8))
REGIONS = ModelInputs(image=RegionInput())


def test_pixel_models_need_no_features(workspace: Workspace, params: Params) -> None:
    shutil.rmtree(workspace.features)
    auto = dataclasses.replace(params, shards=dataclasses.replace(params.shards, pixels="auto"))
    shards.run(auto, workspace, inputs=[PIXELS])
    manifest = json.loads((workspace.shards / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["detector_id"], manifest["feature_dim"], manifest["classes"]) == ("", 0, [])
    assert manifest["counts"]["train"]["regions"] == 0 and manifest["pixels"] is True
    reader = InputReader(PIXELS, Tokenizer.train(["a red cube"] * 2, 30, 1, True), max_text_len=8, max_regions=0)
    dataset = ShardDataset(workspace.shards, "train", "captions", **reader.flags)
    batch = reader.collate([dataset[i] for i in range(len(dataset))])
    assert len(batch.image) == 6 and batch.image.pixels_B3HW[0, 0].min() > batch.image.pixels_B3HW[0, 1].max()  # red
    entries = {name for _, value in read_shard(workspace.shards / "train-00000000.tar") for name in value}
    assert entries == {"json", "png"}
    with pytest.raises(DataError, match=r"the shards have no regions; .*`dvc repro shards`"):
        ShardDataset(workspace.shards, "train", "captions")
    with pytest.raises(DataError, match="dvc repro features"):
        shards.run(auto, workspace, inputs=[PIXELS, REGIONS])


def test_shards_and_tokenizer_are_deterministic(workspace: Workspace, params: Params) -> None:
    hashes = []
    for _ in range(2):
        left = workspace.work("shards", "0123456789abcdef") / "train-00000000"  # of an interrupted run, other inputs
        left.mkdir()
        os.utime(left, (0, 0))
        shards.run(params, workspace)
        assert list((workspace.root / ".work" / "shards").iterdir()) == []
        tokenizer.run(params, workspace)
        hashes.append((hash_path(workspace.shards), hash_path(workspace.tokenizer)))
    assert hashes[0] == hashes[1]


def test_shards_are_kept_until_dvc_has_recorded_them(
    workspace: Workspace, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_STAGE", "shards")
    shards.run(params, workspace)
    made = [hash_path(workspace.shards), hash_path(workspace.contents)]
    for folder in (workspace.shards, workspace.contents):  # as DVC does, after one that was killed while it hashed
        shutil.rmtree(folder)
    monkeypatch.setattr(shards, "_make_shard", None)
    shards.run(params, workspace)
    assert [hash_path(workspace.shards), hash_path(workspace.contents)] == made


def test_texts_of_a_killed_tokenizer_are_removed(
    workspace: Workspace, params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "make_tokenizer", lambda *_: os._exit(9))
    child = os.fork()
    if not child:
        tokenizer.run(params, workspace)
    os.waitpid(child, 0)
    left = list((workspace.root / ".work").rglob("texts.arrow"))
    monkeypatch.undo()
    tokenizer.run(params, workspace)
    assert left and not list((workspace.root / ".work").rglob("texts.arrow"))


def test_missing_features_are_counted_and_named(workspace: Workspace, params: Params) -> None:
    shards.run(params, workspace)
    before = hash_path(workspace.shards)
    write_chunk(workspace.features, 0, [(f"scenes/{number}", regions_of(number)) for number in (0, 2)])
    write_index(workspace.features)
    with pytest.raises(DataError, match=r"no features for 3 of 5 images, such as scenes/1, scenes/3, scenes/4"):
        shards.run(params, workspace)
    assert hash_path(workspace.shards) == before  # what was there is still there


def test_missing_image_is_named(workspace: Workspace, params: Params) -> None:
    (workspace.root / "4.png").unlink()
    with pytest.raises(DataError, match=r"4\.png"):
        shards.run(params, workspace)
    assert not workspace.shards.exists() and not list(workspace.shards.parent.glob(".shards*"))


def test_missing_inputs_are_named(tmp_path: Path, params: Params) -> None:
    for stage in (shards, tokenizer):
        with pytest.raises(DataError, match="dvc repro validate"):
            stage.run(params, Workspace(tmp_path))


def test_vocabulary_comes_from_train_only(workspace: Workspace, params: Params) -> None:
    tokenizer.run(params, workspace)
    vocabulary = Tokenizer.load(workspace.tokenizer).vocabulary
    assert {"red", "green", "blue", "cube"} <= set(vocabulary)
    assert not {"yellow", "purple"} & set(vocabulary)
    answers = json.loads((workspace.tokenizer / "answers.json").read_text(encoding="utf-8"))
    assert answers == ["blue", "green", "red", "yellow"]  # train and val; equals by text


def test_a_vocabulary_by_path(workspace: Workspace, params: Params) -> None:
    by_path = dataclasses.replace(params.tokenizer, source="vocab", vocab="vocab.txt", min_decoded_share=0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cube"]
    (workspace.root / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer.run(dataclasses.replace(params, tokenizer=by_path), workspace)
    assert Tokenizer.load(workspace.tokenizer).vocabulary == tuple(words)
    with pytest.raises(ParamsError, match=r"needs `tokenizer\.vocab`"):
        tokenizer.run(dataclasses.replace(params, tokenizer=dataclasses.replace(by_path, vocab="")), workspace)


def test_a_vocabulary_of_a_folder_trimmed_to_the_texts(workspace: Workspace, params: Params) -> None:
    words = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cube", "##s", "red", "green", "zebra"]
    (workspace.root / "bert").mkdir()
    (workspace.root / "bert" / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    whole = dataclasses.replace(params.tokenizer, source="vocab", vocab="bert", min_decoded_share=0)
    tokenizer.run(dataclasses.replace(params, tokenizer=whole), workspace)
    assert Tokenizer.load(workspace.tokenizer).vocabulary == tuple(words)
    tokenizer.run(dataclasses.replace(params, tokenizer=dataclasses.replace(whole, trim=True)), workspace)
    kept = Tokenizer.load(workspace.tokenizer).vocabulary
    assert set(words) - set(kept) == {"[unused0]", "zebra"}  # "##s" is a single character
    reported = dataclasses.replace(whole, strip_accents=False)
    with pytest.raises(
        ParamsError, match=r"strip_accents: false`, but the tokenizer of bert strips them.*vlp use own-vocab"
    ):
        tokenizer.run(dataclasses.replace(params, tokenizer=reported), workspace)
    with pytest.raises(MissingToolError, match=r"package:no-words`: not installed"):
        tokenizer.run(
            dataclasses.replace(params, tokenizer=dataclasses.replace(whole, vocab="package:no-words")), workspace
        )


def test_no_training_text(workspace: Workspace, params: Params) -> None:
    for name in ("captions", "questions", "statements"):
        write_table([], name, workspace.validated)
    with pytest.raises(DataError, match="the train split has no text"):
        tokenizer.run(params, workspace)


def test_texts_without_an_image_reach_index_and_vocabulary(workspace: Workspace, params: Params) -> None:
    rows = [
        {"text_id": f"books/{i}", "source": "books", "split": split, "text": f"{word} words", "provenance": ""}
        for i, (split, word) in enumerate([("train", "plentiful"), ("train", "few"), ("val", "unseen")])
    ]
    write_table(rows, "texts", workspace.validated)
    shards.run(params, workspace)
    tokenizer.run(params, workspace)
    manifest = json.loads((workspace.shards / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["counts"]["train"]["texts"] == 2 and manifest["sources"] == ["books", "scenes"]
    assert [s.text for s in ShardDataset(workspace.shards, "train", "texts")] == ["plentiful words", "few words"]
    assert len(ShardDataset(workspace.shards, "train", "images")) == 3
    vocabulary = set(Tokenizer.load(workspace.tokenizer).vocabulary)
    assert "words" in vocabulary and "unseen" not in vocabulary
