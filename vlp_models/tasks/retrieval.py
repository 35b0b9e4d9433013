"""Caption-based image retrieval: find the image a sentence describes, and the sentence of an image.

No head: a model that embeds images and texts apart is asked for the two embeddings (TDEN: the vectors of image-sentence
matching, section "Downstream Tasks", with which a million images can be searched by one matrix product). A model that
only fuses the two is asked for a score of each pair (pair_scores.py).

Shape suffixes: B samples, A those that have other images to choose from, K images a caption is compared with in a step,
T captions, I images (of a batch: its rows of them), D embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vlp_models.common.workspace import Workspace
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import ParamsError
from vlp_models.evaluation.report.galleries import Card, Gallery, Line, PictureSource
from vlp_models.metrics.retrieval import (
    IMAGE_TO_TEXT,
    TEXT_TO_IMAGE,
    Ranking,
    best_places,
    chance,
    direction_in_folds,
    rank,
    rank_in_folds,
    rank_similarities,
    score_ranks,
)
from vlp_models.metrics.score import Score
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.protocols import Contrasts, Embeds, ScoresPairs
from vlp_models.objectives.classification import classification
from vlp_models.objectives.contrastive import image_text_contrast
from vlp_models.objectives.loss import Loss, empty, trainable
from vlp_models.objectives.matching import match_in_batch
from vlp_models.objectives.ranks import number_over_ranks
from vlp_models.tasks.base import TaskModel, TaskOptions, can
from vlp_models.tasks.scoring import Place, Prediction, Scored

TOP = 5
IMAGE, TEXTS, ENCODED = "image_D", "texts_ND", "encoded"  # what a record holds until `finish` has ranked with it


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(TaskOptions):
    """
    scorer     embeddings, or pairs, each fused. auto: embeddings, if the model has them
    learn      of embeddings: by a margin, or by contrast. auto: by contrast, if the model has a temperature of its own
    temperature  with `learn: contrast`, of a model without one of its own: what similarities are divided by, as 0.05
    negatives  by a margin: `all` that violate it (TDEN's Multibatch), or a pair's `hardest` (its code)
    margin     likewise
    twins_are_negatives  of embeddings: samples of one image are negatives of each other (the public code of VLMo)
    drawn      of pairs: how many other images of the batch a caption's own must beat in a step
    fold       where the images are two or more times as many, and no rest is left: scores of so many at a time besides
    shortlist  of pairs: fuse only so many of a caption's, or of an image's, most similar ones by embedding; 0: all
    """

    scorer: Literal["auto", "embeddings", "pairs"] = "auto"
    learn: Literal["auto", "margin", "contrast"] = "auto"
    temperature: float | None = None
    negatives: Literal["all", "hardest"] = "all"
    margin: float = 0.2
    twins_are_negatives: bool = False
    drawn: int = 3
    fold: int = 1000  # COCO's 1k protocol
    shortlist: int = 0

    def __post_init__(self) -> None:
        if self.drawn < 1 or self.shortlist < 0 or self.fold < 0:
            raise ParamsError(
                "params.yaml: `options.drawn` must be at least 1, `options.shortlist` and `options.fold` at least 0"
            )
        if not 0 < self.margin <= 2:
            raise ParamsError(f"params.yaml: `options.margin: {self.margin}` must be above 0, and at most 2")
        if self.temperature is not None and not 0.001 <= self.temperature <= 10:
            raise ParamsError(f"params.yaml: `options.temperature: {self.temperature}` must be from 0.001 to 10")


class Retrieval(TaskModel):
    """Samples of one image are no negatives of each other, unless an option says so.

    Of embeddings: a triplet loss within the batch, or contrast over it, in both directions. Of pairs: cross-entropy of
    a caption's own image among some of the batch.
    """

    task = "retrieval"
    title = "Image retrieval by caption"
    view = "captions"
    prediction_view = "images"
    needs = (Embeds, ScoresPairs)
    options_class = RetrievalOptions
    id_key = "image_id"
    metric = "R@1"
    headlines = ("R@1", "R@5", "R@10", "median rank", "R@1 (image to text)")
    why_not_blanked = "all blank images rank alike; compare with chance instead"
    gallery = Gallery(
        title="Images found by caption",
        about="the first caption of images at even distances from the split; the image shown is the one it describes.",
    )

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        """
        Raises:
            ParamsError: the options ask for what the model has not.
        """
        super().__init__(model, tokenizer, info)
        options, embeds = cast(RetrievalOptions, self.options), can(model, Embeds)
        self.by_pairs = self.can_share_images(model, options)
        if self.by_pairs and not can(model, ScoresPairs):
            raise ParamsError(f"params.yaml: `options.scorer: pairs`: the model `{info.name}` can't score pairs")
        if not embeds and (options.shortlist or not self.by_pairs):
            raise ParamsError(
                f"params.yaml: the model `{info.name}` can't embed images and texts apart, so it has no shortlist; "
                "set `options.shortlist: 0` and `options.scorer: pairs`"
            )
        for name, given in (
            ("twins_are_negatives", options.twins_are_negatives),
            ("temperature", options.temperature is not None),
            ("learn: contrast", options.learn == "contrast"),
        ):
            if self.by_pairs and given:
                raise ParamsError(
                    f"params.yaml: `options.{name}` is for `options.scorer: embeddings`; here it is pairs"
                )
        self.by_embeddings = not self.by_pairs or options.shortlist > 0
        contrasts = can(model, Contrasts)
        self.by_contrast = options.learn == "contrast" or (options.learn == "auto" and contrasts)
        if options.learn == "contrast" and not contrasts and options.temperature is None:
            raise ParamsError(
                f"params.yaml: `options.learn: contrast`: the model `{info.name}` has no temperature of its own; give "
                "one, as `options.temperature: 0.05`"
            )
        if options.temperature is not None and (contrasts or not self.by_contrast):
            why = "which has one of its own" if contrasts else "which learns by a margin; set `options.learn: contrast`"
            raise ParamsError(f"params.yaml: `options.temperature` is not for the model `{info.name}`, {why}")

    @classmethod
    def can_share_images(cls, model: type[nn.Module] | nn.Module, options: Any) -> bool:
        """By pairs. By embeddings each image beside its twin would be a negative less."""
        return options.scorer == "pairs" or (options.scorer == "auto" and not can(model, Embeds))

    def read(self, samples: Sequence[Sample]) -> Batch:
        """Captions share an image in training alone, where each has a draw: elsewhere image i is sample i's."""
        trains = all(sample.draw is not None for sample in samples)
        return self.reader.collate(samples, share_images=self.by_pairs and trains)

    @classmethod
    def can_score(cls, sample: Sample) -> bool:
        return bool(sample["captions"])

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """Parts `ism`, `ism_accuracy` (`itc` by contrast, `match` of pairs). A batch of one image has no negative: its
        loss is zero."""
        name = "match" if self.by_pairs else "itc" if self.by_contrast else "ism"
        names = batch.image_ids
        if cast(RetrievalOptions, self.options).twins_are_negatives:
            # The same sample may be twice in a batch.
            names = tuple(f"{number} {sample}" for number, sample in enumerate(batch.sample_ids))
        # Besides, batch normalisation in the poolers could not take a batch of one.
        if len(number_over_ranks(names)[0].unique()) == 1:
            return empty(trainable(self), name)
        if self.by_pairs:
            return self._match(batch, generator)
        model, options = cast(Embeds, self.model), cast(RetrievalOptions, self.options)
        texts_BD, images_BD = model.embed_text(batch.text), model.embed_image(batch.image)
        if self.by_contrast:
            if options.temperature is None:
                scale = cast(Contrasts, model).contrast_scale()
            else:  # in float32, whatever the embeddings are in
                scale = torch.tensor(1 / options.temperature, device=texts_BD.device)
            return image_text_contrast(texts_BD, images_BD, names, scale)
        return match_in_batch(
            texts_BD,
            images_BD,
            names,
            margin=options.margin,
            negatives=options.negatives,
        )

    def _match(self, batch: Batch, generator: torch.Generator) -> Loss:
        """Each caption's own image among `drawn` others of this process's batch. Where that holds no other image, none
        is scored; other processes may hold some, and all name the same parts of the loss."""
        model, options = cast(ScoresPairs, self.model), cast(RetrievalOptions, self.options)
        ids = {image_id: number for number, image_id in enumerate(dict.fromkeys(batch.image_ids))}
        number_I = torch.tensor([ids[image_id] for image_id in batch.image_ids], dtype=torch.int64)
        owner_N = batch.text.owners(len(batch.image))
        own_B = torch.arange(len(batch)) if owner_N is None else owner_N.cpu()
        other_BI = (number_I[own_B][:, None] != number_I).float()
        asked_A = torch.arange(len(own_B) if len(ids) > 1 else 0)
        own_A = own_B[: len(asked_A)]
        count = min(options.drawn, int(other_BI.sum(1).min())) if len(asked_A) else 0
        drawn_AK = torch.multinomial(other_BI, count, generator=generator) if count else asked_A.new_zeros(0, 0)
        image_of_text_N = torch.cat([own_A[:, None], drawn_AK], 1).flatten()
        device = batch.text.ids_BT.device
        text = batch.text.select(asked_A.to(device).repeat_interleave(count + 1))
        text = dataclasses.replace(text, owner_N=None)  # `image_of_text_N` says whose
        scores_N = model.score(model.encode_image(batch.image), text, image_of_text_N.to(device))
        first_A = torch.zeros(len(asked_A), dtype=torch.int64, device=device)
        return classification(scores_N.view(len(asked_A), count + 1), first_A, name="match")

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Each image's and each caption's embedding or encoding, once; `finish` makes predictions of them."""
        self.eval()
        rows: list[dict[str, Any]] = [{"image_id": sample.image_id} for sample in samples]
        if self.by_pairs:
            state = cast(ScoresPairs, self.model).encode_image(batch.image)
            rows = [{**row, ENCODED: Encoded(state=state, row=i)} for i, row in enumerate(rows)]
        if not self.by_embeddings:
            return rows
        model = cast(Embeds, self.model)
        images_BD = model.embed_image(batch.image).float().cpu().numpy()
        captions = [caption for sample in samples for caption in sample["captions"]]
        texts_ND = np.zeros((0, images_BD.shape[1]), dtype=np.float32)
        if captions:
            text = self.tokenizer.encode_batch(captions, self.info.max_text_len).to(batch.text.ids_BT.device)
            texts_ND = model.embed_text(text).float().cpu().numpy()
        ends = np.cumsum([len(sample["captions"]) for sample in samples])[:-1]
        return [
            {**row, IMAGE: image_D, TEXTS: own_ND}
            for row, image_D, own_ND in zip(rows, images_BD, np.split(texts_ND, ends), strict=True)
        ]

    def finish(self, predictions: list[dict[str, Any]], samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Ranks each dataset's images and captions among themselves: `rank` of the image's best caption, `top` captions
        for it, and under `captions` each caption's `rank` of its image and `top` images. `rank_in_fold` beside `rank`,
        where there are folds."""
        finished: list[dict[str, Any]] = [{} for _ in predictions]
        for source in dict.fromkeys(sample.source for sample in samples):
            chosen = [i for i, sample in enumerate(samples) if sample.source == source]
            of_source = [samples[i] for i in chosen]
            found = self._ranking([predictions[i] for i in chosen], of_source)
            owners = [sample.image_id for sample in of_source for _ in sample["captions"]]
            in_folds = rank_in_folds(found, owners, cast(RetrievalOptions, self.options).fold)
            for i, row in zip(chosen, _records(found, in_folds, of_source), strict=True):
                finished[i] = row
        return finished

    def _ranking(self, rows: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> Ranking:
        image_ids = [sample.image_id for sample in samples]
        owners = [sample.image_id for sample in samples for _ in sample["captions"]]
        if self.by_embeddings:
            images_ID, texts_TD = np.stack([row[IMAGE] for row in rows]), np.concatenate([row[TEXTS] for row in rows])
            embedded = rank(image_ids, images_ID, owners, texts_TD)
            if not self.by_pairs:
                return embedded
        wanted_TI = shortlisted(embedded.similarity_TI, self.options.shortlist) if self.by_embeddings else None
        first = {image_id: row[ENCODED] for image_id, row in reversed(list(zip(image_ids, rows, strict=True)))}
        gallery = list(dict.fromkeys(image_ids))
        scores_TI = score_all(
            cast(ScoresPairs, self.model),
            self.tokenizer,
            [first[image_id] for image_id in gallery],
            [caption for sample in samples for caption in sample["captions"]],
            max_text_len=self.info.max_text_len,
            wanted_TI=wanted_TI,
        )
        return rank_similarities(
            gallery, behind(scores_TI, embedded.similarity_TI) if self.by_embeddings else scores_TI, owners
        )

    @property
    def search(self) -> str:
        if not self.by_pairs:
            return ""
        return (
            f"pairs fused, of the {self.options.shortlist} most similar by embedding"
            if self.by_embeddings
            else "every pair fused"
        )

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], place: Place) -> Scored:
        """Text to image, as the paper has it, and image to text. Baseline: chance, with this many images and
        captions."""
        place.progress("recall and median rank")
        scores, guessed = _both_ways(predictions, "rank", len(predictions), (TEXT_TO_IMAGE, IMAGE_TO_TEXT))
        if predictions and "rank_in_fold" in predictions[0]:
            fold = cast(RetrievalOptions, self.options).fold
            ends = tuple(direction_in_folds(direction, fold) for direction in (TEXT_TO_IMAGE, IMAGE_TO_TEXT))
            of_folds, by_chance = _both_ways(predictions, "rank_in_fold", fold, ends)
            scores, guessed = scores + of_folds, guessed | by_chance
        scores = [dataclasses.replace(score, note=self.search) for score in scores]
        baselines = {metric: {"chance": round(value, 4)} for metric, value in guessed.items()}
        return Scored(scores=scores, baselines=baselines)

    @classmethod
    def cards(cls, workspace: Workspace, pictures: PictureSource, predictions: Sequence[Prediction]) -> list[Card]:
        """The first caption of an image, where its image was placed, and the image that came first."""
        cards = []
        for row in predictions:
            if not row["captions"]:
                continue
            asked = row["captions"][0]
            missed = asked["rank"] > 1
            cards.append(
                Card(
                    picture=pictures.get(row["image_id"]),
                    lines=[
                        Line(text=asked["caption"], strong=True),
                        Line(text=f"place {asked['rank']:,}", right=not missed),
                    ],
                    summary="found first" if missed else "",
                    other=pictures.get(asked["top"][0][0]) if missed else None,
                )
            )
        return cards


def _both_ways(
    predictions: Sequence[Prediction], key: str, images: int, ends: tuple[str, ...]
) -> tuple[list[Score], dict[str, float]]:
    """The scores of both directions by the ranks under `key`, and what guessing gives. images: that a caption is
    searched among; of captions there are as many more as in the mean."""
    owners = [p["image_id"] for p in predictions for _ in p["captions"]]
    texts = [f"{p['image_id']}#{number}" for p in predictions for number in range(len(p["captions"]))]
    text_ranks = np.array([caption[key] for p in predictions for caption in p["captions"]], dtype=np.int64)
    image_ranks = np.array([p[key] for p in predictions], dtype=np.int64)
    captions = round(len(owners) * images / len(predictions))
    to_image, to_text = ends
    scores = score_ranks(text_ranks, owners, images, to_image, items=texts)
    scores += score_ranks(image_ranks, [p["image_id"] for p in predictions], captions, to_text)
    own_counts = [len(p["captions"]) for p in predictions]
    return scores, chance([1], images, to_image) | chance(own_counts, captions, to_text)


def _records(found: Ranking, in_folds: Ranking | None, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    captions = [(sample.image_id, caption) for sample in samples for caption in sample["captions"]]
    similarity_TI = found.similarity_TI
    images_TK, texts_IK = best_places(similarity_TI, TOP), best_places(similarity_TI.T, TOP)
    column_of = {image_id: column for column, image_id in enumerate(found.image_ids)}
    records, start = [], 0
    for sample in samples:
        column = column_of[sample.image_id]
        own = [
            {
                "caption": caption,
                "rank": int(found.text_ranks_T[t]),
                **({} if in_folds is None else {"rank_in_fold": int(in_folds.text_ranks_T[t])}),
                "top": [[found.image_ids[i], round(float(similarity_TI[t, i]), 6)] for i in images_TK[t]],
            }
            for t, caption in enumerate(sample["captions"], start=start)
        ]
        start += len(own)
        records.append(
            {
                "image_id": sample.image_id,
                "rank": int(found.image_ranks_I[column]),
                **({} if in_folds is None else {"rank_in_fold": int(in_folds.image_ranks_I[column])}),
                "top": [[*captions[t], round(float(similarity_TI[t, column]), 6)] for t in texts_IK[column]],
                "captions": own,
            }
        )
    return records


PAIRS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Where an image's encoding is: row `row` of what `encode_image` made of its batch."""

    state: Any
    row: int


@torch.no_grad()
def score_all(
    model: ScoresPairs,
    tokenizer: Tokenizer,
    images: Sequence[Encoded],
    captions: Sequence[str],
    *,
    max_text_len: int,
    wanted_TI: NDArray[np.bool_] | None = None,
) -> NDArray[np.float32]:
    """[T, I]; of pairs that are not wanted, minus infinity."""
    scores_TI = np.full((len(captions), len(images)), -np.inf, dtype=np.float32)
    device = next(model.parameters()).device if isinstance(model, torch.nn.Module) else torch.device("cpu")
    columns: dict[int, list[int]] = {}
    for column, image in enumerate(images):
        columns.setdefault(id(image.state), []).append(column)
    for own in columns.values():
        state = images[own[0]].state
        if wanted_TI is None:
            pairs = [(t, i) for t in range(len(captions)) for i in own]
        else:
            pairs = [(int(t), own[int(c)]) for t, c in np.argwhere(wanted_TI[:, own])]
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            block = pairs[start : start + PAIRS_AT_ONCE]
            text = tokenizer.encode_batch([captions[t] for t, _ in block], max_text_len).to(device)
            image_of_text_N = torch.tensor([images[i].row for _, i in block], device=device)
            found_N = model.score(state, text, image_of_text_N).float().cpu().numpy()
            scores_TI[[t for t, _ in block], [i for _, i in block]] = found_N
    return scores_TI


def shortlisted(similarity_TI: NDArray[np.float32], count: int) -> NDArray[np.bool_]:
    """The pairs worth a closer look: each caption's `count` most similar images, and each image's captions."""
    wanted_TI = np.zeros(similarity_TI.shape, dtype=bool)
    np.put_along_axis(wanted_TI, best_places(similarity_TI, count), True, axis=1)
    np.put_along_axis(wanted_TI.T, best_places(similarity_TI.T, count), True, axis=1)
    return wanted_TI


def behind(scores_TI: NDArray[np.float32], similarity_TI: NDArray[np.float32]) -> NDArray[np.float32]:
    """Pairs that were not scored come behind all that were, in the order of their similarity (of unit vectors). A score
    that is no number stays one, for `rank_similarities` to refuse."""
    scored_TI = ~np.isneginf(scores_TI)
    lowest = scores_TI[scored_TI].min() if scored_TI.any() else np.float32(0)
    return np.where(scored_TI, scores_TI, lowest - 2 + similarity_TI).astype(np.float32)
