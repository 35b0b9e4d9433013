"""The images as vectors: the mean of the project's region features, and embeddings by a model with two towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vlp_models.common.progress import progress_bar
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.contrib.audit.pairs import Pairs
from vlp_models.data.features import FeatureStore
from vlp_models.data.inputs import InputReader
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import SPLITS
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError, ParamsError
from vlp_models.models.checkpoint import build_from_config, load_checkpoint_weights, part_of, read_config, read_weights
from vlp_models.models.protocols import Embeds
from vlp_models.params import Params, split_start
from vlp_models.params.schema import suggestion
from vlp_models.pipeline.prepared_data import stage_of
from vlp_models.tasks.base import implements

AT_ONCE = 32  # images, or captions, per forward pass
LONGEST = 64  # tokens of a caption, for a model without a limit
Vectors = NDArray[np.float32]


def mean_features(workspace: Workspace, image_ids: Sequence[str], *, needed: bool = True) -> Vectors:
    """Return the mean of each image's region features, [I, F]; NaN for an image without regions.

    Raises:
        DataError: there are no features, and they are needed; otherwise no column is returned.
    """
    if not (workspace.features / "manifest.json").exists():
        if not needed:
            return np.zeros((len(image_ids), 0), np.float32)
        raise DataError(
            f"{workspace.features}: not found, so images have no vectors; run `dvc repro features`, or, if no model "
            "reads regions, give a model with two towers: --tower finetune/RUN"
        )
    store = FeatureStore(workspace.features)
    vectors = np.full((len(image_ids), store.feature_dim), np.nan, np.float32)
    with progress_bar("audit: image features", len(image_ids), "images") as bar:
        for row, image_id in enumerate(image_ids):
            if image_id in store and len(regions := store.get(image_id)):
                vectors[row] = regions.features.astype(np.float32).mean(0)
            bar.advance()
    return vectors


def resolve_tower(name: str, params: Params) -> str:
    """Return the checkpoint of `--tower`: `finetune/RUN`, `pretrain/RUN`, or a name of `models`, before any training.

    Raises:
        ParamsError: params.yaml has no such run or model.
    """
    kind, run = split_start(name)
    if not kind:
        kind, run = "initial", name
    of_kinds: dict[str, Any] = {"initial": params.models, "pretrain": params.pretrain, "finetune": params.finetune}
    if run not in of_kinds[kind]:
        raise ParamsError(f"vlp audit: --tower {name}: not in params.yaml{suggestion(run, of_kinds[kind])}")
    return f"{kind}/{run}"


@torch.no_grad()
def embed(workspace: Workspace, checkpoint: str, pairs: Pairs, device: str = "cpu") -> tuple[Vectors, Vectors]:
    """Return the embeddings of the images [I, E] (NaN for an image that is not in the shards) and captions [P, E].

    Raises:
        CheckpointError: damaged, of other region features than the shards, or a model that does not embed images and
            texts separately.
        DataError: no such checkpoint, or no image is in the shards.
    """
    directory = require_output(workspace.checkpoint(checkpoint), stage_of(checkpoint))
    shards = require_output(workspace.shards, "shards")
    info, tokenizer = read_config(directory), Tokenizer.load(directory)
    model: Any = build_from_config(info, tokenizer, directory)
    if not implements(model, Embeds):
        raise CheckpointError(
            f"{directory}: the model `{info.name}` ({info.family}) does not embed images and texts separately; "
            "--tower needs one that does, such as a run of the task retrieval by tden or vlmo"
        )
    weights = read_weights(directory)
    load_checkpoint_weights(model, part_of(weights, "model") if info.task else weights, directory)
    model.to(device).eval()
    length = info.max_text_len or LONGEST
    reader = InputReader(model.inputs, tokenizer, max_text_len=length, max_regions=info.max_regions)
    row_of = {image_id: row for row, image_id in enumerate(pairs.image_ids)}
    rows: list[int] = []
    blocks: list[Vectors] = []
    with progress_bar("audit: embedding", len(row_of) + len(pairs.texts), "images and captions") as bar:
        for split in [split for split in SPLITS if split in pairs.splits]:
            dataset = ShardDataset(shards, split, "images", **reader.flags)
            if info.detector_id and info.detector_id != dataset.manifest.detector_id:
                raise CheckpointError(f"{directory}: made from other region features than {shards}; run `vlp run`")
            # positions in the shards of the images that are audited
            audited = [(at, row_of[name]) for at, name in enumerate(dataset.image_ids()) if name in row_of]
            for start in range(0, len(audited), AT_ONCE):
                positions, block_rows = zip(*audited[start : start + AT_ONCE], strict=True)
                batch = reader.collate(dataset.__getitems__(list(positions))).to(device)
                blocks.append(model.embed_image(batch.image).float().cpu().numpy())
                rows += block_rows
                bar.advance(by=len(block_rows))
        if not blocks:
            raise DataError(f"{shards}: no image of the audited datasets; run `dvc repro shards`")
        images = np.full((len(row_of), blocks[0].shape[1]), np.nan, np.float32)
        images[rows] = np.concatenate(blocks)
        texts = np.zeros((len(pairs.texts), images.shape[1]), np.float32)
        for start in range(0, len(texts), AT_ONCE):
            tokens = tokenizer.encode_batch(pairs.texts[start : start + AT_ONCE], length).to(device)
            texts[start : start + AT_ONCE] = model.embed_text(tokens).float().cpu().numpy()
            bar.advance(by=min(AT_ONCE, len(texts) - start))
    return images, texts
