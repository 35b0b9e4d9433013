"""Caption scores by pycocoevalcap's own scorers: BLEU 1-4, METEOR, ROUGE-L, CIDEr(-D), and SPICE where it can run.

They are called one by one, since `COCOEvalCap` always builds SPICE, which downloads its models. All values are in
percent (CIDEr 1.2 reads 120, as tables print it).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlp_models.errors import DataError, MissingToolError
from vlp_models.metrics.coco_tools import Meteor, find_java, package_directory, tokenize
from vlp_models.metrics.score import Evidence, Score, bleu_percent, mean_score, meteor_from_statistics, not_computed

SPICE_TIMEOUT = 7200.0  # seconds

Tokenised = Mapping[str, Sequence[str]]  # image id -> captions, tokens joined by spaces


@dataclass(frozen=True, kw_only=True)
class CaptionSet:
    """One caption and at least one reference per image; both keyed by image id."""

    candidates: Mapping[str, str]
    references: Mapping[str, Sequence[str]]


def score_captions(candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> list[Score]:
    """All caption scores of one set; see `score_caption_sets`."""
    return score_caption_sets({"": CaptionSet(candidates=candidates, references=references)})[""]


def score_caption_sets(
    sets: Mapping[str, CaptionSet], progress: Callable[[str], None] = lambda text: None
) -> dict[str, list[Score]]:
    """Scores several sets with one start of each Java program.

    Without Java a Python tokenizer serves BLEU, ROUGE-L and CIDEr, which their note says; METEOR and SPICE are then
    None with a note, never zero. CIDEr's document frequencies come from the set's own references: figures of sets
    of different size are not comparable.

    Raises:
        DataError: ids of candidates and references differ, an image has no reference, or a caption with letters in
            it came out of the tokenizer empty.
    """
    for name, caption_set in sets.items():
        _check_ids(caption_set, name)
    with _meteor_process() as meteor:
        tokenised, note = _tokenised(sets, progress)
        result: dict[str, list[Score]] = {}
        for name, (candidates, references) in tokenised.items():
            progress("BLEU, ROUGE-L, CIDEr")
            if not candidates:
                names = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
                result[name] = [not_computed(metric, 0, "nothing to score") for metric in names]
                continue
            rouge, cider = _rouge(candidates, references, note), _cider(candidates, references, note)
            result[name] = [*_bleu(candidates, references, note), rouge, cider]
        progress("METEOR")
        filled = {name: both for name, both in tokenised.items() if both[0]}
        for name, score in _meteor(filled, meteor).items():
            result[name].insert(4, score)  # behind BLEU-4
    for name, (candidates, references) in filled.items():
        result[name].append(_spice(candidates, references))
    return result


def _tokenised(
    sets: Mapping[str, CaptionSet], progress: Callable[[str], None]
) -> tuple[dict[str, tuple[Tokenised, Tokenised]], str]:
    """Candidates and references of each set, and what must be said of the tokenizer."""
    progress("tokenising captions")
    texts = [text for s in sets.values() for text in s.candidates.values()]
    texts += [text for s in sets.values() for captions in s.references.values() for text in captions]
    tokens, note = tokenize(texts)
    tokenised: dict[str, tuple[Tokenised, Tokenised]] = {
        name: (
            {i: [tokens[s.candidates[i]]] for i in s.candidates},
            {i: [tokens[text] for text in s.references[i]] for i in s.candidates},
        )
        for name, s in sets.items()
    }
    return tokenised, note


def _check_ids(caption_set: CaptionSet, name: str) -> None:
    candidates, references = caption_set.candidates, caption_set.references
    for ids, what in (
        (references.keys() - candidates.keys(), "caption"),
        (candidates.keys() - references.keys(), "reference"),
    ):
        if ids:
            raise DataError(f"captions {name}: {len(ids)} images have no {what}, such as {min(ids)}")
    empty = [image_id for image_id, captions in references.items() if not captions]
    if empty:
        raise DataError(f"captions {name}: {len(empty)} images have no reference, such as {min(empty)}")


def _bleu(candidates: Tokenised, references: Tokenised, note: str) -> list[Score]:
    from pycocoevalcap.bleu.bleu_scorer import BleuScorer

    scorer = BleuScorer(n=4)
    for image_id, (candidate,) in candidates.items():
        scorer += (candidate, references[image_id])
    values, _ = scorer.compute_score(option="closest", verbose=0)
    parts = np.array(
        [
            [*counts["correct"], *counts["guess"], counts["testlen"], _closest(counts["reflen"], counts["testlen"])]
            for counts in scorer.ctest
        ],
        dtype=np.float64,
    )
    return [
        Score(
            metric=f"BLEU-{n}",
            value=100 * float(values[n - 1]),
            n=len(candidates),
            note=note,
            evidence=Evidence(groups=list(candidates), parts_NK=parts, statistic=partial(bleu_percent, n=n)),
        )
        for n in range(1, 5)
    ]


def _closest(reference_lengths: Sequence[int], length: int) -> int:
    return min((abs(reference - length), reference) for reference in reference_lengths)[1]


def _rouge(candidates: Tokenised, references: Tokenised, note: str) -> Score:
    from pycocoevalcap.rouge.rouge import Rouge

    _, values = Rouge().compute_score(references, candidates)
    return mean_score("ROUGE-L", values, list(candidates), note)


def _cider(candidates: Tokenised, references: Tokenised, note: str) -> Score:
    from pycocoevalcap.cider.cider import Cider

    _, values = Cider().compute_score(references, candidates)
    return mean_score("CIDEr", values, list(candidates), note)


@contextmanager
def _meteor_process() -> Iterator[Meteor | str]:
    """METEOR, which loads its tables for seconds while others work; or why there is none."""
    try:
        process = Meteor()
    except MissingToolError as error:
        missing = str(error)
    else:
        with process:
            yield process
        return
    yield missing


def _meteor(sets: Mapping[str, tuple[Tokenised, Tokenised]], meteor: Meteor | str) -> dict[str, Score]:
    """sets: none of them empty."""
    if isinstance(meteor, str):
        return {name: not_computed("METEOR", len(candidates), meteor) for name, (candidates, _) in sets.items()}
    scores: dict[str, Score] = {}
    try:
        for name, (candidates, references) in sets.items():
            parts = np.array([meteor.statistics(candidates[i][0], references[i]) for i in candidates], np.float64)
            evidence = Evidence(groups=list(candidates), parts_NK=parts, statistic=meteor_from_statistics)
            value = 100 * meteor.score(parts)
            scores[name] = Score(metric="METEOR", value=value, n=len(candidates), evidence=evidence)
    except MissingToolError as error:
        return {name: not_computed("METEOR", len(candidates), str(error)) for name, (candidates, _) in sets.items()}
    return scores


def _spice(candidates: Tokenised, references: Tokenised) -> Score:
    """Mean F over images. Runs only where CoreNLP 3.6.0 and its models lie beside SPICE's jar; downloads nothing."""
    n = len(candidates)
    directory = package_directory() / "spice"
    needed = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
    if not all((directory / "lib" / name).exists() for name in needed):
        return not_computed("SPICE", n, "CoreNLP 3.6.0 models not found beside pycocoevalcap's SPICE")
    try:
        items = _run_spice(find_java(), directory, candidates, references)
    except (MissingToolError, OSError, subprocess.SubprocessError, ValueError) as error:
        return not_computed("SPICE", n, str(error).splitlines()[0] if str(error) else type(error).__name__)
    values = [float(item["scores"]["All"]["f"]) for item in items]
    return mean_score("SPICE", values, [str(item["image_id"]) for item in items])


def _run_spice(java: str, directory: Path, candidates: Tokenised, references: Tokenised) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="vlp-spice-") as temporary:
        source, target = Path(temporary) / "in.json", Path(temporary) / "out.json"
        rows = [{"image_id": i, "test": candidates[i][0], "refs": list(references[i])} for i in candidates]
        source.write_text(json.dumps(rows), encoding="utf-8")
        command = [java, "-Xmx8G", "-jar", "spice-1.0.jar", str(source), "-out", str(target), "-subset", "-silent"]
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=SPICE_TIMEOUT)
        items = json.loads(target.read_text(encoding="utf-8"))
    if not isinstance(items, list) or len(items) != len(candidates):
        raise MissingToolError("SPICE did not score every caption")
    return items


def human_agreement(references: Mapping[str, Sequence[str]]) -> CaptionSet | None:
    """Each image's last reference as the candidate, the others as references; None if an image has fewer than two.

    One reference fewer than a system is scored against: a slightly low estimate of what people reach.
    """
    if not references or any(len(captions) < 2 for captions in references.values()):
        return None
    return CaptionSet(
        candidates={i: captions[-1] for i, captions in references.items()},
        references={i: captions[:-1] for i, captions in references.items()},
    )


def constant_caption(train: Sequence[str]) -> str:
    """The caption to give if one may not look: the commonest of train (case and spacing aside), among equals the one
    whose words are commonest, then by text. Empty if train has none."""
    counts: dict[str, int] = {}
    words: dict[str, int] = {}
    for text in train:
        caption = " ".join(text.lower().split())
        counts[caption] = counts.get(caption, 0) + 1
        for word in set(caption.split()):
            words[word] = words.get(word, 0) + 1

    def commonness(caption: str) -> float:
        own = caption.split()
        return sum(words[word] for word in own) / max(len(own), 1)

    return min(counts, key=lambda caption: (-counts[caption], -commonness(caption), caption), default="")


def score_faithfulness(
    captions: Mapping[str, str], scenes: Mapping[str, dict[str, Any]]
) -> tuple[list[Score], dict[str, bool]]:
    """Share of captions true of their scene, the share that says anything that can be checked, and how much of the
    scene's facts true claims state.

    Args:
        captions: image id -> caption.
        scenes: image id -> a line of truth.jsonl; images without one are left out.

    Returns:
        The scores, and image id -> whether its caption is true.
    """
    from vlp_models.synthetic.scenes.language import check

    ids = [image_id for image_id in captions if image_id in scenes]
    verdicts = [check(captions[image_id], scenes[image_id]) for image_id in ids]
    true = [verdict.true is True for verdict in verdicts]
    scores = [
        mean_score("faithful captions", [float(value) for value in true], ids),
        mean_score("checkable captions", [float(verdict.true is not None) for verdict in verdicts], ids),
        mean_score("scene facts stated", [verdict.informative for verdict in verdicts], ids),
    ]
    return scores, dict(zip(ids, true, strict=True))
