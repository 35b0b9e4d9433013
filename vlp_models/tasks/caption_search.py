"""How a captioner looks for its words: by a beam, or for what the beam's caption and drawn ones agree on.

What a version is scored by is what it is served with: the search is kept beside the scores, and in the bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from vlp_models.common.io import read_json, write_json
from vlp_models.data.batch import Batch, Regions
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError, VLPError
from vlp_models.metrics.alike import most_alike
from vlp_models.models.decoding.beam import beam_search
from vlp_models.models.decoding.greedy import greedy
from vlp_models.models.decoding.sampling import sample as draw
from vlp_models.models.decoding.steps import Hypothesis
from vlp_models.models.protocols import Generates, SetsAside
from vlp_models.params import EvaluateParams, build
from vlp_models.tasks.caption_memory import FEATURES, CaptionMemory

FILE = "search.json"
DRAWS = 1  # the seed of what is drawn for a consensus: every image has the same
MOST = 20_000  # captions at once times tokens of each, in a foreign search.json: a state is held for all of them
KEPT = (  # of `evaluate`: what a caption depends on
    "beam_size",
    "length_penalty",
    "consensus",
    "consensus_temperature",
    "consensus_neighbours",
    "max_caption_len",
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of each image.

    said    the caption
    beam    the best of the beam; the same as `said` unless there is a consensus
    greedy  the most probable token each time
    """

    said: list[Hypothesis]
    beam: list[Hypothesis]
    greedy: list[Hypothesis]


class CaptionSearch:
    """memory: what `consensus_neighbours` asks for; made by `prepare` or `load`."""

    def __init__(self, tokenizer: Tokenizer, feature_dim: int) -> None:
        """feature_dim: of the regions that the model reads."""
        self.settings = EvaluateParams()
        self.memory: CaptionMemory | None = None
        self._tokenizer = tokenizer
        self._feature_dim = feature_dim

    def find(self, model: Generates, batch: Batch) -> Found:
        settings = self.settings
        plain = greedy(model, batch.image, **self._ends)
        best = plain
        if settings.beam_size > 1:
            best = beam_search(
                model,
                batch.image,
                beam_size=settings.beam_size,
                length_penalty=settings.length_penalty,
                set_aside=_sets_aside(model),
                **self._ends,
            )
        said = self._most_alike(model, batch, best) if settings.consensus else best
        return Found(said=said, beam=best, greedy=plain)

    def in_words(self, model: nn.Module) -> str:
        s = self.settings
        aside = ", finished captions set aside" if _sets_aside(model) and s.beam_size > 1 else ""
        ranked = f", length penalty {s.length_penalty:g}" if s.length_penalty and s.beam_size > 1 else ""
        drawn = f"{s.consensus} drawn at {s.consensus_temperature:g}"
        alike = f", the most alike of it and {drawn}" if s.consensus else ""
        if s.consensus_neighbours:
            alike = f", of it and {drawn} the most like captions of {s.consensus_neighbours} similar photos"
        return f"beam {s.beam_size}{ranked}{aside}{alike}, at most {s.max_caption_len} tokens"

    @property
    def best(self) -> str:
        """What `Found.beam` is, in words."""
        return f"the best of a beam of {self.settings.beam_size}"

    @property
    def chosen(self) -> str:
        """What `Found.said` is, in words."""
        s = self.settings
        if not s.consensus:
            return self.best
        others = "those of similar photos" if s.consensus_neighbours else "the others"
        return f"of the beam's and {s.consensus} drawn the one most like {others}"

    def prepare(self, shards: Path, sources: Mapping[str, int], max_regions: int, kept: Path | None) -> None:
        """
        Args:
            sources: what the run learnt from.
            kept: a folder of `save` whose memory is taken, if it has one; else, and without it, one is made of the
                shards: a version that was registered before is compared with others by the search of today.

        Raises:
            DataError: see `CaptionMemory.of`.
            CheckpointError: see `CaptionMemory.load`.
        """
        if not self.settings.consensus_neighbours:
            return
        if kept is not None and (kept / FEATURES).exists():
            self.memory = CaptionMemory.load(kept, self._tokenizer, self._feature_dim)
            return
        try:
            self.memory = CaptionMemory.of(shards, sources, self._tokenizer, max_regions)
        except DataError as error:
            if kept is None:
                raise
            raise DataError(
                f"{kept.parent}: registered without captions to look up, and none can be made here ({error}); "
                "`vlp run` registers its run anew, with them"
            ) from None

    def save(self, directory: Path) -> None:
        directory.mkdir()
        write_json(directory / FILE, {name: getattr(self.settings, name) for name in KEPT})
        if self.settings.consensus_neighbours and self.memory is not None:
            self.memory.save(directory)

    def load(self, directory: Path) -> None:
        """
        Raises:
            CheckpointError: nothing that `save` wrote.
        """
        file = directory / FILE
        try:
            said = {name: value for name, value in dict(read_json(file)).items() if name in KEPT}
            settings = build(EvaluateParams, said, where="search", file=str(file))
            if max(settings.beam_size, settings.consensus) * settings.max_caption_len > MOST:
                raise ValueError(f"more than {MOST:,} tokens at once")
            self.settings = settings
        except (VLPError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file}: does not say how captions are searched for ({error})") from None
        if self.settings.consensus_neighbours:
            self.memory = CaptionMemory.load(directory, self._tokenizer, self._feature_dim)

    def _most_alike(self, model: Generates, batch: Batch, best: Sequence[Hypothesis]) -> list[Hypothesis]:
        """For each image, of `best` and those drawn beside it, the one that is most like the others, or like the
        captions of photos that look alike."""
        settings, seeded = self.settings, torch.Generator().manual_seed(DRAWS)
        drawn = draw(
            model,
            batch.image,
            num_samples=settings.consensus,
            draws_KT=torch.rand(settings.consensus, settings.max_caption_len, generator=seeded),
            temperature=settings.consensus_temperature,
            **self._ends,
        )
        groups = [[one, *others] for one, others in zip(best, drawn, strict=True)]
        words = [[self._tokenizer.merge(h.ids) for h in group] for group in groups]
        if not settings.consensus_neighbours:
            return [group[most_alike(said)] for group, said in zip(groups, words, strict=True)]
        if self.memory is None:
            raise RuntimeError("`prepare` or `load` comes first")
        looks_BF = cast(Regions, batch.image).pooled_BF().float().cpu().numpy()
        return [
            group[self.memory.choose(image_id, look_F, said, settings.consensus_neighbours)]
            for group, said, image_id, look_F in zip(groups, words, batch.image_ids, looks_BF, strict=True)
        ]

    @property
    def _ends(self) -> dict[str, Any]:
        """How the decoders begin and end."""
        return {
            "max_len": self.settings.max_caption_len,
            "bos_id": self._tokenizer.cls_id,
            "eos_id": self._tokenizer.sep_id,
        }


def _sets_aside(model: object) -> bool:
    return isinstance(model, SetsAside) and model.sets_aside
