"""Retrieval by fused pairs: it learns, it ranks exactly, and unscored pairs follow a shortlist in embedding order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_dataset import Toy
from toy_pairs import Fusing, by_pairs
from toy_tasks import any_generator, learn, make

from vlp_models.data.batch import Image, Text
from vlp_models.data.sample import Sample
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.errors import ParamsError
from vlp_models.tasks.base import TaskModel
from vlp_models.tasks.retrieval import Retrieval, fill_unscored, shortlist_pairs

pytestmark = pytest.mark.usefixtures("few_items_suffice")


class Both(Fusing):
    def embed_image(self, image: Image) -> Tensor:
        return self.inner.embed_image(image)

    def embed_text(self, text: Text) -> Tensor:
        return self.inner.embed_text(text)


class Embedding(nn.Module):
    """The opposite: it embeds and cannot fuse."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.embed_image, self.embed_text, self.inputs = model.embed_image, model.embed_text, model.inputs


def samples_of(toy: Toy, split: str) -> list[Sample]:
    dataset = ShardDataset(toy.shards, split, "images")
    return [dataset[i] for i in range(len(dataset))]


def ranked(task_model: TaskModel, samples: list[Sample], size: int = 1000) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for start in range(0, len(samples), size):
        chunk = samples[start : start + size]
        rows += task_model.predict(task_model.collate(chunk), chunk)
    return task_model.postprocess(rows, samples)


def test_ranks_equal_those_of_pairs_scored_one_by_one(toy: Toy) -> None:
    task_model, samples = by_pairs(toy).eval(), samples_of(toy, "val")
    assert isinstance(task_model, Retrieval) and task_model.by_pairs and task_model.search == "every pair fused"
    rows = ranked(task_model, samples, size=3)
    with torch.no_grad():
        for sample, row in zip(samples, rows, strict=True):
            text = toy.tokenizer.encode_batch([sample["captions"][0]], 12)
            alone = []
            for other in samples:
                image = task_model.collate([other]).image
                alone.append(float(task_model.model.score(image, text, torch.zeros(1, dtype=torch.int64))))
            own = alone[samples.index(sample)]
            # Batching changes the last digits: ranks may differ only between scores that are this close.
            closer = {1 + sum(a > own + e for a in alone) for e in (1e-5,)} | {sum(a >= own - 1e-5 for a in alone)}
            assert min(closer) <= row["captions"][0]["rank"] <= max(closer)
    scored = task_model.score(rows, samples, _place(toy))
    assert all(score.note == "every pair fused" for score in scored.scores)


@pytest.mark.parametrize("shortlist", [0, 2])
def test_each_image_is_encoded_and_each_pair_fused_once(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, shortlist: int
) -> None:
    task_model, samples = by_pairs(toy, Both, scorer="pairs", shortlist=shortlist).eval(), samples_of(toy, "val")
    model, counts = task_model.model, {"encode_image": 0, "embed_image": 0, "score": 0}
    for name in counts:

        def counted(*arguments: Any, name: str = name, plain: Any = getattr(model, name)) -> Any:
            counts[name] += len(arguments[-1])
            return plain(*arguments)

        monkeypatch.setattr(model, name, counted)
    ranked(task_model, samples, size=2)
    captions = sum(len(sample["captions"]) for sample in samples)
    assert counts["encode_image"] == len(samples) and counts["embed_image"] == (len(samples) if shortlist else 0)
    if not shortlist:
        assert counts["score"] == captions * len(samples)
    else:  # two per caption and two per image; some coincide
        assert 2 * captions <= counts["score"] <= 2 * (captions + len(samples))


def test_large_gallery_is_also_ranked_in_folds(toy: Toy) -> None:
    samples = samples_of(toy, "val")
    samples = samples[: len(samples) // 2 * 2]
    task_model = by_pairs(toy, fold=len(samples) // 2).eval()
    rows = ranked(task_model, samples)
    halves = [ranked(task_model, half) for half in (samples[: len(samples) // 2], samples[len(samples) // 2 :])]
    assert [row["rank_in_fold"] for row in rows] == [row["rank"] for half in halves for row in half]
    scored = task_model.score(rows, samples, _place(toy))
    suffixes = f"(of {len(samples) // 2})", f"(of {len(samples) // 2}, image to text)"
    for suffix in suffixes:
        own = next(score for score in scored.scores if score.metric == f"R@1 {suffix}")
        assert own.value is not None and scored.baseline_values(own.metric)["chance"] >= 100 / len(samples)
    assert "rank_in_fold" not in ranked(by_pairs(toy), samples)[0]


def _place(toy: Toy) -> Any:
    from vlp_models.tasks.scoring import EvalContext

    return EvalContext(source="toy", validated=toy.shards)


@pytest.mark.slow
def test_learns_to_match(toy: Toy) -> None:
    task_model = by_pairs(toy, pair_negatives=5)
    before = np.mean([row["captions"][0]["rank"] for row in ranked(task_model, samples_of(toy, "train"))])
    dataset = ShardDataset(toy.shards, "train", "captions")
    loss = task_model.loss(task_model.collate([dataset[i] for i in range(8)]), generator=any_generator())
    assert set(loss.parts) == {"match", "match_accuracy"}
    learn(task_model, toy, 120, lr=2e-3)
    after = np.mean([row["captions"][0]["rank"] for row in ranked(task_model, samples_of(toy, "train"))])
    assert before > 20 and after < 6, "of 44 images"


def test_batch_of_one_image_has_zero_loss(toy: Toy) -> None:
    task_model = by_pairs(toy)
    sample = ShardDataset(toy.shards, "train", "captions")[0]
    loss = task_model.loss(task_model.collate([sample, sample]), generator=any_generator())
    assert set(loss.parts) == {"match"} and not float(loss.mean)


def test_rank_with_one_image_or_none_has_the_same_loss_parts(toy: Toy) -> None:
    task_model = by_pairs(toy)
    dataset = ShardDataset(toy.shards, "train", "captions")
    batch = task_model.collate([dataset[0], dataset[0]])
    for own in (batch, batch.empty()):
        loss = task_model._match(own, any_generator())
        assert list(loss.parts) == ["match", "match_accuracy"]
        assert float(loss.sum) == 0 and all(float(part.count) == 0 for part in loss.parts.values())
        loss.sum.backward()


def test_shortlist_of_all_images_is_exact_and_a_short_one_is_described(toy: Toy) -> None:
    samples = samples_of(toy, "val")
    exact = ranked(by_pairs(toy, Both, scorer="pairs").eval(), samples)
    whole = ranked(by_pairs(toy, Both, scorer="pairs", shortlist=100).eval(), samples)
    assert [row["rank"] for row in whole] == [row["rank"] for row in exact]
    short = by_pairs(toy, Both, scorer="pairs", shortlist=2).eval()
    assert "2 most similar" in short.search
    rows = ranked(short, samples)
    assert all(1 <= caption["rank"] <= len(samples) for row in rows for caption in row["captions"])


def test_unscored_pairs_follow_in_embedding_order() -> None:
    similarity_TI = np.array([[0.9, 0.1, 0.5, -0.2], [0.0, 0.3, 0.2, 0.1]], dtype=np.float32)
    wanted = shortlist_pairs(similarity_TI, 1)
    # each caption's best image, and each image's best caption
    assert wanted.tolist() == [[True, False, True, False], [False, True, False, True]]
    scores = np.where(wanted, np.float32(-5), np.float32(-np.inf))
    placed = fill_unscored(scores, similarity_TI)
    assert (placed[wanted] == -5).all() and (placed[~wanted] < -5).all()
    assert placed[1, 2] > placed[1, 0]
    scores[0, 0] = np.nan
    assert np.isnan(fill_unscored(scores, similarity_TI)[0, 0]), "rejected by `rank_similarities`"


def test_unsupported_options_are_errors(toy: Toy) -> None:
    with pytest.raises(ParamsError, match="shortlist"):
        by_pairs(toy, shortlist=3)
    with pytest.raises(ParamsError, match="cannot score pairs"):
        by_pairs(toy, Embedding, scorer="pairs")
    with pytest.raises(ParamsError, match="pair_negatives"):
        by_pairs(toy, pair_negatives=0)
    with pytest.raises(ParamsError, match="same_image_negatives"):
        by_pairs(toy, same_image_negatives=True)


def test_adjacent_captions_share_their_image(toy: Toy) -> None:
    """With one other image to draw, the draw is certain, so the loss equals that of one image per caption."""
    model = by_pairs(toy, pair_negatives=1)
    dataset = ShardDataset(toy.shards, "train", "captions", {"toy": 2})
    half = len(dataset) // 2
    samples = [replace(dataset[i], seed=1) for i in (0, half, 5, half + 5)]
    shared = model.collate(samples)
    assert len(shared.image) == 2 and shared.text.owner_N.tolist() == [0, 0, 1, 1]
    separate = model.collate([replace(sample, seed=number) for number, sample in enumerate(samples)])
    assert len(separate.image) == 4
    one, other = (model.loss(batch, generator=any_generator()) for batch in (shared, separate))
    torch.testing.assert_close(one.mean, other.mean)
    assert one.count == other.count == 4
    assert len(model.collate([replace(sample, seed=None) for sample in samples]).image) == 4, (
        "image i belongs to sample i"
    )
    by_embeddings = make(toy, "retrieval")
    assert len(by_embeddings.collate(samples).image) == 4, "embeddings are contrasted with all others of the batch"
