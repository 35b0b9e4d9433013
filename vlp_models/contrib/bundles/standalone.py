"""Bundles that predict by themselves: `vlp pack --standalone` adds the run's weights and its test data.

The members have the paths that they have in a project:

    checkpoints/finetune/RUN/    the checkpoint, with `rounded.safetensors` in place of its weights
    data/shards/                 index and shards (.tar.xz) of the last evaluated split; no training sample
    data/validated/              rows of its images: hashes, and what the metrics read

Float32 weights hardly compress. Matrices are rounded to integers, which do, and `pack` takes the fewest levels that
change no prediction and no score. Probabilities change in their last digits and are not compared.

Shape suffixes: O outputs (rows of a matrix), N weights per row.
"""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors.torch import load, save, save_file
from torch import Tensor

from vlp_models.common.checksums import SUMS
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.bundles.run_bundle import MAX_BYTES
from vlp_models.data.shards.write import index_name
from vlp_models.data.tables import LANGUAGES, read_rows, read_rows_of
from vlp_models.errors import DataError
from vlp_models.models.checkpoint import WEIGHTS, read_weights

ROUNDED = "rounded.safetensors"
XZ = ".xz"
LEVELS = [round(127 * 2 ** (step / 4)) for step in range(33)]  # largest integer of a row: 8 to 16 bits
LOW, HIGH, SCALE = "low.", "high.", "scale."  # before the name of a rounded matrix; the file is sorted by them


def round_weights(weights: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Return weights whose matrices are integers from -levels to levels, with a float32 scale per row.

    The bytes of the integers are apart, because the high ones have few different values and compress well.
    """
    rounded: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.ndim < 2 or tensor.dtype != torch.float32:
            rounded[name] = tensor
            continue
        rows_ON = tensor.flatten(1)
        # The largest weight of a row becomes the largest integer; the clamp avoids a division by 0.
        scale_O = (rows_ON.abs().amax(dim=1) / levels).clamp_min(1e-12)
        integers = (rows_ON / scale_O[:, None]).round().to(torch.int16).view(tensor.shape)
        rounded[f"{LOW}{name}"] = (integers & 255).to(torch.uint8)
        rounded[f"{HIGH}{name}"] = (integers >> 8).to(torch.int8)
        rounded[f"{SCALE}{name}"] = scale_O
    return rounded


def restore_weights(rounded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float32 weights from those of `round_weights`."""
    weights: dict[str, Tensor] = {}
    for name, tensor in rounded.items():
        if name.startswith(SCALE):
            matrix = name.removeprefix(SCALE)
            low, high = rounded[f"{LOW}{matrix}"], rounded[f"{HIGH}{matrix}"]
            rows_ON = (high.float() * 256 + low).flatten(1) * tensor[:, None]
            weights[matrix] = rows_ON.view(low.shape)
        elif not name.startswith((LOW, HIGH)):
            weights[name] = tensor
    return weights


def pack_weights(checkpoint: Path, levels: int) -> bytes:
    return save(round_weights(read_weights(checkpoint), levels))


def pack_inputs(workspace: Workspace, run: str, split: str) -> dict[str, bytes]:
    """Return the members of a standalone bundle other than the weights, with the test data of a split."""
    checkpoint, shards, validated = workspace.checkpoint(f"finetune/{run}"), workspace.shards, workspace.validated
    paths = [path for path in checkpoint.iterdir() if path.is_file() and path.name not in (WEIGHTS, SUMS)]
    paths += [shards / "manifest.json", shards / index_name(split)]
    files = {workspace.relative(path): path.read_bytes() for path in paths}
    for shard in shards.glob(f"{split}-*.tar"):
        # Many small files: the archive's deflate leaves a quarter more.
        files[f"{workspace.relative(shard)}{XZ}"] = lzma.compress(shard.read_bytes())
    # Evaluations look up training images, here none.
    train = shards / index_name("train")
    files.setdefault(workspace.relative(train), _parquet(pq.read_schema(train).empty_table()))
    images = read_rows("images", validated, lambda rows: pc.equal(rows["split"], split))
    files[workspace.relative(validated / "images.parquet")] = _parquet(images)
    ids = images["image_id"].combine_chunks()
    # scene graphs of synthetic datasets; languages of captions
    for name in ("truth.jsonl", LANGUAGES):
        if (validated / name).exists():
            files[workspace.relative(validated / name)] = _lines_of(set(ids.to_pylist()), validated / name)
    if (validated / LANGUAGES).exists():
        captions = read_rows_of(ids, "captions", validated)
        files[workspace.relative(validated / "captions.parquet")] = _parquet(captions)
    return files


def _parquet(rows: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="none")  # the archive compresses
    return buffer.getvalue()


def _lines_of(image_ids: Collection[str], path: Path) -> bytes:
    with path.open("rb") as lines:
        return b"".join(line for line in lines if json.loads(line)["image_id"] in image_ids)


def unpack(files: Mapping[str, bytes], workspace: Workspace, run: str) -> None:
    """Write the members of a standalone bundle to an empty workspace.

    Raises:
        DataError: weights or shards are damaged.
    """
    for name, content in files.items():
        if "/" in name:
            path = workspace.root / name.removesuffix(XZ)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_decompress(name, content) if name.endswith(XZ) else content)
    checkpoint = workspace.checkpoint(f"finetune/{run}")
    try:
        weights = restore_weights(load((checkpoint / ROUNDED).read_bytes()))
    except Exception as error:  # of safetensors, for each kind of damage another
        raise DataError(f"{workspace.relative(checkpoint / ROUNDED)}: not weights of a bundle: {error}") from None
    save_file(weights, checkpoint / WEIGHTS, metadata={"format": "pt"})


def _decompress(name: str, content: bytes) -> bytes:
    try:
        # A small file may expand to terabytes, so no more than the limit is unpacked.
        decompressor = lzma.LZMADecompressor()
        unpacked = decompressor.decompress(content, MAX_BYTES)
    except lzma.LZMAError as error:
        raise DataError(f"{name}: damaged: {error}") from None
    if not decompressor.eof:
        raise DataError(f"{name}: cut off, or larger than {MAX_BYTES >> 20} MiB")
    return unpacked


def drop_probabilities(value: Any) -> Any:
    """Return a prediction without its floating-point numbers, and without pairs of a name and such a number."""
    if isinstance(value, dict):
        return {name: drop_probabilities(entry) for name, entry in value.items() if type(entry) is not float}
    if isinstance(value, list):
        # [["blue", 0.93], ["black", 0.08]]: ranks of answers that are about equally likely may change
        return [drop_probabilities(entry) for entry in value if not _has_float(entry)]
    return value


def _has_float(value: Any) -> bool:
    return type(value) is float or (isinstance(value, list) and any(type(entry) is float for entry in value))
