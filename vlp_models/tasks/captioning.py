"""Captioning: describe an image in a sentence. No head: the model's own word predictions are the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from vlp_models.common.io import write_json
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import ParamsError
from vlp_models.metrics.caption import (
    CaptionSet,
    constant_caption,
    human_agreement,
    note_language,
    score_caption_sets,
    score_faithfulness,
)
from vlp_models.metrics.consensus import ConsensusCaptions
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.models.protocols import Generates, GeneratesByMasks
from vlp_models.objectives.generation import sentence_generation
from vlp_models.objectives.loss import Loss
from vlp_models.params import SEARCH_OPTIONS, EvaluateParams
from vlp_models.tasks.base import RequestFormat, TaskModel, TaskOptions, TrainingLoss
from vlp_models.tasks.caption_search import CaptionSearch, open_captioned_images
from vlp_models.tasks.scoring import (
    BLIND,
    CONSTANT,
    NEAREST,
    EvalContext,
    Prediction,
    TaskScores,
    baselines_by_metric,
    gain_over,
    id_in_source,
    read_scenes,
    read_train_rows,
    with_suffix,
)
from vlp_models.tasks.self_critical import SelfCriticalParams

HUMAN = "human"  # each image's last reference, scored against its others
NEIGHBORS = 30  # training images whose captions the nearest-neighbor baseline chooses from


@dataclass(frozen=True, kw_only=True)
class CaptioningOptions(TaskOptions):
    """
    targets        all: predict every word of a caption from the ones before it. masked: predict a few masked words,
                   as a masked language model was pretrained (Unified VLP's paper); validation is on every word
    mask_probability  with `masked`: the share of a caption's words that is masked
    self_critical  train with CIDEr-D as reward instead of cross-entropy; reads images, not image-caption pairs
    """

    label_smoothing: float = 0.0
    targets: Literal["all", "masked"] = "all"
    mask_probability: float = 0.15
    self_critical: SelfCriticalParams | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"`label_smoothing: {self.label_smoothing}` must be 0 to below 1")
        if not 0 < self.mask_probability <= 1:
            raise ValueError(f"`mask_probability: {self.mask_probability}` must be above 0, up to 1")
        if self.self_critical and self.targets != "all":
            raise ValueError("`targets: masked` does not apply to self-critical training; remove it")
        if self.self_critical and self.label_smoothing:
            raise ValueError("`label_smoothing` does not apply to self-critical training; remove it")


class Captioning(TaskModel):
    """Teacher forcing, cross-entropy over every token after [CLS] (TDEN, section "Downstream tasks")."""

    task = "captioning"
    title = "Captioning"
    view = "captions"
    prediction_view = "images"
    needs = (Generates,)
    options_class = CaptioningOptions
    id_key = "image_id"
    metric = "CIDEr"
    headlines = ("CIDEr", "BLEU-4", "METEOR", "faithful captions")
    baselines_to_beat = (CONSTANT, NEAREST)
    blind_fields = ("caption",)
    search_options = SEARCH_OPTIONS
    request = RequestFormat()
    example = 'caption("photo.jpg")'

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        options = cast(CaptioningOptions, self.options)
        self.label_smoothing = options.label_smoothing
        if options.targets == "masked" and not isinstance(model, GeneratesByMasks):
            raise ParamsError(
                f"params.yaml: `options.targets: masked`: the model `{info.name}` does not generate by masked words; "
                "set `targets: all`"
            )
        self.caption_search = CaptionSearch(tokenizer, info.feature_dim)

    @classmethod
    def training_view(cls, options: Any) -> str:
        return "images" if options.self_critical else cls.view

    @classmethod
    def needs_captions(cls, options: Any) -> bool:
        return options.self_critical is not None

    @classmethod
    def can_share_images(cls, model: type[nn.Module] | nn.Module, options: Any) -> bool:
        """Return False for a reward, whose images come without captions, and for `masked`, which masks per batch."""
        return not options.self_critical and options.targets == "all"

    def read(self, samples: Sequence[Sample]) -> Batch:
        return self.reader.collate(samples, share_images=self.can_share_images(self.model, self.options))

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """Return the mean cross-entropy over the batch's tokens, or over its masked ones; part `captioning`."""
        options = cast(CaptioningOptions, self.options)
        # Validation is on every word in both cases, so that runs can be compared.
        if options.targets == "masked" and self.training:
            logits_MV, targets_M = cast(GeneratesByMasks, self.model).masked_words(
                batch, generator=generator, mask_probability=options.mask_probability
            )
            return sentence_generation(logits_MV, targets_M, label_smoothing=self.label_smoothing, name="captioning")
        # The logits after each token but the last, against the token that follows it.
        at_BT = batch.text.has_next_BT
        return sentence_generation(
            cast(Generates, self.model).generation_logits(batch.image, batch.text, at_BT),
            batch.text.next_tokens(at_BT),
            label_smoothing=self.label_smoothing,
            name="captioning",
        )

    def training_loss(self, shards: Path, sources: Mapping[str, int], work: Path) -> TrainingLoss:
        """Return the self-critical loss if the options configure it, else cross-entropy."""
        settings = cast(CaptioningOptions, self.options).self_critical
        if settings is None:
            return super().training_loss(shards, sources, work)
        from vlp_models.tasks.self_critical import self_critical_loss

        return self_critical_loss(self, settings, shards, sources, work)

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """Return `caption`, `greedy` and, if the caption is a consensus, `beam` (caption_search.py)."""
        self.eval()
        result = self.caption_search.find(cast(Generates, self.model), batch)
        captions = {"caption": result.caption, "greedy": result.greedy}
        # Without a consensus the chosen caption is the beam's, which is not repeated.
        if self.caption_search.settings.consensus_samples:
            captions["beam"] = result.beam
        rows = []
        for i, sample in enumerate(samples):
            texts = {name: self.tokenizer.decode(hypotheses[i].ids) for name, hypotheses in captions.items()}
            rows.append({"image_id": sample.image_id, **texts})
        return rows

    @classmethod
    def format_prediction(cls, prediction: Prediction) -> list[str]:
        return [prediction["caption"]]

    @classmethod
    def check_search(cls, settings: EvaluateParams, shards: Path, sources: Mapping[str, int]) -> None:
        # Opening the index before training raises the error that `prepare_search` would raise after it.
        if settings.consensus_neighbors:
            open_captioned_images(shards, sources, regions=False)

    def set_search(self, settings: EvaluateParams) -> None:
        """Configure the search; a text-only control does not look up similar images."""
        self.caption_search.settings = replace(settings, consensus_neighbors=0) if self.blank_images else settings

    def prepare_search(self, shards: Path, sources: Mapping[str, int], saved: Path | None = None) -> None:
        if self.caption_search.settings.consensus_neighbors and not self.reader.flags["regions"]:
            raise ParamsError(
                f"params.yaml: `evaluate.consensus_neighbors`: the model `{self.info.name}` reads pixels, and images "
                "are compared by their region features; set it to 0"
            )
        self.caption_search.prepare(shards, sources, self.info.max_regions, saved)

    def save_search(self, directory: Path) -> None:
        self.caption_search.save(directory)

    def load_search(self, directory: Path) -> None:
        self.caption_search.load(directory)

    @property
    def search(self) -> str:
        return self.caption_search.describe(self.model)

    @classmethod
    def can_score(cls, sample: Sample) -> bool:
        return bool(sample["captions"])

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], context: EvalContext) -> TaskScores:
        """Score the captions; greedy captions and, with a consensus, the beam's as `METRIC (greedy)`, `METRIC (beam)`.

        Baselines: the constant caption most common in train, the caption that similar training images agree on (with
        the gain over it), the blind model's captions, and each image's last reference scored against the others
        ("human"). For synthetic scenes, also the share of captions that is true of the scene. If references name their
        languages, also `METRIC (LANGUAGE)`: the captions of the images with references in it, against these alone.
        """
        from vlp_models.data.tables import read_languages

        # By name, every set of captions to score: the model's own (""), other decoders', baselines and languages.
        references = {sample.image_id: list(sample["captions"]) for sample in samples}
        captions = {p["image_id"]: p["caption"] for p in predictions}
        decoders = [name for name in ("greedy", "beam") if predictions and name in predictions[0]]
        candidates = {"": captions}
        candidates |= {name: {p["image_id"]: p[name] for p in predictions} for name in decoders}
        candidates |= _baseline_captions(predictions, list(references), context)
        sets = {name: CaptionSet(candidates=texts, references=references) for name, texts in candidates.items()}
        languages = read_languages(context.validated, references.keys())
        for language, language_references in languages.items():
            # Only the images with references in this language, against these alone.
            in_language = {image_id: captions[image_id] for image_id in language_references}
            sets[language] = CaptionSet(candidates=in_language, references=language_references)
        human = human_agreement(references)
        if human is not None:
            sets[HUMAN] = human

        scored = score_caption_sets(sets, context.progress, context.meteor)
        # Synthetic datasets have a scene graph for each image; others have no truth.jsonl.
        scenes = read_scenes(context.validated / "truth.jsonl", references.keys())
        if scenes:
            for name, caption_set in sets.items():
                scored[name] += score_faithfulness(caption_set.candidates, scenes)[0]

        # The model's scores, their gains over the nearest-neighbor captions, then the other sets as `METRIC (SET)`.
        scores = [*scored[""]]
        nearest_scores = {score.metric: score for score in scored.get(NEAREST, ())}
        for score in scored[""]:
            if score.metric in self.headlines and score.metric in nearest_scores:
                scores += gain_over(score, nearest_scores[score.metric], f"{score.metric}, gain over {NEAREST}")
        for name in (*decoders, BLIND):
            scores += [with_suffix(score, name) for score in scored.get(name, ())]
        for language in languages:
            scores += [with_suffix(note_language(score, language), language) for score in scored[language]]
        baselines = {name: scored[name] for name in (CONSTANT, NEAREST, BLIND, HUMAN) if name in scored}
        return TaskScores(scores=scores, baselines=baselines_by_metric(baselines))

    def write_official(
        self, predictions: Sequence[Prediction], context: EvalContext, split: str, directory: Path
    ) -> Path | None:
        """Write COCO's result JSON."""
        path = directory / f"captions_{context.source}_{split}_results.json"
        write_json(path, [{"image_id": id_in_source(p["image_id"]), "caption": p["caption"]} for p in predictions])
        return path


def _baseline_captions(
    predictions: Sequence[Prediction], image_ids: Sequence[str], context: EvalContext
) -> dict[str, dict[str, str]]:
    """Return the baselines that can be computed: name -> image id -> caption."""
    baselines: dict[str, dict[str, str]] = {}
    train = read_train_rows("captions", context, ["text"]).to_pylist()
    constant = constant_caption([row["text"] for row in train])
    if constant:
        baselines[CONSTANT] = dict.fromkeys(image_ids, constant)
    context.progress("captions of similar training images")
    neighbors = context.nearest(image_ids)
    # For all images or for none: the mean over some of them could not be compared with the model's.
    if all(neighbors.get(image_id) for image_id in image_ids):
        # Counting the n-grams of a train split takes long, so all splits of the dataset share the result.
        if context.source not in context.consensus:
            train_captions: dict[str, list[str]] = {}
            for row in train:
                train_captions.setdefault(row["image_id"], []).append(row["text"])
            context.consensus[context.source] = ConsensusCaptions(train_captions)
        consensus = context.consensus[context.source]
        nearest = {image_id: consensus.choose(neighbors[image_id][:NEIGHBORS]) for image_id in image_ids}
        if all(nearest.values()):
            baselines[NEAREST] = nearest
    if predictions and "caption_blind" in predictions[0]:
        baselines[BLIND] = {p["image_id"]: p["caption_blind"] for p in predictions}
    return baselines
