"""Image-text retrieval: find the image that a sentence describes, and the sentence of an image.

No head. A model that embeds images and texts separately is scored by its embeddings (TDEN: the vectors of
image-sentence matching, section "Downstream Tasks", with which a million images are searched by one matrix product). A
model that only fuses the two scores every image-text pair: exact, but one forward pass per pair, so 1,000 images with
five captions each take five million passes. `options.shortlist` scores only the pairs ranked first by the embeddings;
all others follow in the order of their embeddings.

Shape suffixes: B samples, A those with other images to choose from, K images a caption is compared with in a step,
T captions, I images (in a batch: its rows of them), N image-text pairs, D embedding.
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

from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import ParamsError
from vlp_models.metrics.retrieval import (
    IMAGE_TO_TEXT,
    MAX_CHANCE,
    TEXT_TO_IMAGE,
    Ranking,
    chance,
    fold_direction,
    rank,
    rank_in_folds,
    rank_similarities,
    score_ranks,
    top_columns,
)
from vlp_models.metrics.score import Score, not_computed
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.models.protocols import Contrasts, ContrastsBySigmoid, Embeds, ScoresPairs
from vlp_models.objectives.contrastive import image_text_contrast, image_text_sigmoid
from vlp_models.objectives.distributed import number_over_ranks
from vlp_models.objectives.loss import Loss, cross_entropy, first_trainable, zero_loss
from vlp_models.objectives.matching import match_in_batch
from vlp_models.tasks.base import TaskModel, TaskOptions, implements
from vlp_models.tasks.scoring import CHANCE, EvalContext, Prediction, TaskScores

TOP = 5
PAIRS_AT_ONCE = 512
IMAGE, TEXTS, ENCODED = "image_D", "texts_ND", "encoded"  # intermediate fields of a record, until `postprocess`


@dataclass(frozen=True, kw_only=True)
class RetrievalOptions(TaskOptions):
    """
    scorer     embeddings, or pairs (each fused). auto: embeddings, if the model has them
    loss       loss on embeddings: margin, contrastive (a softmax), or sigmoid, for a model with its own bias. auto: the
               model's own, else contrastive, if it has its own temperature, else margin
    temperature  with `loss: contrastive`, for a model without its own: the divisor of similarities, such as 0.05
    negatives  with a margin: `all` that violate it (TDEN's Multibatch), or each pair's `hardest` (its code)
    margin     with a margin: its size
    same_image_negatives  of embeddings: samples of one image are negatives of each other (VLMo's public code)
    pair_negatives  of pairs: number of other images of the batch that a caption's own image must beat in a step
    fold       also score folds of this many images, if the images divide into two or more full folds
    shortlist  of pairs: fuse only this many of a caption's (and an image's) most similar ones by embedding; 0: all
    """

    scorer: Literal["auto", "embeddings", "pairs"] = "auto"
    loss: Literal["auto", "margin", "contrastive", "sigmoid"] = "auto"
    temperature: float | None = None
    negatives: Literal["all", "hardest"] = "all"
    margin: float = 0.2
    same_image_negatives: bool = False
    pair_negatives: int = 3
    fold: int = 1000  # COCO's 1k protocol
    shortlist: int = 0

    def __post_init__(self) -> None:
        if self.pair_negatives < 1 or self.shortlist < 0 or self.fold < 0:
            raise ValueError("`pair_negatives` must be at least 1, `shortlist` and `fold` at least 0")
        if not 0 < self.margin <= 2:
            raise ValueError(f"`margin: {self.margin}` must be above 0, and at most 2")
        if self.temperature is not None and not 0.001 <= self.temperature <= 10:
            raise ValueError(f"`temperature: {self.temperature}` must be from 0.001 to 10")


class Retrieval(TaskModel):
    """Embeddings: a triplet loss within the batch, or a contrastive loss, in both directions. Pairs: cross-entropy of a
    caption's own image among some of the batch.

    Samples of one image are not negatives of each other, unless an option makes them so.
    """

    task = "retrieval"
    title = "Image retrieval by caption"
    view = "captions"
    prediction_view = "images"
    needs = (Embeds, ScoresPairs)
    options_class = RetrievalOptions
    id_key = "image_id"
    example = 'search("a dog in the snow", ["a.jpg", "b.jpg"])'
    metric = "R@1"
    headlines = ("R@1", "R@5", "R@10", "median rank", "R@1 (image to text)")
    baselines_to_beat = (CHANCE,)
    why_no_blind = "all blank images rank alike; compare with chance instead"

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        """
        Raises:
            ParamsError: an option needs an ability that the model does not have.
        """
        super().__init__(model, tokenizer, info)
        options, embeds = cast(RetrievalOptions, self.options), implements(model, Embeds)
        # How this model is ranked, and what it is trained on: pairs, or embeddings with one of two losses.
        self.by_pairs = self.can_share_images(model, options)
        self.by_embeddings = not self.by_pairs or options.shortlist > 0
        contrasts = implements(model, Contrasts)
        own_sigmoid = options.loss == "auto" and getattr(model, "prefers_sigmoid", False)
        self.by_sigmoid = options.loss == "sigmoid" or own_sigmoid
        self.by_contrast = options.loss == "contrastive" or (options.loss == "auto" and contrasts)
        if self.by_pairs and not implements(model, ScoresPairs):
            raise ParamsError(f"params.yaml: `options.scorer: pairs`: the model `{info.name}` cannot score pairs")
        if not embeds and (options.shortlist or not self.by_pairs):
            raise ParamsError(
                f"params.yaml: the model `{info.name}` cannot embed images and texts separately, so it has no "
                "shortlist; set `options.shortlist: 0` and `options.scorer: pairs`"
            )
        for name, is_set in (
            ("same_image_negatives", options.same_image_negatives),
            ("temperature", options.temperature is not None),
            (f"loss: {options.loss}", options.loss in ("contrastive", "sigmoid")),
        ):
            if self.by_pairs and is_set:
                raise ParamsError(f"params.yaml: `options.{name}` needs `options.scorer: embeddings`; it is pairs")
        if options.loss == "contrastive" and not contrasts and options.temperature is None:
            raise ParamsError(
                f"params.yaml: `options.loss: contrastive`: the model `{info.name}` has no temperature of its own; set "
                "one, such as `options.temperature: 0.05`"
            )
        if options.loss == "sigmoid" and not implements(model, ContrastsBySigmoid):
            raise ParamsError(
                f"params.yaml: `options.loss: sigmoid`: the model `{info.name}` has no bias of its own; set contrastive"
            )
        if options.temperature is not None and (contrasts or not self.by_contrast):
            why = "which has its own" if contrasts else "which trains with a margin; set `options.loss: contrastive`"
            raise ParamsError(f"params.yaml: `options.temperature` does not apply to the model `{info.name}`, {why}")

    @classmethod
    def can_share_images(cls, model: type[nn.Module] | nn.Module, options: Any) -> bool:
        """Return whether pairs are scored. With embeddings, each image next to its twin would be one negative less."""
        return options.scorer == "pairs" or (options.scorer == "auto" and not implements(model, Embeds))

    def read(self, samples: Sequence[Sample]) -> Batch:
        """Collate the samples. Captions share an image in training only, where each has a seed; otherwise image i
        belongs to sample i."""
        trains = all(sample.seed is not None for sample in samples)
        return self.reader.collate(samples, share_images=self.by_pairs and trains)

    @classmethod
    def can_score(cls, sample: Sample) -> bool:
        return bool(sample["captions"])

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """Return the loss, with parts `ism` and `ism_accuracy` (`itc` for contrast, `match` for pairs).

        Zero for a batch of one image, which has no negative; batch normalization in the poolers could not take a batch
        of one either.
        """
        name = "match" if self.by_pairs else "itc" if self.by_contrast or self.by_sigmoid else "ism"
        image_ids = batch.image_ids
        if cast(RetrievalOptions, self.options).same_image_negatives:
            # The number keeps ids distinct if the same sample is twice in a batch.
            image_ids = tuple(f"{number} {sample}" for number, sample in enumerate(batch.sample_ids))
        # Counted over all processes, so that all of them return the zero loss together.
        if len(number_over_ranks(image_ids)[0].unique()) == 1:
            return zero_loss(first_trainable(self), name)
        if self.by_pairs:
            return self._match(batch, generator)
        model, options = cast(Embeds, self.model), cast(RetrievalOptions, self.options)
        # Row i of each belongs together; the batch's other rows, of all processes, are the negatives.
        texts_BD, images_BD = model.embed_text(batch.text), model.embed_image(batch.image)
        if self.by_sigmoid:
            sigmoid_model = cast(ContrastsBySigmoid, model)
            scale = sigmoid_model.contrast_scale()
            return image_text_sigmoid(texts_BD, images_BD, image_ids, scale, sigmoid_model.contrast_bias())
        if self.by_contrast:
            if options.temperature is None:
                scale = cast(Contrasts, model).contrast_scale()
            else:  # float32, whatever the embeddings' type
                scale = torch.tensor(1 / options.temperature, device=texts_BD.device)
            return image_text_contrast(texts_BD, images_BD, image_ids, scale)
        return match_in_batch(
            texts_BD,
            images_BD,
            image_ids,
            margin=options.margin,
            negatives=options.negatives,
        )

    def _match(self, batch: Batch, generator: torch.Generator) -> Loss:
        """Classify each caption's own image among `pair_negatives` others of this process's batch.

        No caption is scored if the batch has no other image; other ranks may have some, and all ranks return the same
        parts of the loss.
        """
        model, options = cast(ScoresPairs, self.model), cast(RetrievalOptions, self.options)
        # Images are equal if their ids are, so ids are compared by their number.
        ids = {image_id: number for number, image_id in enumerate(dict.fromkeys(batch.image_ids))}
        number_I = torch.tensor([ids[image_id] for image_id in batch.image_ids], dtype=torch.int64)
        # None: caption i belongs to image i.
        owner_N = batch.text.owners(len(batch.image))
        own_B = torch.arange(len(batch)) if owner_N is None else owner_N.cpu()
        # (B, I): 1 where the image is not the caption's own
        other_BI = (number_I[own_B][:, None] != number_I).float()
        # With two images or more, every caption has another image to choose from (A = B), else none has (A = 0).
        caption_A = torch.arange(len(own_B) if len(ids) > 1 else 0)
        own_A = own_B[: len(caption_A)]
        # As many as every caption can have without drawing an image twice.
        count = min(options.pair_negatives, int(other_BI.sum(1).min())) if len(caption_A) else 0
        # (A, K): other images, drawn without replacement and with equal probability.
        drawn_AK = torch.multinomial(other_BI, count, generator=generator) if count else caption_A.new_zeros(0, 0)
        # (A, 1 + K): the caption's own image first, so that the target is always 0
        image_of_text_N = torch.cat([own_A[:, None], drawn_AK], 1).flatten()
        device = batch.text.ids_BT.device
        # (A,) -> (A (1 + K),): a caption is repeated for each image that it is scored with.
        text = batch.text.select(caption_A.to(device).repeat_interleave(count + 1))
        text = dataclasses.replace(text, owner_N=None)  # `image_of_text_N` replaces it
        scores_N = model.score(model.encode_image(batch.image), text, image_of_text_N.to(device))
        target_A = torch.zeros(len(caption_A), dtype=torch.int64, device=device)
        return cross_entropy(scores_N.view(len(caption_A), count + 1), target_A, name="match")

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Return each image's and each caption's embedding or encoding; `postprocess` turns them into rankings."""
        self.eval()
        rows: list[dict[str, Any]] = [{"image_id": sample.image_id} for sample in samples]
        if self.by_pairs:
            state = cast(ScoresPairs, self.model).encode_image(batch.image)
            for i, row in enumerate(rows):
                # The encoding of the whole batch, shared: an image is one of its rows.
                row[ENCODED] = EncodedImage(state=state, row=i)
        if not self.by_embeddings:
            return rows
        model = cast(Embeds, self.model)
        images_BD = model.embed_image(batch.image).float().cpu().numpy()
        # The captions of all images are embedded together, then split again by image: (N, D) -> B times (captions, D)
        captions = [caption for sample in samples for caption in sample["captions"]]
        texts_ND = np.zeros((0, images_BD.shape[1]), dtype=np.float32)
        if captions:
            text = self.tokenizer.encode_batch(captions, self.info.max_text_len).to(batch.text.ids_BT.device)
            texts_ND = model.embed_text(text).float().cpu().numpy()
        # Where the captions of each image but the last end.
        ends = np.cumsum([len(sample["captions"]) for sample in samples])[:-1]
        for row, image_D, captions_ND in zip(rows, images_BD, np.split(texts_ND, ends), strict=True):
            row.update({IMAGE: image_D, TEXTS: captions_ND})
        return rows

    def postprocess(self, predictions: list[dict[str, Any]], samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Rank each dataset's images and captions.

        An image's record has the `rank` of its best caption, its `top` captions and, under `captions`, each caption's
        `rank` of the image, its own `rank_as_answer` for the image, and `top` images; with folds, also `rank_in_fold`.
        """
        # A caption is searched for among the images of its own dataset.
        finished: list[dict[str, Any]] = [{} for _ in predictions]
        for source in dict.fromkeys(sample.source for sample in samples):
            numbers = [i for i, sample in enumerate(samples) if sample.source == source]
            source_samples = [samples[i] for i in numbers]
            ranking = self._rank([predictions[i] for i in numbers], source_samples)
            owners = [sample.image_id for sample in source_samples for _ in sample["captions"]]
            in_folds = rank_in_folds(ranking, owners, cast(RetrievalOptions, self.options).fold)
            for i, row in zip(numbers, _records(ranking, in_folds, source_samples), strict=True):
                finished[i] = row
        return finished

    def _rank(self, rows: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> Ranking:
        image_ids = [sample.image_id for sample in samples]
        owners = [sample.image_id for sample in samples for _ in sample["captions"]]
        if self.by_embeddings:
            # (I, D) and (T, D): the batches of the dataset together.
            images_ID, texts_TD = np.stack([row[IMAGE] for row in rows]), np.concatenate([row[TEXTS] for row in rows])
            embedded = rank(image_ids, images_ID, owners, texts_TD)
            if not self.by_pairs:
                return embedded
        selected_TI = shortlist_pairs(embedded.similarity_TI, self.options.shortlist) if self.by_embeddings else None
        # Each image once, by its first row.
        encoded: dict[str, EncodedImage] = {}
        for image_id, row in zip(image_ids, rows, strict=True):
            encoded.setdefault(image_id, row[ENCODED])
        gallery = list(encoded)
        scores_TI = score_pairs(
            cast(ScoresPairs, self.model),
            self.tokenizer,
            list(encoded.values()),
            [caption for sample in samples for caption in sample["captions"]],
            max_text_len=self.info.max_text_len,
            selected_TI=selected_TI,
        )
        # Pairs outside the shortlist rank after it, by their embeddings.
        if self.by_embeddings:
            scores_TI = fill_unscored(scores_TI, embedded.similarity_TI)
        return rank_similarities(gallery, scores_TI, owners)

    @property
    def search(self) -> str:
        if not self.by_pairs:
            return ""
        if not self.by_embeddings:
            return "every pair fused"
        return f"the {self.options.shortlist} most similar pairs by embedding, fused"

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], context: EvalContext) -> TaskScores:
        """Return text-to-image scores, as in the papers, and image-to-text ones; baseline: chance.

        If captions name their languages, also `METRIC (LANGUAGE)` and `METRIC (LANGUAGE, image to text)`: the captions
        in it search all images, and the images with captions in it are to find one of these among the captions of all
        languages.
        """
        from vlp_models.data.tables import read_languages

        context.progress("recall and median rank")
        captions = sum(len(p["captions"]) for p in predictions)
        scores, by_chance = _score_both_directions(
            predictions,
            "rank",
            Gallery(images=len(predictions), captions=captions),
            (TEXT_TO_IMAGE, IMAGE_TO_TEXT),
        )
        if predictions and "rank_in_fold" in predictions[0]:
            fold = cast(RetrievalOptions, self.options).fold
            directions = (fold_direction(TEXT_TO_IMAGE, fold), fold_direction(IMAGE_TO_TEXT, fold))
            # the number of captions follows from the mean per image
            fold_gallery = Gallery(images=fold, captions=round(captions * fold / len(predictions)))
            fold_scores, fold_chance = _score_both_directions(predictions, "rank_in_fold", fold_gallery, directions)
            scores, by_chance = scores + fold_scores, by_chance | fold_chance
        for language, texts in read_languages(context.validated, {p["image_id"] for p in predictions}).items():
            language_scores, language_chance = _score_language(predictions, language, texts)
            scores, by_chance = scores + language_scores, by_chance | language_chance
        # Scores of different searches are not comparable, so each names its search.
        scores = [
            dataclasses.replace(score, note=self.search) if score.value is not None else score for score in scores
        ]
        return TaskScores(scores=scores, baselines={metric: {CHANCE: value} for metric, value in by_chance.items()})


def _score_language(
    predictions: Sequence[Prediction], language: str, captions: Mapping[str, Sequence[str]]
) -> tuple[list[Score], dict[str, float]]:
    """Return the scores of one language's captions in both directions, and what chance gives.

    The galleries are those of all languages. An image's captions in other languages are right answers too, so they are
    not counted before the one in this language.

    Args:
        captions: image id -> its captions in the language.
    """
    # Each image as if it had the captions of this language alone, ranked by the best of these.
    rows = []
    for p in predictions:
        language_captions = [row for row in p["captions"] if row["caption"] in captions.get(p["image_id"], ())]
        if language_captions:
            rows.append(
                {**p, "captions": language_captions, "rank": min(row["rank_as_answer"] for row in language_captions)}
            )
    if not rows:
        return [], {}
    # An image is compared with all captions except, on average, `excluded` of its own in other languages.
    captions_of = {p["image_id"]: len(p["captions"]) for p in predictions}
    excluded = round(sum(captions_of[p["image_id"]] - len(p["captions"]) for p in rows) / len(rows))
    gallery = Gallery(images=len(predictions), captions=sum(captions_of.values()) - excluded)
    directions = (f" ({language})", f" ({language}, {IMAGE_TO_TEXT.strip(' ()')})")
    scores, by_chance = _score_both_directions(rows, "rank", gallery, directions)
    return [dataclasses.replace(score, kept=False) for score in scores], by_chance


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """How many images a caption is searched among, and how many captions an image is."""

    images: int
    captions: int


def _score_both_directions(
    predictions: Sequence[Prediction], key: str, gallery: Gallery, directions: tuple[str, str]
) -> tuple[list[Score], dict[str, float]]:
    """Return the scores of both directions from the ranks under `key`, and what chance gives."""
    owners = [p["image_id"] for p in predictions for _ in p["captions"]]
    # The id of a caption, `<image>#<number>`, as `item_scores` reads it.
    texts = [f"{p['image_id']}#{number}" for p in predictions for number in range(len(p["captions"]))]
    text_ranks = np.array([caption[key] for p in predictions for caption in p["captions"]], dtype=np.int64)
    image_ranks = np.array([p[key] for p in predictions], dtype=np.int64)
    images, captions = gallery.images, gallery.captions
    to_image, to_text = directions
    scores = score_ranks(text_ranks, owners, images, to_image, items=texts)
    scores += score_ranks(image_ranks, [p["image_id"] for p in predictions], captions, to_text)
    captions_per_image = [len(p["captions"]) for p in predictions]
    # A caption has one right image, an image has all of its captions.
    by_chance = chance([1], images, to_image) | chance(captions_per_image, captions, to_text)
    # An R@k that chance reaches for more than half of the queries has no meaning.
    for i, score in enumerate(scores):
        level = by_chance[score.metric]
        if score.metric.startswith("R@") and level > MAX_CHANCE:
            scores[i] = not_computed(score.metric, score.n, f"chance has {level:.1f} among {images} images")
    return scores, by_chance


def _records(ranking: Ranking, in_folds: Ranking | None, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the records of `Retrieval.postprocess`; the rows of `ranking` are the samples' captions in order."""
    captions = [(sample.image_id, caption) for sample in samples for caption in sample["captions"]]
    similarity_TI = ranking.similarity_TI
    # (T, 5), (I, 5): the best images of each caption and the best captions of each image.
    images_TK, texts_IK = top_columns(similarity_TI, TOP), top_columns(similarity_TI.T, TOP)
    column_of = {image_id: column for column, image_id in enumerate(ranking.image_ids)}
    records, start = [], 0
    for sample in samples:
        column = column_of[sample.image_id]
        caption_rows = []
        # The sample's captions are the next rows of the similarities.
        for t, caption in enumerate(sample["captions"], start=start):
            caption_row = {
                "caption": caption,
                "rank": int(ranking.text_ranks_T[t]),
                "rank_as_answer": int(ranking.caption_ranks_T[t]),
                "top": [[ranking.image_ids[i], round(float(similarity_TI[t, i]), 6)] for i in images_TK[t]],
            }
            if in_folds is not None:
                caption_row["rank_in_fold"] = int(in_folds.text_ranks_T[t])
            caption_rows.append(caption_row)
        start += len(caption_rows)
        record = {
            "image_id": sample.image_id,
            "rank": int(ranking.image_ranks_I[column]),
            "top": [[*captions[t], round(float(similarity_TI[t, column]), 6)] for t in texts_IK[column]],
            "captions": caption_rows,
        }
        if in_folds is not None:
            record["rank_in_fold"] = int(in_folds.image_ranks_I[column])
        records.append(record)
    return records


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedImage:
    """One image's encoding: row `row` of the result of `encode_image` for its batch."""

    state: Any
    row: int


@torch.no_grad()
def score_pairs(
    model: ScoresPairs,
    tokenizer: Tokenizer,
    images: Sequence[EncodedImage],
    captions: Sequence[str],
    *,
    max_text_len: int,
    selected_TI: NDArray[np.bool_] | None = None,
) -> NDArray[np.float32]:
    """Score every caption with every image; minus infinity for pairs not in `selected_TI`. [T, I]"""
    scores_TI = np.full((len(captions), len(images)), -np.inf, dtype=np.float32)
    device = next(model.parameters()).device if isinstance(model, torch.nn.Module) else torch.device("cpu")
    # Pairs are scored state by state: the images of one batch share an encoding.
    columns: dict[int, list[int]] = {}
    for column, image in enumerate(images):
        columns.setdefault(id(image.state), []).append(column)
    for batch_columns in columns.values():
        state = images[batch_columns[0]].state
        # All captions with each image of the batch, or the selected pairs alone.
        if selected_TI is None:
            pairs = [(t, i) for t in range(len(captions)) for i in batch_columns]
        else:
            pairs = [(int(t), batch_columns[int(c)]) for t, c in np.argwhere(selected_TI[:, batch_columns])]
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            rows, block_columns = zip(*pairs[start : start + PAIRS_AT_ONCE], strict=True)
            text = tokenizer.encode_batch([captions[t] for t in rows], max_text_len).to(device)
            image_of_text_N = torch.tensor([images[i].row for i in block_columns], device=device)
            scores_N = model.score(state, text, image_of_text_N).float().cpu().numpy()
            scores_TI[list(rows), list(block_columns)] = scores_N
    return scores_TI


def shortlist_pairs(similarity_TI: NDArray[np.float32], count: int) -> NDArray[np.bool_]:
    """Mark the pairs to fuse: each caption's `count` most similar images, and each image's captions."""
    # Both directions: a pair is fused if it is among the best of its caption or among the best of its image.
    selected_TI = np.zeros(similarity_TI.shape, dtype=bool)
    np.put_along_axis(selected_TI, top_columns(similarity_TI, count), True, axis=1)
    np.put_along_axis(selected_TI.T, top_columns(similarity_TI.T, count), True, axis=1)
    return selected_TI


def fill_unscored(scores_TI: NDArray[np.float32], similarity_TI: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rank unscored pairs below all scored ones, in the order of their similarity (of unit vectors, so -1 to 1).

    A NaN score stays NaN, for `rank_similarities` to reject.
    """
    # A similarity is at most 1, so all of them are below the lowest score when they are counted from two below it.
    scored_TI = ~np.isneginf(scores_TI)
    lowest = scores_TI[scored_TI].min() if scored_TI.any() else np.float32(0)
    return np.where(scored_TI, scores_TI, lowest - 2 + similarity_TI).astype(np.float32)
