"""A captioner that looks up photos which look alike: against a slow search, unseen pictures, and the disk."""

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
from vlp_models.pipeline.check_params import check_searches
from vlp_models.pipeline.stages import finetune, pretrain
from vlp_models.tasks import caption_search as caption_memory
from vlp_models.tasks.caption_search import CAPTIONS, FEATURES, CaptionIndex
from vlp_models.tasks.captioning import Captioning
from vlp_models.training import run as training

UNDECIDED = EvaluateParams(consensus_samples=8, consensus_temperature=1.5)
LOOKING = replace(UNDECIDED, consensus_neighbors=3)


def captioner(toy: Toy, settings: EvaluateParams) -> Captioning:
    """It has learnt how sentences go, and hardly what is to be seen."""
    captioning = make(toy, "captioning")
    assert isinstance(captioning, Captioning)
    learn(captioning, toy, 30)
    captioning.set_search(settings)
    captioning.prepare_search(toy.shards, {})
    return captioning


def right(captioning: Captioning, toy: Toy) -> int:
    """How many photos of val are captioned as their reference is."""
    photos = ShardDataset(toy.shards, "val", "images").references()
    return sum(row["caption"] in photos[row["image_id"]] for row in predict(captioning, toy, "val"))


def test_what_photos_alike_are_called_is_what_is_said(toy: Toy) -> None:
    alone, looking = captioner(toy, UNDECIDED), captioner(toy, LOOKING)
    assert right(looking, toy) > right(alone, toy)
    said = predict(looking, toy, "val")
    alone.set_search(EvaluateParams())
    assert [row["beam"] for row in said] == [row["caption"] for row in predict(alone, toy, "val")]
    assert any(row["caption"] != row["beam"] for row in said)
    expected = "beam 3, of it and 8 drawn at 1.5 the most like captions of 3 similar photos, at most 24 tokens"
    assert looking.search == expected
    dataset = ShardDataset(toy.shards, "val", "images")
    samples = [dataset[i] for i in range(len(dataset))]
    apart = [looking.predict(looking.read([sample]), [sample])[0] for sample in samples]
    assert apart == said, "a caption does not depend on its batch"


def test_nobody_peeks_at_a_blanked_photo(toy: Toy) -> None:
    looking = captioner(toy, LOOKING)
    dataset = ShardDataset(toy.shards, "val", "images")
    samples = [dataset[i] for i in range(len(dataset))]
    unseen = looking.predict(blanked(looking.read(samples)), samples)
    assert len({row["caption"] for row in unseen}) == 1


def test_choice_and_neighbours_equal_a_slow_search(toy: Toy) -> None:
    index = CaptionIndex.build(toy.shards, {}, toy.tokenizer, 4)
    photos = ShardDataset(toy.shards, "train", "images")
    means = {}
    for sample in map(photos.__getitem__, range(len(photos))):
        assert sample.regions is not None
        means[sample.image_id] = sample.regions.features[:4].astype(np.float64).mean(0)
    captions = {image: [text.split() for text in texts] for image, texts in photos.references().items()}
    scorer = CiderD(DocumentFrequencies.count(captions.values()), captions.__getitem__)
    candidates = [["a", "green", "circle", "."], ["a", "blue", "star"], ["a", "red", "square"]]
    for image in list(means)[:5]:
        look = means[image] / np.linalg.norm(means[image])
        cosine = {other: look @ mean / np.linalg.norm(mean) for other, mean in means.items() if other != image}
        near = index.nearest(image, look.astype(np.float32), 4)
        assert image not in near and len(near) == 4
        floor = sorted(cosine.values())[-4]
        assert all(cosine[other] > floor - 1e-3 for other in near), "float16 tells no closer"
        spoken = [[word for word in words if word != "."] for words in candidates]
        slow = np.mean([[scorer.score(other, [words])[0] for words in spoken] for other in near], axis=0)
        chosen = index.choose(image, look.astype(np.float32), candidates, 4)
        assert slow[chosen] == pytest.approx(slow.max())


def test_a_search_is_the_same_from_the_disk_and_a_damaged_one_is_refused(toy: Toy, tmp_path: Path) -> None:
    looking = captioner(toy, replace(LOOKING, beam_size=2, max_caption_len=9))
    said = predict(looking, toy, "val")
    looking.save_search(tmp_path / "search")
    looking.set_search(EvaluateParams())
    assert predict(looking, toy, "val") != said
    looking.load_search(tmp_path / "search")
    assert predict(looking, toy, "val") == said

    features = (tmp_path / "search" / FEATURES).read_bytes()
    (tmp_path / "search" / FEATURES).write_bytes(features[: len(features) // 2])
    with pytest.raises(CheckpointError, match="no memory of captions"):
        looking.load_search(tmp_path / "search")
    (tmp_path / "search" / FEATURES).write_bytes(features)
    (tmp_path / "search" / CAPTIONS).write_text('[["one", ["a dog"]]]')
    with pytest.raises(CheckpointError, match="not 1 photos of 6 numbers"):
        looking.load_search(tmp_path / "search")
    for told in (
        '{"beam_size": 0}',
        '{"beam_size": 1000, "max_caption_len": 100}',
        '{"consensus_temperature": 1e-300}',
        "[1]",
    ):
        (tmp_path / "search" / "search.json").write_text(told)
        with pytest.raises(CheckpointError, match=r"search\.json: does not say how captions"):
            looking.load_search(tmp_path / "search")


def test_a_version_looks_up_what_it_was_registered_with(toy: Toy, tmp_path: Path) -> None:
    """Evaluated again, it does not get what has come since; one that was registered without gets what is there."""
    looking = captioner(toy, LOOKING)
    assert looking.caption_search.index is not None
    own = looking.caption_search.index
    looking.caption_search.index = CaptionIndex(own.features_NF[:9], own.captions[:9], own.image_ids[:9], toy.tokenizer)
    looking.save_search(tmp_path / "with")
    looking.set_search(UNDECIDED)
    looking.save_search(tmp_path / "without")
    looking.set_search(LOOKING)
    for name, photos in (("with", 9), ("without", len(own.image_ids))):
        looking.prepare_search(toy.shards, {}, tmp_path / name)
        assert len(looking.caption_search.index.image_ids) == photos


def test_more_photos_than_can_be_looked_through_are_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pretraining that leads to the captioner, and by the captioner; not for others, or where none is asked."""
    params, workspace = write_workspace(tmp_path), Workspace(tmp_path)
    repeated = replace(params.finetune["captioning"], sources={"toy": 9})
    params = replace(params, finetune={**params.finetune, "captioning": repeated})
    looking = replace(params, evaluate=LOOKING)
    photos = len(ShardDataset(workspace.shards, "train", "images", captioned=True))
    monkeypatch.setattr(caption_memory, "MOST", photos)
    check_searches(looking, workspace.shards, "finetune/captioning")  # a photo counts once, however often it is seen
    monkeypatch.setattr(caption_memory, "MOST", photos - 1)
    check_searches(looking, workspace.shards, "finetune/vqa")
    check_searches(params, workspace.shards, "finetune/captioning")
    monkeypatch.setattr(training, "fit", lambda *_, **__: pytest.fail("training began"))
    shutil.copytree(workspace.checkpoint("initial/tden"), workspace.checkpoint("pretrain/tden"))
    for stage, key in ((pretrain, "tden"), (finetune, "captioning")):
        with pytest.raises(DataError, match=f"{photos} captioned .* looks through 1 to {photos - 1} of .*Set it to 0"):
            stage.run(looking, workspace, key)


def test_neighbours_need_candidates() -> None:
    with pytest.raises(ParamsError, match="set `consensus_samples`, too"):
        build(EvaluateParams, {"consensus_neighbors": 60}, where="evaluate")
