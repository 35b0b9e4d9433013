"""Caption scores by pycocoevalcap's own scorers: BLEU 1-4, METEOR, ROUGE-L, CIDEr(-D), and SPICE if it can run; and
faithfulness, the share of captions that are true of a synthetic scene.

The scorers are called one by one, because `COCOEvalCap` always builds SPICE, which downloads its models. All values are
in percent (a CIDEr of 1.2 reads 120, as in papers' tables).
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from vlp_models.common.environment import program_environment
from vlp_models.common.log import get_logger
from vlp_models.errors import DataError, MissingToolError, ProcessLostError
from vlp_models.metrics.coco_tools import (
    NOT_FOUND,
    Meteor,
    explain_failure,
    find_java,
    package_directory,
    program_reason,
    tokenize_captions,
)
from vlp_models.metrics.score import Evidence, Score, bleu_percent, mean_score, meteor_from_statistics, not_computed

logger = get_logger(__name__)
SPICE_TIMEOUT = 7200.0  # seconds

# The order in which scores are reported.
METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")

Tokenized = Mapping[str, Sequence[str]]  # image id -> captions, tokens joined by spaces


@dataclass(frozen=True, kw_only=True)
class CaptionSet:
    """One candidate and at least one reference per image, by image id."""

    candidates: Mapping[str, str]
    references: Mapping[str, Sequence[str]]


def score_caption_sets(
    sets: Mapping[str, CaptionSet],
    progress: Callable[[str], None] = lambda text: None,
    meteor: SharedMeteor | None = None,
) -> dict[str, list[Score]]:
    """Score several sets, starting each Java program once.

    Without Java, BLEU, ROUGE-L and CIDEr use a Python tokenizer, as their note states. METEOR and SPICE are None with a
    note, never zero, if they cannot run. Notes depend on the references only, so two models' scores of one test set
    have the same note and can be compared. CIDEr's document frequencies come from the set's own references, so values
    of sets of different size are not comparable.

    Args:
        meteor: its process is used and not ended; default: one of this call.

    Raises:
        DataError: ids of candidates and references differ, or an image has no reference.
    """
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    for name, caption_set in sets.items():
        _check_ids(caption_set, name)
    # After an error METEOR's process is ended first, so that the thread that waits for its answers ends as well.
    with ThreadPoolExecutor(1) as pool, _meteor_process(meteor) as process:
        # METEOR scores all sets in a thread, while the others score them here; a set without captions has no scores.
        tokenized, notes, meteor_notes = _tokenize_sets(sets, progress)
        filled = {name: both for name, both in tokenized.items() if both[0]}
        meteor_scores = pool.submit(_meteor, filled, process, meteor_notes)
        result: dict[str, list[Score]] = {}
        for name, (candidates, references) in tokenized.items():
            progress("BLEU, ROUGE-L, CIDEr")
            if not candidates:
                result[name] = [not_computed(metric, 0, "nothing to score") for metric in METRICS]
                continue
            note = notes[name]
            # The scorers return a value per image, in the order of the ids, which candidates and references share.
            _, rouge = Rouge().compute_score(references, candidates)
            # CIDEr's scorer fails if no reference has a word; no caption has an n-gram of one then.
            has_words = any(itertools.chain.from_iterable(references.values()))
            cider = Cider().compute_score(references, candidates)[1] if has_words else np.zeros(len(candidates))
            result[name] = [
                *_bleu(candidates, references, note),
                mean_score("ROUGE-L", rouge, list(candidates), note),
                mean_score("CIDEr", cider, list(candidates), note),
            ]
        progress("METEOR")
        for name, score in meteor_scores.result().items():
            result[name].append(score)
    for name, (candidates, references) in filled.items():
        result[name].append(_spice(candidates, references))
        result[name].sort(key=lambda score: METRICS.index(score.metric))
    return result


def _tokenize_sets(
    sets: Mapping[str, CaptionSet], progress: Callable[[str], None]
) -> tuple[dict[str, tuple[Tokenized, Tokenized]], dict[str, str], dict[str, str]]:
    """Return each set's tokenized candidates and references, the note on scores of its words, and METEOR's note."""
    progress("tokenizing captions")
    candidates: list[str] = []
    references: dict[str, list[str]] = {}  # of each set
    for name, caption_set in sets.items():
        candidates += caption_set.candidates.values()
        references[name] = [text for captions in caption_set.references.values() for text in captions]
    # All texts at once, since Java takes seconds to start.
    tokenization = tokenize_captions([*candidates, *itertools.chain.from_iterable(references.values())])
    lost = [text for text in candidates if text in tokenization.dropped]
    if lost:
        logger.warning(
            f"{len(lost)} captions to score, such as {lost[0][:80]!r}, have letters or symbols that the Penn Treebank "
            "tokenizer drops; the Python tokenizer was used for them"
        )
    if tokenization.no_java not in ("", NOT_FOUND):
        logger.warning(f"{tokenization.no_java}; the Python tokenizer is used")
    tokens = tokenization.tokens
    tokenized: dict[str, tuple[Tokenized, Tokenized]] = {}
    for name, caption_set in sets.items():
        candidate_tokens, reference_tokens = {}, {}
        for image_id, text in caption_set.candidates.items():
            candidate_tokens[image_id] = [tokens[text]]
            reference_tokens[image_id] = [tokens[reference] for reference in caption_set.references[image_id]]
        tokenized[name] = candidate_tokens, reference_tokens
    notes = {name: tokenization.note(texts_of_set) for name, texts_of_set in references.items()}
    return tokenized, notes, {name: tokenization.meteor_note(texts_of_set) for name, texts_of_set in references.items()}


def _check_ids(caption_set: CaptionSet, name: str) -> None:
    candidates, references = caption_set.candidates, caption_set.references
    without_caption, without_reference = references.keys() - candidates.keys(), candidates.keys() - references.keys()
    for ids, missing in ((without_caption, "caption"), (without_reference, "reference")):
        if ids:
            raise DataError(f"captions {name}: {len(ids)} images have no {missing}, such as {min(ids)}")
    empty = [image_id for image_id, captions in references.items() if not captions]
    if empty:
        raise DataError(f"captions {name}: {len(empty)} images have no reference, such as {min(empty)}")


def _bleu(candidates: Tokenized, references: Tokenized, note: str) -> list[Score]:
    from pycocoevalcap.bleu.bleu_scorer import BleuScorer

    # The scorer's own counts, image by image: their sums give the corpus score, and any resample's.
    scorer = BleuScorer(n=4)
    for image_id, (candidate,) in candidates.items():
        scorer += (candidate, references[image_id])
    values, _ = scorer.compute_score(option="closest", verbose=0)
    # A row has the ten columns of `bleu_percent`: n-grams matched and proposed for n = 1..4, then the two lengths.
    rows = []
    for counts in scorer.ctest:
        length = counts["testlen"]
        # The reference closest in length, the shorter of two.
        _, reference_length = min((abs(reference - length), reference) for reference in counts["reflen"])
        rows.append([*counts["correct"], *counts["guess"], length, reference_length])
    parts = np.array(rows, dtype=np.float64)
    scores = []
    for n in range(1, 5):
        evidence = Evidence(groups=list(candidates), parts_NK=parts, statistic=partial(bleu_percent, n=n))
        value = 100 * float(values[n - 1])
        scores.append(Score(metric=f"BLEU-{n}", value=value, n=len(candidates), note=note, evidence=evidence))
    return scores


class SharedMeteor:
    """A METEOR process for several calls of `score_caption_sets`, started by the first of them; a context manager."""

    def __init__(self) -> None:
        self._process: Meteor | None = None

    def __enter__(self) -> SharedMeteor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def start(self) -> Meteor:
        # A process that died between two calls is replaced.
        if self._process is None or not self._process.use_again():
            self.end()
            self._process = Meteor()
        return self._process

    def end(self) -> None:
        if self._process is not None:
            self._process.__exit__(None, None, None)
        self._process = None


@contextmanager
def _meteor_process(shared: SharedMeteor | None) -> Iterator[Meteor | str]:
    """Start METEOR, which loads its tables for seconds while other scorers run; or yield why it cannot run."""
    meteor = shared or SharedMeteor()
    try:
        process: Meteor | str = meteor.start()
    except MissingToolError as error:
        process = str(error)
    try:
        yield process
    # A shared process too: a thread may still wait for its answer, and the next call starts another one.
    except BaseException:
        meteor.end()
        raise
    if not shared:
        meteor.end()


def _meteor(
    sets: Mapping[str, tuple[Tokenized, Tokenized]], meteor: Meteor | str, notes: Mapping[str, str]
) -> dict[str, Score]:
    """Score the sets; none is empty."""
    if isinstance(meteor, str):
        return {name: not_computed("METEOR", len(candidates), meteor) for name, (candidates, _) in sets.items()}
    scores: dict[str, Score] = {}
    try:
        for name, (candidates, references) in sets.items():
            # (N, 23): one row of sums per image, in the program's order
            parts = np.array([meteor.statistics(candidates[i][0], references[i]) for i in candidates], np.float64)
            evidence = Evidence(groups=list(candidates), parts_NK=parts, statistic=meteor_from_statistics)
            # (N, 23) -> (1, 23): the corpus score is computed from the summed counts and is no mean over images.
            value = float(meteor_from_statistics(parts.sum(axis=0, keepdims=True))[0])
            scores[name] = Score(metric="METEOR", value=value, n=len(candidates), note=notes[name], evidence=evidence)
    except MissingToolError as error:
        logger.warning(f"{error}; METEOR is not computed")
        return {name: not_computed("METEOR", len(candidates), str(error)) for name, (candidates, _) in sets.items()}
    return scores


def _spice(candidates: Tokenized, references: Tokenized) -> Score:
    """Return the mean F over images. Runs only if CoreNLP 3.6.0 and its models are next to SPICE's jar."""
    n = len(candidates)
    try:
        directory = package_directory() / "spice"
        needed = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
        if not all((directory / "lib" / name).exists() for name in needed):
            return not_computed("SPICE", n, "CoreNLP 3.6.0 models not found next to pycocoevalcap's SPICE")
        java = find_java()
    except MissingToolError as error:
        return not_computed("SPICE", n, str(error))
    with tempfile.TemporaryDirectory(prefix="vlp-spice-") as temporary:
        source, target = Path(temporary) / "in.json", Path(temporary) / "out.json"
        rows = [{"image_id": i, "test": candidates[i][0], "refs": list(references[i])} for i in candidates]
        source.write_text(json.dumps(rows), encoding="utf-8")
        command = [java, "-Xmx8G", "-jar", "spice-1.0.jar", str(source), "-out", str(target), "-subset", "-silent"]
        try:
            environment = program_environment()
            done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, timeout=SPICE_TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            return not_computed("SPICE", n, f"SPICE failed: {error}")
        reason = program_reason(done.stderr, done.stdout)
        if done.returncode or not target.exists():
            failure = explain_failure("SPICE", done.returncode, done.stderr, done.stdout)
            if isinstance(failure, ProcessLostError):
                raise failure
            return not_computed("SPICE", n, str(failure))
        try:
            items = json.loads(target.read_text(encoding="utf-8"))
            values = {str(item["image_id"]): float(item["scores"]["All"]["f"]) for item in items}
        except (OSError, ValueError, TypeError, KeyError):
            return not_computed("SPICE", n, f"SPICE failed: its output is not a list of scores ({reason})")
    if values.keys() != candidates.keys() or not all(map(math.isfinite, values.values())):
        return not_computed("SPICE", n, "SPICE failed: it did not score every caption")
    return mean_score("SPICE", [values[i] for i in candidates], list(candidates))


def note_language(score: Score, language: str) -> Score:
    """Return the score with a note if its rules are those of another language than the references'."""
    # `en-US` is English as well: the part before the hyphen is the language.
    if language.partition("-")[0] == "en" or score.value is None:
        return score
    by_metric = {"METEOR": "METEOR's English stems, synonyms and function words", "SPICE": "SPICE's English parser"}
    rules = by_metric.get(score.metric, "the Penn Treebank tokenizer's English rules")
    which = "of unknown language" if language == "unknown" else f"in {language}"
    return replace(score, note="; ".join(filter(None, (score.note, f"{rules} for references {which}"))))


def human_agreement(references: Mapping[str, Sequence[str]]) -> CaptionSet | None:
    """Return each image's last reference as the candidate, with the others as references.

    None if an image has fewer than two. One reference fewer than a model is scored with, so people score a little low.
    """
    if not references or any(len(captions) < 2 for captions in references.values()):
        return None
    return CaptionSet(
        candidates={i: captions[-1] for i, captions in references.items()},
        references={i: captions[:-1] for i, captions in references.items()},
    )


def constant_caption(train: Sequence[str]) -> str:
    """Return the most common training caption, ignoring case and spacing; empty without captions.

    Ties go to the caption with the most common words, then to the first by text.
    """
    # How often each caption occurs, and in how many captions each word does.
    counts: dict[str, int] = {}
    words: dict[str, int] = {}
    for text in train:
        caption = " ".join(text.lower().split())
        counts[caption] = counts.get(caption, 0) + 1
        for word in set(caption.split()):
            words[word] = words.get(word, 0) + 1

    def word_frequency(caption: str) -> float:
        caption_words = caption.split()
        return sum(words[word] for word in caption_words) / max(len(caption_words), 1)

    return min(counts, key=lambda caption: (-counts[caption], -word_frequency(caption), caption), default="")


def score_faithfulness(
    captions: Mapping[str, str], scenes: Mapping[str, dict[str, Any]]
) -> tuple[list[Score], dict[str, bool]]:
    """Score captions of synthetic scenes: the share that is true, the share that can be checked, and the share of the
    scene's facts that true claims state.

    Args:
        captions: image id -> caption.
        scenes: image id -> a line of truth.jsonl; images without one are left out.

    Returns:
        The scores, and image id -> whether its caption is true.
    """
    from vlp_models.synthetic.scenes.language import check

    ids = [image_id for image_id in captions if image_id in scenes]
    verdicts = [check(captions[image_id], scenes[image_id]) for image_id in ids]
    # A caption that cannot be checked (None) counts as not true.
    true = [verdict.true is True for verdict in verdicts]
    scores = [
        mean_score("faithful captions", [float(value) for value in true], ids),
        mean_score("checkable captions", [float(verdict.true is not None) for verdict in verdicts], ids),
        mean_score("scene facts stated", [verdict.informative for verdict in verdicts], ids),
    ]
    return scores, dict(zip(ids, true, strict=True))
