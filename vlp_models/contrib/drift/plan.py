"""What drift adds to dvc.yaml and to the unattended flow."""

from __future__ import annotations

from pathlib import Path

from vlp_models.contrib.drift.params import TRAINING_STATS, DriftParams
from vlp_models.flows.parts import Part, hash_values, read_record
from vlp_models.params import Params, to_plain
from vlp_models.pipeline.dvc.dvc_yaml import Stage
from vlp_models.pipeline.dvc.graph import Context, code

NOTHING_NEW = "no new data, or no training to compare it with"


def training_stats(c: Context) -> Stage | None:
    checkpoint = c.params.statistics_run()
    if not checkpoint:
        return None
    kind, run = checkpoint.split("/")
    return {
        "desc": "statistics of a model's training data, for `vlp drift`",
        "cmd": "vlp stage training_stats",
        "params": [f"{kind}.{run}", *c.keys(f"defaults.{kind}", "drift.run", "ingest.dataset")],
        "deps": [
            f"checkpoints/{checkpoint}",
            "data/validated",
            *(["data/features"] if c.regions else []),
            "data/tokenizer",
            code("stages", "training_stats"),
            code("views", "captions"),
        ],
        "outs": [TRAINING_STATS],
    }


def drift_part(params: Params) -> Part:
    """Return the flow's part that measures the drift of what `vlp ingest` has added."""

    def evidence(root: Path) -> str | None:
        # A drift that closed the gate is not recorded, so it is measured again even without new data.
        file = root / "reports" / "ingest.json"
        if not file.exists() or not (root / TRAINING_STATS).exists():
            return None
        content = read_record(file).get("content")
        # `content` is a hash of the batches; without any, the command always runs.
        return hash_values(content, to_plain(params.section(DriftParams))) if content else ""

    return Part(name="drift", kind="drift", command=("drift",), evidence=evidence, nothing=NOTHING_NEW)
