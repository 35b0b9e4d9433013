"""augment NAME: a captioner describes training images, for a fine-tuning to learn from besides (XGPT, section 6.1).

The paper writes 62,000 captions of Flickr30k's training images, two or so of each, and fine-tunes a retrieval model
further on the union; how they were drawn, it does not say. Here they are sampled; those that repeat a reference or each
other, never ended or have a special word such as [UNK] inside are dropped, and of the rest the likeliest by token are
kept. 62,000 is also twice the number of all images of Flickr30k: so here images of other splits are refused.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import output_directory
from vlp_models.common.workspace import Workspace, record_timing, require_output, write_manifest
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import AugmentParams, Params, to_plain
from vlp_models.params.schema import nearest

if TYPE_CHECKING:
    import pyarrow as pa

    from vlp_models.data.sample import Sample
    from vlp_models.models.decoding.search import Hypothesis
    from vlp_models.tasks.base import TaskModel

# A text that was drawn repeats another, says nothing, never ended, or has a special word inside.
WHY_NOT = ("repeated", "empty", "unfinished", "special")


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Writes data/augmented/KEY: `captions.parquet`, a canonical table of captions, and a manifest.

    Raises:
        ParamsError: no such entry.
        DataError: a training image is, by its id or its content, an image of another split; there is none at all; or an
            input is missing.
        CheckpointError: the captioner is damaged, or was made from other features or another vocabulary.
    """
    from vlp_models.common.device import pick_device
    from vlp_models.data.shards.dataset import ShardDataset
    from vlp_models.data.tables import read_table, write_table
    from vlp_models.pipeline.training_job import check_same_data, read_inputs, stage_of
    from vlp_models.tasks.base import load_task_model

    if key not in params.augment:
        raise ParamsError(f"params.yaml: no entry `augment.{key}`{nearest(key, params.augment)}")
    p = params.augment[key]
    with record_timing(workspace, f"augment@{key}"):
        inputs = read_inputs(workspace)
        directory = require_output(workspace.checkpoint(p.start), stage_of(p.start))
        allowed = training_images(read_table("images", require_output(workspace.validated, "validate")), p.sources)
        captioner = load_task_model(
            directory, device=pick_device(params.trainer.accelerator, params.trainer.torch_threads)
        )
        check_same_data(captioner.info, directory, inputs)
        sources = dict.fromkeys(p.sources, 1)
        dataset = ShardDataset(inputs.shards, "train", "images", sources, **captioner.reader.flags)
        if strangers := set(dataset.image_ids()) - allowed:
            raise DataError(
                f"{inputs.shards}: {len(strangers):,} images of its train split are none of the validated tables', "
                f"such as {min(strangers)}; `dvc repro shards` makes them anew"
            )
        rows: list[dict[str, object]] = []
        counts = Counter(dict.fromkeys(("images", "captions", *WHY_NOT), 0))
        for number, samples in enumerate(_chunks(dataset, p.batch_size)):
            for sample, drawn in zip(samples, draw(captioner, samples, p, number), strict=True):
                kept, why_not = choose(captioner, drawn, sample["captions"], p)
                rows += [
                    {
                        "caption_id": f"{sample.image_id}/augment-{key}-{place}",
                        "image_id": sample.image_id,
                        "text": text,
                        "provenance": f"augment {key}: {p.start}",
                    }
                    for place, text in enumerate(kept)
                ]
                counts.update(why_not, images=1, captions=len(kept))
        if not rows:
            raise DataError(
                f"augment {key}: {p.start} wrote nothing new of {counts['images']:,} training images; raise `samples`, "
                "or "
                "a higher `temperature`, would"
            )
        with output_directory(workspace.augmented(key)) as output:
            write_table(rows, "captions", output)
            write_manifest(output, stage=f"augment@{key}", params=to_plain(p), counts=dict(counts))
    print(f"augment {key}: {counts['captions']:,} captions of {counts['images']:,} training images, by {p.start}")


def training_images(images: pa.Table, sources: Sequence[str]) -> set[str]:
    """The ids of the training images of these datasets (none: of all).

    Raises:
        DataError: one of them is, by its id or by its file's content, in another split of any dataset.
    """
    from vlp_models.data.shards.dataset import refuse_evaluation_images

    rows = images.select(["image_id", "source", "split", "sha256"]).to_pylist()
    chosen = [row for row in rows if row["split"] == "train" and (not sources or row["source"] in sources)]
    if not chosen:
        raise DataError(f"augment: there are no training images of {', '.join(sources) or 'any dataset'}")
    for split in sorted({row["split"] for row in rows} - {"train"}):
        others = [row for row in rows if row["split"] == split]
        ids, contents = {row["image_id"] for row in others}, {row["sha256"] for row in others if row["sha256"]}
        known = {row["image_id"] for row in chosen if row["image_id"] in ids or row["sha256"] in contents}
        refuse_evaluation_images(known, "augment would write captions", split)
    return {row["image_id"] for row in chosen}


def draw(captioner: TaskModel, samples: Sequence[Sample], p: AugmentParams, number: int) -> list[list[Hypothesis]]:
    """`p.samples` captions of each image; chance is a function of the seed and the batch's number."""
    import numpy as np
    import torch

    from vlp_models.models.decoding.sampling import sample

    model: Any = captioner.model
    image: Any = captioner.reader.image(samples)
    seed = int(np.random.SeedSequence([p.seed, number]).generate_state(1, np.uint64)[0]) >> 1
    return sample(
        model,
        image.to(next(captioner.parameters()).device),
        max_len=p.max_caption_len,
        bos_id=captioner.tokenizer.cls_id,
        eos_id=captioner.tokenizer.sep_id,
        num_samples=p.samples,
        generator=torch.Generator().manual_seed(seed),
        temperature=p.temperature,
        top_p=p.top_p,
    )


def choose(
    captioner: TaskModel, drawn: Sequence[Hypothesis], references: Sequence[str], p: AugmentParams
) -> tuple[list[str], Counter[str]]:
    """The likeliest `p.captions` texts by token that are new, and how many of those drawn were dropped, by `WHY_NOT`.

    Two texts are one if their words are, whatever their capitals and spaces.
    """
    tokenizer = captioner.tokenizer
    seen = {tuple(tokenizer.split(text)) for text in references}
    special = set(tokenizer.special_ids)
    kept: list[str] = []
    why_not: Counter[str] = Counter()
    for hypothesis in sorted(drawn, key=lambda h: -h.score / (len(h.ids) + 1)):
        text = tokenizer.decode(hypothesis.ids)
        words = tuple(tokenizer.split(text))
        if len(hypothesis.ids) >= p.max_caption_len:  # no place was left for [SEP]: a sentence that broke off
            why_not["unfinished"] += 1
        elif special.intersection(hypothesis.ids):  # decoding leaves it out, and with it a word
            why_not["special"] += 1
        elif not words:
            why_not["empty"] += 1
        elif words in seen:
            why_not["repeated"] += 1
        else:
            seen.add(words)
            if len(kept) < p.captions:
                kept.append(text)
    return kept, why_not


def _chunks(dataset: Any, size: int) -> Iterator[list[Sample]]:
    from rich.console import Console
    from rich.progress import track

    starts = range(0, len(dataset), size)
    console = Console(stderr=True)
    for start in track(starts, "augment", console=console, disable=not sys.stderr.isatty(), transient=True):
        yield dataset.__getitems__(range(start, min(start + size, len(dataset))))
