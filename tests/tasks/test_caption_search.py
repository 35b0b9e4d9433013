"""Consensus with captions of similar images: against a slow search, with blank images, saved and loaded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_dataset import Toy, write_workspace
from toy_tasks import learn, make, predict

from vlp_models.common.workspace import Workspace
from vlp_models.data.inputs import blanked
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.params import EvaluateParams, build
from vlp_models.pipeline import training_job
from vlp_models.pipeline.stages import finetune, pretrain
from vlp_models.pipeline.training_job import check_searches
from vlp_models.tasks import caption_search
from vlp_models.tasks.caption_search import CAPTIONS, FEATURES, CaptionIndex
from vlp_models.tasks.captioning import Captioning

SAMPLED = EvaluateParams(consensus_samples=8, consensus_temperature=1.5)
NEIGHBORS = replace(SAMPLED, consensus_neighbors=3)


def captioner(toy: Toy, settings: EvaluateParams) -> Captioning:
    """Train briefly, so that sentences are well-formed but rarely match the image."""
    captioning = make(toy, "captioning")
    assert isinstance(captioning, Captioning)
    learn(captioning, toy, 30)
    captioning.set_search(settings)
    captioning.prepare_search(toy.shards, {})
    return captioning


def count_right(captioning: Captioning, toy: Toy) -> int:
    """Return the number of val images whose caption equals the reference."""
    references = ShardDataset(toy.shards, "val", "images").references()
    return sum(row["caption"] in references[row["image_id"]] for row in predict(captioning, toy, "val"))


def test_captions_of_similar_images_improve_the_choice(toy: Toy) -> None:
    alone, looking = captioner(toy, SAMPLED), captioner(toy, NEIGHBORS)
    assert count_right(looking, toy) > count_right(alone, toy)
    rows = predict(looking, toy, "val")
    alone.set_search(EvaluateParams())
    assert [row["beam"] for row in rows] == [row["caption"] for row in predict(alone, toy, "val")]
    assert any(row["caption"] != row["beam"] for row in rows)
    expected = (
        "beam 3, consensus with 8 sampled at 1.5 by similarity to captions of 3 similar images, at most 24 tokens"
    )
    assert looking.search == expected
    dataset = ShardDataset(toy.shards, "val", "images")
    samples = [dataset[i] for i in range(len(dataset))]
    apart = [looking.predict(looking.read([sample]), [sample])[0] for sample in samples]
    assert apart == rows, "a caption does not depend on its batch"


def test_blank_images_get_no_neighbors(toy: Toy) -> None:
    looking = captioner(toy, NEIGHBORS)
    dataset = ShardDataset(toy.shards, "val", "images")
    samples = [dataset[i] for i in range(len(dataset))]
    blind = looking.predict(blanked(looking.read(samples)), samples)
    assert len({row["caption"] for row in blind}) == 1


def test_choice_and_neighbors_equal_a_slow_search(toy: Toy) -> None:
    index = CaptionIndex.build(toy.shards, {}, toy.tokenizer, 4)
    images = ShardDataset(toy.shards, "train", "images")
    means = {}
    for sample in map(images.__getitem__, range(len(images))):
        assert sample.regions is not None
        means[sample.image_id] = sample.regions.features[:4].astype(np.float64).mean(0)
    captions = {image: [text.split() for text in texts] for image, texts in images.references().items()}
    scorer = CiderD(DocumentFrequencies.count(captions.values()), captions.__getitem__)
    candidates = [["a", "green", "circle", "."], ["a", "blue", "star"], ["a", "red", "square"]]
    for image in list(means)[:5]:
        query = means[image] / np.linalg.norm(means[image])
        cosine = {other: query @ mean / np.linalg.norm(mean) for other, mean in means.items() if other != image}
        near = index.nearest(image, query.astype(np.float32), 4)
        assert image not in near and len(near) == 4
        floor = sorted(cosine.values())[-4]
        assert all(cosine[other] > floor - 1e-3 for other in near), "float16 is no more precise"
        stripped = [[word for word in words if word != "."] for words in candidates]
        slow = np.mean([[scorer.score(other, [words])[0] for words in stripped] for other in near], axis=0)
        chosen = index.choose(image, query.astype(np.float32), candidates, 4)
        assert slow[chosen] == pytest.approx(slow.max())


def test_saved_search_is_equal_and_a_damaged_one_is_rejected(toy: Toy, tmp_path: Path) -> None:
    looking = captioner(toy, replace(NEIGHBORS, beam_size=2, max_caption_len=9))
    rows = predict(looking, toy, "val")
    looking.save_search(tmp_path / "search")
    looking.set_search(EvaluateParams())
    assert predict(looking, toy, "val") != rows
    looking.load_search(tmp_path / "search")
    assert predict(looking, toy, "val") == rows

    features = (tmp_path / "search" / FEATURES).read_bytes()
    (tmp_path / "search" / FEATURES).write_bytes(features[: len(features) // 2])
    with pytest.raises(CheckpointError, match="invalid caption index"):
        looking.load_search(tmp_path / "search")
    (tmp_path / "search" / FEATURES).write_bytes(features)
    (tmp_path / "search" / CAPTIONS).write_text('[["one", ["a dog"]]]')
    with pytest.raises(CheckpointError, match=r"expected float16 \(1, 6\)"):
        looking.load_search(tmp_path / "search")
    for text in (
        '{"beam_size": 0}',
        '{"beam_size": 1000, "max_caption_len": 100}',
        '{"consensus_temperature": 1e-300}',
        "[1]",
    ):
        (tmp_path / "search" / "search.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"search\.json: invalid caption search settings"):
            looking.load_search(tmp_path / "search")


def test_version_keeps_the_index_it_was_registered_with(toy: Toy, tmp_path: Path) -> None:
    """Evaluated again, it keeps its saved index; a version registered without one gets an index of today's data."""
    looking = captioner(toy, NEIGHBORS)
    assert looking.caption_search.index is not None
    own = looking.caption_search.index
    looking.caption_search.index = CaptionIndex(own.features_NF[:9], own.captions[:9], own.image_ids[:9], toy.tokenizer)
    looking.save_search(tmp_path / "with")
    looking.set_search(SAMPLED)
    looking.save_search(tmp_path / "without")
    looking.set_search(NEIGHBORS)
    for name, images in (("with", 9), ("without", len(own.image_ids))):
        looking.prepare_search(toy.shards, {}, tmp_path / name)
        assert len(looking.caption_search.index.image_ids) == images


def test_too_many_images_are_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the captioner's stage and its pretraining; not in others, or if no index is configured."""
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    repeated = replace(params.finetune["captioning"], sources={"toy": 9})
    params = replace(params, finetune={**params.finetune, "captioning": repeated})
    looking = replace(params, evaluate=NEIGHBORS)
    images = len(ShardDataset(workspace.shards, "train", "images", captioned=True))
    monkeypatch.setattr(caption_search, "MAX_IMAGES", images)
    check_searches(looking, workspace.shards, "finetune/captioning")  # an image counts once
    monkeypatch.setattr(caption_search, "MAX_IMAGES", images - 1)
    check_searches(looking, workspace.shards, "finetune/vqa")
    check_searches(params, workspace.shards, "finetune/captioning")
    monkeypatch.setattr(training_job, "fit", lambda *_, **__: pytest.fail("training started"))
    shutil.copytree(workspace.checkpoint("initial/tden"), workspace.checkpoint("pretrain/tden"))
    for stage, key in ((pretrain, "tden"), (finetune, "captioning")):
        with pytest.raises(DataError, match=f"{images} captioned .* supports 1 to {images - 1}. Set it to 0"):
            stage.run(looking, workspace, key)


def test_neighbors_need_samples() -> None:
    with pytest.raises(ParamsError, match="set `consensus_samples`, too"):
        build(EvaluateParams, {"consensus_neighbors": 60}, where="evaluate")
