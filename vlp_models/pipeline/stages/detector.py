"""detector: make the model that turns pixels into regions.

With `features.source: timm` it is a backbone, as with a source of contrib that has a section `features.SOURCE`.
Otherwise `detector.source: none` is for imported features and symbols, and contrib/detector has `train`, on the boxes
of the train split, and `weights`, a file or torchvision's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlp_models.common.io import output_directory, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace, write_manifest
from vlp_models.errors import ParamsError
from vlp_models.params import Params, TimmParams, to_plain
from vlp_models.params.schema import check_known
from vlp_models.vision import DETECTORS

logger = get_logger(__name__)

Report = dict[str, Any]


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write data/detector and reports/detector.json.

    Raises:
        MissingToolError: the package of the weights is not installed.
        DataError: `validate` has not run; or `source: train` without any box in the train split.
        CheckpointError: the weights of `source: weights` or of a backbone are missing or have another architecture.
        ParamsError: an unknown dataset in `sources`, a missing path, or an invalid number.
        NonFiniteLossError: the training diverged.
    """
    p, backbone = params.detector, params.features.backbone
    unknown = [name for name in p.sources if name not in params.data]
    if unknown and backbone is None:
        raise ParamsError(
            f"params.yaml: `detector.sources` names {', '.join(unknown)}; data has {', '.join(params.data)}"
        )
    # a backbone, the record that there is no detector, or a detector with its classes
    with output_directory(workspace.detector) as directory:
        source = p.source if backbone is None else params.features.source
        if source == "timm":
            report: Report = _make_backbone(backbone, workspace, directory)
        elif source == "none":
            from vlp_models.vision.saved_network import save_no_detector

            report = {"detector_id": save_no_detector(directory, {"source": "none"}), "source": "none"}
        else:
            check_known(source, DETECTORS, "detector.source")
            report = import_target(DETECTORS[source])(params, workspace, directory)
        write_manifest(
            directory,
            stage="detector",
            params=to_plain(p if backbone is None else backbone),
            counts=report.get("counts", {}),
            detector_id=report["detector_id"],
        )
    write_json(workspace.reports / "detector.json", report)
    _log(report)


def _make_backbone(p: TimmParams, workspace: Workspace, directory: Path) -> Report:
    from vlp_models.vision.timm_backbone import make_backbone, save_backbone

    backbone = make_backbone(p, workspace.root)
    config = backbone.model.config
    identity = save_backbone(directory, backbone, {"source": "timm", "weights": p.weights})
    parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
    counts = {"classes": config.num_classes, "parameters": parameters, "feature_dim": config.feature_dim}
    return {"source": "timm", "backbone": config.model, "detector_id": identity, "counts": counts}


def _log(report: Report) -> None:
    counts, parts = report.get("counts", {}), [report["source"]]
    if report["source"] == "timm":
        parts += [f"{report['backbone']} with {counts['parameters']:,} parameters", f"{counts['classes']:,} classes"]
    if "seconds" in report:
        parts += [
            f"{counts['train_images']:,} images, {counts['classes']} classes",
            f"{report['seconds']:.0f} s at {report['images_per_second']:.0f} images/s",
        ]
    if "val" in report:
        parts.append("val " + " ".join(f"{name} {value:.1f}" for name, value in report["val"].items()))
    elif "note" in report:
        parts.append(report["note"])
    logger.info("detector %s: %s", report["detector_id"], ", ".join(parts))
