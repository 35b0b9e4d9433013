"""The prepared data that every model is built for: shards and tokenizer, and whether a checkpoint matches them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vlp_models.common.log import get_logger
from vlp_models.common.workspace import Workspace, require_output
from vlp_models.data.inputs import RegionInput
from vlp_models.data.shards.dataset import ShardsManifest, read_manifest
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError
from vlp_models.models import DataFacts
from vlp_models.models.checkpoint import load_checkpoint_weights
from vlp_models.models.checkpoint_info import CheckpointInfo, describe_classes
from vlp_models.models.partial_load import load_partial
from vlp_models.models.protocols import LoadsPartially
from vlp_models.params import to_plain

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Shards and tokenizer of a workspace."""

    shards: Path
    manifest: ShardsManifest
    tokenizer_path: Path
    tokenizer: Tokenizer

    @classmethod
    def load(cls, workspace: Workspace) -> PreparedData:
        """
        Raises:
            DataError: `shards` or `tokenizer` has not run.
        """
        shards = require_output(workspace.shards, "shards")
        path = require_output(workspace.tokenizer, "tokenizer")
        return cls(shards=shards, manifest=read_manifest(shards), tokenizer_path=path, tokenizer=Tokenizer.load(path))

    @property
    def facts(self) -> DataFacts:
        """What a model's architecture depends on."""
        return DataFacts.of(self.tokenizer, self.manifest)

    def describe(
        self, model: nn.Module, *, family: str, name: str, max_text_len: int, max_regions: int, **more: Any
    ) -> CheckpointInfo:
        """Return the description that the checkpoint of a model trained on this data carries.

        Args:
            more: fields of a task (`task`, `options`, `blank_images`).
        """
        # models that read pixels do not depend on the detector
        regions = isinstance(model.inputs.image, RegionInput)  # type: ignore[union-attr]
        return CheckpointInfo(
            family=family,
            name=name,
            model_config=to_plain(model.config),
            max_text_len=max_text_len,
            max_regions=max_regions if regions else 0,
            detector_id=self.manifest.detector_id if regions else "",
            feature_dim=self.manifest.feature_dim if regions else 0,
            classes=self.manifest.classes if regions else (),
            **more,
        )

    def check_compatible(self, info: CheckpointInfo, checkpoint: Path, way_out: str = "run `dvc repro`") -> None:
        """
        Raises:
            CheckpointError: the checkpoint was made with other features, classes or another vocabulary.
        """
        manifest = self.manifest
        if info.detector_id:  # it reads regions
            if info.classes != tuple(manifest.classes):
                raise CheckpointError(
                    f"{checkpoint}: made from features with {describe_classes(info.classes)}, but the shards have "
                    f"another detector's or backbone's with {describe_classes(manifest.classes)}; {way_out}"
                )
            for name, current in (("detector_id", manifest.detector_id), ("feature_dim", manifest.feature_dim)):
                if getattr(info, name) != current:
                    raise CheckpointError(
                        f"{checkpoint}: made from features with {name} {getattr(info, name)!r}, but the shards have "
                        f"{current!r}; {way_out}"
                    )
        if not self.tokenizer.matches(Tokenizer.load(checkpoint)):
            raise CheckpointError(f"{checkpoint}: its vocabulary differs from data/tokenizer; {way_out}")


def stage_of(checkpoint: str) -> str:
    """Return the DVC stage that writes a checkpoint: `pretrain/tden` -> `pretrain@tden`."""
    return checkpoint.replace("/", "@", 1)


def load_start(model: nn.Module, info: CheckpointInfo, weights: Mapping[str, Tensor], checkpoint: Path) -> list[str]:
    """Load the weights of a checkpoint of the same family into `model`; for another config, load what fits.

    Returns:
        Lines on what was left out and what was not loaded, which are also logged; empty if everything was loaded.

    Raises:
        CheckpointError: the checkpoint is damaged, nothing fits, or a name or shape differs and the model does not
            support partial loading (`LoadsPartially`).
    """
    # Strict, with an error that lists all differences, unless the model accepts a part of the weights.
    if info.model_config == to_plain(model.config) or not isinstance(model, LoadsPartially):
        load_checkpoint_weights(model, weights, checkpoint)
        return []
    # another size: what fits is loaded, the rest is listed
    report = load_partial(model, weights, info.model_config)
    lines = [f"{checkpoint}: another architecture; loaded what fits"]
    lines += [f"  left out: {', '.join(report.left_out)}"] if report.left_out else []
    lines += [f"  not loaded: {', '.join(report.missing)}"] if report.missing else []
    for line in lines:
        logger.info("%s", line)
    return lines
