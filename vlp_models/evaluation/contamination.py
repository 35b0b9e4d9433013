"""What of a test was there to learn from: items whose picture or sentence a model has seen a near-duplicate of.

Pictures: `validate` lists copies across splits (data/validated/copies.parquet), and takes them out of what is learnt
from unless `validate.near_duplicates.action` says otherwise. Sentences are compared with every text of the training
rows that the run, or one that it starts from, learnt from. Weights imported from elsewhere may have seen more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates.leakage import LEAKS, compare_sentences
from vlp_models.data.sample import Sample
from vlp_models.data.shards.contents import learned_from, no_longer_here
from vlp_models.data.tables import SPLITS, read_table
from vlp_models.data.views import TABLES
from vlp_models.metrics.bootstrap import interval
from vlp_models.metrics.score import Evidence, Score
from vlp_models.params import Params, split_start

FEWEST = 20  # items that must be left for a figure
TEXTS_AT_ONCE = 65_536


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Ids of samples: those whose picture, and those whose sentence, has a near-duplicate in what was learnt from."""

    pictures: frozenset[str]
    sentences: frozenset[str]


class Learnt:
    """What a run, and the runs that it starts from, had to learn from.

    Args:
        sources: datasets; empty: all.
    """

    def __init__(self, validated: Path, sources: Sequence[str]) -> None:
        images = read_table("images", validated, columns=["image_id", "source", "split"])
        images = images.filter(_of(images, sources))
        trained = images["image_id"]
        self._copied: set[str] = set()
        if (validated / LEAKS).exists():
            copies = pq.read_table(validated / LEAKS)
            kept = pc.is_in(copies["image_id"], value_set=trained.combine_chunks())
            self._copied = set(copies.filter(kept)["copy_of"].to_pylist())
        self._texts: list[pa.Array] = []
        for name, view in TABLES.items():
            if not view.has_text:
                continue
            columns = ["image_id", "text"] if view.has_image else ["source", "split", "text"]
            rows = read_table(name, validated, columns=columns)
            chosen = pc.is_in(rows["image_id"], value_set=trained.combine_chunks()) if view.has_image else None
            self._texts.append(rows.filter(_of(rows, sources) if chosen is None else chosen)["text"].unique())

    def seen(self, samples: Sequence[Sample]) -> Seen:
        """A sample's sentences are its text, or the captions of its image."""
        pictures = {s.sample_id for s in samples if not self._copied.isdisjoint(s.image_ids)}
        asked = {s.sample_id: s.values.get("captions") or [s.text] for s in samples}
        texts = list(dict.fromkeys(text for several in asked.values() for text in several))
        like = dict(zip(texts, compare_sentences(texts, self._learnt_texts()), strict=True))
        sentences = {sample_id for sample_id, several in asked.items() if any(like[text] for text in several)}
        return Seen(pictures=frozenset(pictures), sentences=frozenset(sentences))

    def _learnt_texts(self) -> Iterator[str]:
        """Some at a time: what was learnt from may be millions."""
        for texts in self._texts:
            for start in range(0, len(texts), TEXTS_AT_ONCE):
                yield from texts.slice(start, TEXTS_AT_ONCE).to_pylist()


def learnt(params: Params, workspace: Workspace, run: str) -> Learnt | None:
    """What a run had to learn from; None where that was other data than what lies here, as a champion's may be."""
    config = workspace.checkpoint(f"finetune/{run}") / "config.json"
    if not config.exists():
        return None
    inputs = (read_json(config).get("provenance") or {}).get("inputs", {})
    if not learned_from(inputs) or no_longer_here(workspace, inputs):
        return None
    return Learnt(workspace.validated, learnt_sources(params, run))


def learnt_sources(params: Params, run: str) -> list[str]:
    """The datasets that a fine-tuning run and the pretrainings before it learn from; empty: all."""
    found: dict[str, None] = {}
    for checkpoint in params.chain(f"finetune/{run}"):
        kind, name = split_start(checkpoint)
        if kind == "initial":
            continue
        sources = (params.pretrain if kind == "pretrain" else params.finetune)[name].sources  # type: ignore[index]
        if not sources:
            return []
        found |= dict.fromkeys(sources)
    return list(found)


def without_seen(
    score: Score, seen: Seen, whole: Mapping[str, float | None], *, resamples: int, seed: int
) -> dict[str, Any] | None:
    """The score without the items that were seen, in two steps: pictures alone, and sentences as well.

    Args:
        whole: the ends `low` and `high` of the score's own interval, which stay where nothing was seen.

    Returns:
        {pictures, sentences: how many items; without_pictures, without_both: {value, low, high, n}, or None where
        fewer than `FEWEST` items are left}; None for a score that is not kept item by item.
    """
    evidence = score.evidence
    if evidence is None or not score.kept:
        return None
    names = [str(item) for item in evidence.items or evidence.groups]

    def among(ids: frozenset[str]) -> set[int]:
        # an image's captions are `<image>#<number>`
        return {i for i, item in enumerate(names) if item in ids or item.rpartition("#")[0] in ids}

    pictures, sentences = among(seen.pictures), among(seen.sentences)

    def left(out: set[int]) -> dict[str, Any] | None:
        chosen = [i for i in range(len(names)) if i not in out]
        if len(chosen) < FEWEST:
            return None
        if not out:
            return None if score.value is None else {"value": round(score.value, 4), **whole, "n": len(chosen)}
        part = Evidence(
            groups=[evidence.groups[i] for i in chosen],
            parts_NK=evidence.parts_NK[chosen],
            statistic=evidence.statistic,
        )
        value = float(part.statistic(part.parts_NK.sum(axis=0, keepdims=True))[0])
        found = interval(part, resamples=resamples, seed=seed)
        low, high = (None, None) if found is None else (round(found[0], 4), round(found[1], 4))
        return {"value": round(value, 4), "low": low, "high": high, "n": len(chosen)}

    without_pictures = left(pictures)
    return {
        "pictures": len(pictures),
        "sentences": len(sentences),
        "without_pictures": without_pictures,
        "without_both": without_pictures if sentences <= pictures else left(pictures | sentences),
    }


def _of(rows: pa.Table, sources: Sequence[str]) -> Any:
    """Which rows are of the training split, and of these datasets."""
    chosen = pc.equal(rows["split"], SPLITS[0])
    return pc.and_(chosen, pc.is_in(rows["source"], value_set=pa.array(sources, pa.string()))) if sources else chosen
