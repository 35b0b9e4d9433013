"""augment NAME: a captioning model writes captions of training images, as extra fine-tuning data (XGPT, section 6.1).

The paper generates 62,000 captions of Flickr30k's training images, about two per image, and continues fine-tuning a
retrieval model on the union; it does not state the decoding method. Here captions are sampled. Those that repeat a
reference or each other, never end or contain a special token such as [UNK] are dropped, and the rest with the highest
probability per token are kept. 62,000 is also twice the number of all images of Flickr30k, so images of other splits
are refused here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import output_directory
from vlp_models.common.log import get_logger
from vlp_models.common.progress import progress_bar
from vlp_models.common.workspace import Workspace, require_output, write_manifest
from vlp_models.errors import DataError, ParamsError
from vlp_models.params import AugmentParams, Params, to_plain
from vlp_models.params.schema import suggestion

if TYPE_CHECKING:
    import pyarrow as pa

    from vlp_models.data.sample import Sample
    from vlp_models.models.decoding.search import Hypothesis
    from vlp_models.tasks.base import TaskModel

logger = get_logger(__name__)

REASONS = ("repeated", "empty", "unfinished", "special")  # for which a sampled caption is dropped


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write data/augmented/KEY: `captions.parquet`, a canonical table of captions, and a manifest.

    Raises:
        ParamsError: no such entry.
        DataError: a training image is also in another split, by its id or its content; there are no training images; or
            an input is missing.
        CheckpointError: the captioner is damaged, or was made from other features or with another vocabulary.
    """
    from vlp_models.common.device import pick_device
    from vlp_models.data.shards.dataset import ShardDataset
    from vlp_models.data.tables import read_table, write_table
    from vlp_models.pipeline.prepared_data import PreparedData, stage_of
    from vlp_models.tasks.base import load_task_model

    if key not in params.augment:
        raise ParamsError(f"params.yaml: no entry `augment.{key}`{suggestion(key, params.augment)}")
    p = params.augment[key]
    data = PreparedData.load(workspace)
    checkpoint = require_output(workspace.checkpoint(p.start), stage_of(p.start))
    # Captions of an image that is also tested would train on the test.
    allowed = training_images(read_table("images", require_output(workspace.validated, "validate")), p.sources)
    captioner = load_task_model(
        checkpoint, device=pick_device(params.trainer.accelerator, params.trainer.torch_threads)
    )
    data.check_compatible(captioner.info, checkpoint)
    sources = dict.fromkeys(p.sources, 1)
    dataset = ShardDataset(data.shards, "train", "images", sources, **captioner.reader.flags)
    if unknown := set(dataset.image_ids()) - allowed:
        raise DataError(
            f"{data.shards}: {len(unknown):,} images of the train split are not in the validated tables, such as "
            f"{min(unknown)}; run `dvc repro shards`"
        )
    rows: list[dict[str, object]] = []
    # Each reason is in the manifest, also one that did not occur.
    counts = Counter(dict.fromkeys(("images", "captions", *REASONS), 0))
    starts = range(0, len(dataset), p.batch_size)  # the number of a batch seeds its draws
    with progress_bar(f"augment {key}", len(dataset), "images") as bar:
        for number, start in enumerate(starts):
            samples = [dataset[i] for i in range(start, min(start + p.batch_size, len(dataset)))]
            for sample, hypotheses in zip(samples, draw(captioner, samples, p, number), strict=True):
                texts, dropped = choose(captioner, hypotheses, sample["captions"], p)
                rows += [
                    {
                        "caption_id": f"{sample.image_id}/augment-{key}-{i}",
                        "image_id": sample.image_id,
                        "text": text,
                        "provenance": f"augment {key}: {p.start}",
                    }
                    for i, text in enumerate(texts)
                ]
                counts.update(dropped, images=1, captions=len(texts))
            bar.advance(by=len(samples))
    if not rows:
        raise DataError(
            f"augment {key}: {p.start} wrote no new caption of {counts['images']:,} training images; raise "
            "`samples` or `temperature`"
        )
    with output_directory(workspace.augmented(key)) as output:
        write_table(rows, "captions", output)
        write_manifest(output, stage=f"augment@{key}", params=to_plain(p), counts=dict(counts))
    captions, images = f"{counts['captions']:,}", f"{counts['images']:,}"
    logger.info("augment %s: %s captions of %s training images, by %s", key, captions, images, p.start)


def training_images(images: pa.Table, sources: Sequence[str]) -> set[str]:
    """Return the ids of the training images of these datasets (empty: of all).

    Raises:
        DataError: there are none, or one of them is in another split of any dataset, by its id or its file's content.
    """
    from vlp_models.contrib.augment.samples import refuse_evaluation_images

    rows = images.select(["image_id", "source", "split", "sha256"]).to_pylist()
    train = [row for row in rows if row["split"] == "train" and (not sources or row["source"] in sources)]
    if not train:
        raise DataError(f"augment: no training images in {', '.join(sources) or 'any dataset'}")
    for split in sorted({row["split"] for row in rows} - {"train"}):
        of_split = [row for row in rows if row["split"] == split]
        ids = {row["image_id"] for row in of_split}
        contents = {row["sha256"] for row in of_split if row["sha256"]}
        in_both = {row["image_id"] for row in train if row["image_id"] in ids or row["sha256"] in contents}
        refuse_evaluation_images(in_both, "augment would write captions", split)
    return {row["image_id"] for row in train}


def draw(captioner: TaskModel, samples: Sequence[Sample], p: AugmentParams, number: int) -> list[list[Hypothesis]]:
    """Sample `p.samples` captions of each image; the random state depends on the seed and the batch's number only."""
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
    captioner: TaskModel, hypotheses: Sequence[Hypothesis], references: Sequence[str], p: AugmentParams
) -> tuple[list[str], Counter[str]]:
    """Return the `p.captions` new texts with the highest probability per token, and how many were dropped by reason.

    Two texts with the same words are the same text, whatever their capitals and spaces.
    """
    tokenizer = captioner.tokenizer
    # a text is the tuple of its words
    earlier = {tuple(tokenizer.split(text)) for text in references}
    special = set(tokenizer.special_ids)
    texts: list[str] = []
    dropped: Counter[str] = Counter()
    # the [SEP] of each counts as a token
    for hypothesis in sorted(hypotheses, key=lambda h: -h.score / (len(h.ids) + 1)):
        text = tokenizer.decode(hypothesis.ids)
        words = tuple(tokenizer.split(text))
        if len(hypothesis.ids) >= p.max_caption_len:  # no position was left for [SEP]: an unfinished sentence
            dropped["unfinished"] += 1
        elif special.intersection(hypothesis.ids):  # `decode` skips special tokens, so a word would be missing
            dropped["special"] += 1
        elif not words:
            dropped["empty"] += 1
        elif words in earlier:
            dropped["repeated"] += 1
        else:
            earlier.add(words)
            if len(texts) < p.captions:
                texts.append(text)
    return texts, dropped
