"""A vocabulary that keeps the words of the captions, chosen by `vlp use`.

The presets for photos have the vocabulary of an English BERT. If the captions of a listing (format pairs) would lose
their marks or letters in it, by the measure of the stage `tokenizer`, the preset own-vocabulary is applied as well.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

from vlp_models.cli.presets import Overlay, find_preset, merge_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.data.formats import pairs, source_params
from vlp_models.data.formats.base import Tables, get_sentence
from vlp_models.errors import ParamsError, VLPError
from vlp_models.metrics.bootstrap import MIN_GROUPS
from vlp_models.params import Params
from vlp_models.params.load import read_plain, read_yaml_text
from vlp_models.pipeline.stages.tokenizer import SAMPLE, decoded_share, make_tokenizer

OWN_VOCABULARY = "own-vocabulary"  # a preset
MAX_ROWS = 100_000  # read from the start of each dataset; `SAMPLE` of their captions are encoded and decoded


def choose_vocabulary(params_file: Path, preset: Path, assignments: list[str], merged: Overlay) -> list[Path]:
    """Return the preset own-vocabulary if the captions need it; nothing if they are missing, or --set chooses one.

    Args:
        preset: the preset that is applied, with `assignments`. merged: the result.
    """
    tokenizer = read_plain(read_yaml_text(preset), preset).get("tokenizer") or {}
    if tokenizer.get("source") != "vocab" or any(text.startswith("tokenizer") for text in assignments):
        return []
    reason = ""
    with suppress(VLPError):  # the stages report what is wrong with a listing, or that a package is not installed
        reason = find_loss(merged.params, Workspace(params_file.parent))
    if not reason:
        return []
    path = find_preset(OWN_VOCABULARY)
    try:
        merge_overlay(params_file, preset, assignments, [path])
    except ParamsError:  # another model's weights need the vocabulary
        return []
    print(
        f"{reason}; so `{OWN_VOCABULARY}` is applied as well: the vocabulary is built from the captions, and the "
        "weights and the retrieval that depend on the other one are removed",
        file=sys.stderr,
    )
    return [path]


def find_loss(params: Params, workspace: Workspace) -> str:
    """Return which captions lose more in the vocabulary of params.yaml than the stage `tokenizer` accepts, or nothing.

    Raises:
        VLPError: a listing or the vocabulary cannot be read.
    """
    # `trim` needs all texts, and leaves the pieces of these as they are.
    tokenizer = make_tokenizer(replace(params.tokenizer, trim=False), [], workspace)
    for name, texts in _sample_captions(params, workspace).items():
        share, example = decoded_share(tokenizer, texts)
        if share < params.tokenizer.min_decoded_share:
            return (
                f"data.{name}: with the vocabulary {params.tokenizer.vocab} captions keep {share}% of their CIDEr-D "
                f"when encoded and decoded, such as {example}"
            )
    return ""


def _sample_captions(params: Params, workspace: Workspace) -> dict[str, Sequence[str]]:
    """Return dataset -> at most `SAMPLE` captions, evenly spread; those of a language also as `DATASET (LANGUAGE)`.

    A language with fewer than `MIN_GROUPS` captions is left out.
    """
    samples: dict[str, Sequence[str]] = {}
    for name, source in params.data.items():
        if source.format != "pairs" or (params.tokenizer.sources and name not in params.tokenizer.sources):
            continue
        captions: dict[str, list[str]] = defaultdict(list)
        listing = cast(pairs.PairsParams, source_params(name, source))
        for language, text in islice(_read_captions(listing, workspace.root / source.root), MAX_ROWS):
            captions[name].append(text)
            if language:
                captions[f"{name} ({language})"].append(text)
        for key, texts in captions.items():
            if key == name or len(texts) >= MIN_GROUPS:
                samples[key] = texts[:: -(-len(texts) // SAMPLE)]
    return samples


def _read_captions(listing: pairs.PairsParams, root: Path) -> Iterator[tuple[str, str]]:
    """Yield the language, empty if none is named, and the text of each caption."""
    tables = Tables()
    for path in sorted(root.glob(listing.pairs) if "*" in listing.pairs else [root / listing.pairs]):
        for provenance, record in pairs.read_pairs(path, tables):
            # an unreadable row is one of quarantine, as in the stage `prepare`
            with tables.record("captions", provenance):
                yield pairs.read_language(record), get_sentence(record, "caption")
