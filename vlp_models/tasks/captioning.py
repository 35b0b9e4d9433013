"""Captioning: describe an image in a sentence. No head: the model's own word predictions are the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from vlp_models.common.io import write_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.batch import Batch
from vlp_models.data.sample import Sample
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import ParamsError
from vlp_models.metrics.caption import CaptionSet, constant_caption, human_agreement, score_caption_sets
from vlp_models.metrics.consensus import Consensus
from vlp_models.metrics.truth import score_truth
from vlp_models.models.info import CheckpointInfo
from vlp_models.models.protocols import Generates, GeneratesByMasks
from vlp_models.objectives.loss import Loss
from vlp_models.objectives.msg import sentence_generation
from vlp_models.params import EvaluateParams
from vlp_models.tasks.base import TaskModel, TaskOptions, TrainingLoss, Words
from vlp_models.tasks.caption_memory import captioned
from vlp_models.tasks.caption_search import CaptionSearch
from vlp_models.tasks.gallery import Card, Gallery, Line, PictureSource, rows_of_images
from vlp_models.tasks.scoring import (
    BLANKED,
    Place,
    Prediction,
    Scored,
    by_metric,
    gain_over,
    own_id,
    read_truth,
    train_rows,
    variant,
)

NEIGHBOURS = 30
CONSENSUS = f"consensus of {NEIGHBOURS} neighbours"


@dataclass(frozen=True, kw_only=True)
class SelfCriticalParams:
    """Self-critical training (tasks/self_critical.py); the run starts from one of cross-entropy."""

    samples: int = 5  # descriptions drawn per image and step
    baseline: Literal["greedy", "mean_of_others"] = "greedy"  # the second needs two samples or more
    sampling_dropout: bool = False  # draw them with dropout on, as the public code does


@dataclass(frozen=True, kw_only=True)
class CaptioningOptions(TaskOptions):
    """
    targets        every: of each caption all words, each from those before it. masked: a few hidden words, as a model
                   that predicts masked words was pretrained (Unified VLP's paper); validation is on every word
    mask_probability  of `masked`: the share of a caption's words
    self_critical  CIDEr-D as reward instead of cross-entropy; it learns from images, not from pairs
    """

    label_smoothing: float = 0.0
    targets: Literal["every", "masked"] = "every"
    mask_probability: float = 0.15
    self_critical: SelfCriticalParams | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ParamsError(f"params.yaml: `options.label_smoothing: {self.label_smoothing}` must be 0 to below 1")
        if not 0 < self.mask_probability <= 1:
            raise ParamsError(
                f"params.yaml: `options.mask_probability: {self.mask_probability}` must be above 0, up to 1"
            )
        if self.self_critical and self.targets != "every":
            raise ParamsError(
                "params.yaml: `options.targets: masked` has no meaning in self-critical training; leave it out"
            )


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
    headlines = ("CIDEr", "BLEU-4", "METEOR", "true captions")
    blanked_fields = ("caption",)
    words = Words(verb="caption")
    gallery = Gallery(
        title="Captions",
        about="images at even distances from the split, not picked. Boxes are the most confident regions that the "
        "model was given.",
        every=True,
    )

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, info: CheckpointInfo, *, labels: Sequence[str] = ()
    ) -> None:
        super().__init__(model, tokenizer, info)
        options = cast(CaptioningOptions, self.options)
        self.label_smoothing = options.label_smoothing
        if options.targets == "masked" and not isinstance(model, GeneratesByMasks):
            raise ParamsError(
                f"params.yaml: `options.targets: masked`: the model `{info.name}` does not generate by masked words; "
                "`targets: every` fits"
            )
        self.searched = CaptionSearch(tokenizer, info.feature_dim)

    @classmethod
    def learning_view(cls, options: Any) -> str:
        return "images" if options.self_critical else cls.view

    @classmethod
    def captioned_only(cls, options: Any) -> bool:
        return options.self_critical is not None

    @classmethod
    def can_share_images(cls, model: type[nn.Module] | nn.Module, options: Any) -> bool:
        """Where each caption is learnt whole: a reward's images come without captions, and `masked` hides by batch."""
        return not options.self_critical and options.targets == "every"

    def read(self, samples: Sequence[Sample]) -> Batch:
        return self.reader.collate(samples, share_images=self.can_share_images(self.model, self.options))

    def loss(self, batch: Batch, *, generator: torch.Generator) -> Loss:
        """The text is the target. Part `captioning`: mean over the batch's tokens, or over those that are hidden."""
        options = cast(CaptioningOptions, self.options)
        if options.targets == "masked" and self.training:
            logits_MV, targets_M = cast(GeneratesByMasks, self.model).masked_words(
                batch, generator=generator, mask_probability=options.mask_probability
            )
            return sentence_generation(logits_MV, targets_M, label_smoothing=self.label_smoothing, name="captioning")
        at_BT = batch.text.followed_BT
        return sentence_generation(
            cast(Generates, self.model).generation_logits(batch.image, batch.text, at_BT),
            batch.text.following(at_BT),
            label_smoothing=self.label_smoothing,
            name="captioning",
        )

    def training_loss(self, shards: Path, sources: Mapping[str, int], work: Path) -> TrainingLoss:
        """Cross-entropy, or the reward where the options ask for it."""
        settings = cast(CaptioningOptions, self.options).self_critical
        if settings is None:
            return super().training_loss(shards, sources, work)
        from vlp_models.tasks.self_critical import self_critical_loss

        return self_critical_loss(self, settings, shards, sources, work)

    @torch.no_grad()
    def predict(self, batch: Batch, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """`caption`, `greedy` and, where the caption is a consensus, `beam` (caption_search.py)."""
        self.eval()
        found = self.searched.find(cast(Generates, self.model), batch)
        said = {"caption": found.said, "greedy": found.greedy}
        if self.searched.settings.consensus:
            said["beam"] = found.beam
        return [
            {"image_id": sample.image_id, **{name: self.tokenizer.decode(each[i].ids) for name, each in said.items()}}
            for i, sample in enumerate(samples)
        ]

    @classmethod
    def check_search(cls, settings: EvaluateParams, shards: Path, sources: Mapping[str, int]) -> None:
        if settings.consensus_neighbours:
            captioned(shards, sources, regions=False)

    def set_search(self, settings: EvaluateParams) -> None:
        """A control that is never shown a photo looks up none."""
        self.searched.settings = replace(settings, consensus_neighbours=0) if self.blank_images else settings

    def prepare_search(self, shards: Path, sources: Mapping[str, int], kept: Path | None = None) -> None:
        if self.searched.settings.consensus_neighbours and not self.reader.flags["regions"]:
            raise ParamsError(
                f"params.yaml: `evaluate.consensus_neighbours`: the model `{self.info.name}` reads pixels, and photos "
                "are compared by their regions; set it to 0"
            )
        self.searched.prepare(shards, sources, self.info.max_regions, kept)

    def save_search(self, directory: Path) -> None:
        self.searched.save(directory)

    def load_search(self, directory: Path) -> None:
        self.searched.load(directory)

    @property
    def search(self) -> str:
        return self.searched.in_words(self.model)

    @classmethod
    def spoken(cls, prediction: Prediction) -> list[str]:
        return [prediction["caption"]]

    @classmethod
    def can_score(cls, sample: Sample) -> bool:
        return bool(sample["captions"])

    def score(self, predictions: Sequence[Prediction], samples: Sequence[Sample], place: Place) -> Scored:
        """What is said under the plain metric names; greedy captions and, behind a consensus, the beam's beside it.

        Baselines: one constant caption learnt from train, the caption that training images which look alike agree on
        (metrics/consensus.py), and people (each image's last reference against the others). How much better than the
        second the captions are stands beside them, with an interval over images.
        """
        references = {sample.image_id: list(sample["captions"]) for sample in samples}
        captions = {p["image_id"]: p["caption"] for p in predictions}
        constant = constant_caption(train_rows("captions", place, ["text"])["text"].to_pylist())
        sets = {"": CaptionSet(candidates=captions, references=references)}
        ways = [way for way in ("greedy", "beam") if predictions and way in predictions[0]]
        for way in ways:
            sets[way] = CaptionSet(candidates={p["image_id"]: p[way] for p in predictions}, references=references)
        if constant:
            sets["constant caption"] = CaptionSet(candidates=dict.fromkeys(references, constant), references=references)
        borrowed = _borrowed(list(references), place)
        if borrowed:
            sets[CONSENSUS] = CaptionSet(candidates=borrowed, references=references)
        if predictions and "caption_blank" in predictions[0]:
            blank = {p["image_id"]: p["caption_blank"] for p in predictions}
            sets[BLANKED] = CaptionSet(candidates=blank, references=references)
        human = human_agreement(references)
        if human is not None:
            sets["human"] = human
        scored = score_caption_sets(sets, place.progress)
        scenes = read_truth(place.validated / "truth.jsonl", references.keys())
        if scenes:
            for name, caption_set in sets.items():
                scored[name] += score_truth(caption_set.candidates, scenes)[0]
        scores = scored.pop("")
        theirs = {score.metric: score for score in scored.get(CONSENSUS, ())}
        scores += [
            gain
            for score in scores
            if score.metric in self.headlines and score.metric in theirs
            for gain in gain_over(score, theirs[score.metric], f"{score.metric}, gain over {CONSENSUS}")
        ]
        for suffix in (*ways, BLANKED):
            scores += [variant(score, suffix) for score in scored.get(suffix, ())]
        for way in ways:
            scored.pop(way)
        return Scored(scores=scores, baselines=by_metric(scored))

    def write_official(
        self, predictions: Sequence[Prediction], place: Place, split: str, directory: Path
    ) -> Path | None:
        """COCO's result JSON."""
        path = directory / f"captions_{place.source}_{split}_results.json"
        write_json(path, [{"image_id": own_id(p["image_id"]), "caption": p["caption"]} for p in predictions])
        return path

    @classmethod
    def cards(cls, workspace: Workspace, pictures: PictureSource, predictions: Sequence[Prediction]) -> list[Card]:
        """Captions with their references and, where the scene is known, whether they are true of it."""
        references = rows_of_images("captions", workspace, predictions)
        captions = {row["image_id"]: row["caption"] for row in predictions}
        scenes = read_truth(workspace.validated / "truth.jsonl", captions.keys())
        truth = score_truth(captions, scenes)[1] if scenes else {}
        cards = []
        for row in predictions:
            true = truth.get(row["image_id"])
            said = Line(
                text=row["caption"] or "(empty)",
                right=true,
                strong=True,
                after="" if true is None else "true" if true else "not true",
            )
            greedy_too = [Line(text=f"greedy: {row['greedy']}", soft=True)] if row["greedy"] != row["caption"] else []
            own = [Line(text=reference["text"], soft=True) for reference in references.get(row["image_id"], ())]
            cards.append(
                Card(
                    picture=pictures.get(row["image_id"]),
                    lines=[said, *greedy_too],
                    summary=f"{len(own)} references" if own else "",
                    more=own,
                )
            )
        return cards


def _borrowed(image_ids: Sequence[str], place: Place) -> dict[str, str]:
    """For each image the caption that its nearest training images agree on; nothing unless every image has one."""
    place.progress("captions of similar training images")
    near = place.neighbours(image_ids)
    if not all(near.get(image_id) for image_id in image_ids):
        return {}
    captions: dict[str, list[str]] = {}
    for row in train_rows("captions", place, ["text"]).to_pylist():
        captions.setdefault(row["image_id"], []).append(row["text"])
    consensus = Consensus(captions)
    found = {image_id: consensus.of(near[image_id][:NEIGHBOURS]) for image_id in image_ids}
    return found if all(found.values()) else {}
