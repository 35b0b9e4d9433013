"""What drift adds to dvc.yaml and to the unattended flow."""

from __future__ import annotations

from pathlib import Path

from vlp_models.contrib.drift.params import DriftParams
from vlp_models.flows.parts import Part, hash_values, read_record
from vlp_models.params import Params, to_plain
from vlp_models.pipeline.dvc.dvc_yaml import Stage
from vlp_models.pipeline.dvc.graph import Context, code


def training_stats(c: Context) -> Stage | None:
    run = c.params.statistics_run()
    if not run:
        return None
    return {
        "desc": "statistics of a model's training data, for `vlp drift`",
        "cmd": "vlp stage training_stats",
        "params": [f"pretrain.{run}", *c.keys("defaults.pretrain", "drift.run", "ingest.dataset")],
        "deps": [
            f"checkpoints/pretrain/{run}",
            "data/validated",
            *(["data/features"] if c.regions else []),
            "data/tokenizer",
            code("stages", "training_stats"),
            code("views", "captions"),
        ],
        "outs": ["data/training_stats.json"],
    }


def drift_part(params: Params) -> Part:
    """Return the flow's part that measures the drift of what `vlp ingest` has added."""

    def evidence(root: Path) -> str | None:
        # A drift that closed the gate is not recorded, so it is measured again even without new data.
        file = root / "reports" / "ingest.json"
        if not file.exists():
            return None
        content = read_record(file).get("content")
        # `content` is a hash of the batches; without any, the command always runs.
        return hash_values(content, to_plain(params.section(DriftParams))) if content else ""

    return Part(name="drift", kind="drift", command=("drift",), evidence=evidence, nothing="no new data")
