"""Are weights of 8 bits as good? An equivalence test before they are exported.

The version is evaluated on the project's test data with its own weights and with weights of 8 bits. Finding no
difference is not enough, since a small test finds none: the whole 95% interval of the paired difference must lie within
a margin (two one-sided tests at 2.5%; Schuirmann 1987). The margin is the metric's standard deviation over seeds:
another seed would change as much.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from vlp_models.common.checksums import SUMS, write_sums
from vlp_models.common.io import link_or_copy, scratch_directory, symlink_or_copy, write_json
from vlp_models.common.log import get_logger
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.int8.layers import quantize_linears
from vlp_models.errors import DataError
from vlp_models.metrics.bootstrap import MIN_GROUPS, interval, paired
from vlp_models.models.checkpoint import WEIGHTS, read_weights
from vlp_models.params import Params
from vlp_models.pipeline.reevaluate import reevaluate_bundle
from vlp_models.registry.promotion.gate import measure
from vlp_models.registry.promotion.gate_rule import gate_rule, gate_spec
from vlp_models.serving.bundle import CHECKPOINT, CODE, CONTENT, hash_files, read_bundle_info
from vlp_models.tasks.base import load_task_model
from vlp_models.tasks.scoring import read_item_scores

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """metric: with split. before, after: its values. low, high: 95% interval of after - before."""

    metric: str
    before: float
    after: float
    low: float
    high: float
    margin: float

    @property
    def shown(self) -> bool:
        return -self.margin < self.low and self.high < self.margin

    def __str__(self) -> str:
        values = f"{self.metric}: {self.after:.2f} with weights of 8 bits, {self.before:.2f} with float32"
        relation = "within" if self.shown else "not within"
        return f"{values}; 95% interval of the difference {self.low:.2f} to {self.high:.2f}, {relation} {self.margin:g}"


@contextmanager
def make_equivalent_bundle(
    params: Params, workspace: Workspace, bundle: Path, lineage: Mapping[str, Any], margin: float | None, name: str
) -> Iterator[tuple[Path, str]]:
    """Yield a bundle with weights of 8 bits that is as good, and a sentence with what the test found.

    Args:
        lineage: of the version. margin: None: the standard deviation over seeds, `promotion.tasks.TASK.seed_std`.
        name: of the version, for messages.

    Raises:
        DataError: the test did not show that it is as good, or cannot be made here.
    """
    with int8_bundle(bundle, workspace.root / ".work") as int8:
        compared = compare_bundles(params, workspace, bundle, int8, lineage, margin)
        if not compared.shown:
            raise DataError(f"{name}: not exported: {compared}; export it with float32, or pass a larger --margin")
        yield int8, str(compared)


@contextmanager
def int8_bundle(bundle: Path, work: Path) -> Iterator[Path]:
    """Yield a copy of a bundle whose linear layers have weights of 8 bits. work: where a temporary folder is made."""
    with scratch_directory(work / "int8") as folder:
        copy = folder / "artifacts" / "bundle"
        shutil.copytree(bundle, copy, copy_function=link_or_copy)
        # Next to `artifacts` the code that serves a version may be kept: the copy needs it as well.
        if (bundle.parents[1] / CODE).is_dir():
            symlink_or_copy(bundle.parents[1] / CODE, folder / CODE)
        checkpoint = copy / CHECKPOINT
        weights = quantize_linears(load_task_model(checkpoint), read_weights(checkpoint))
        # Remove before writing: a write through a hard link would change the original.
        for name in (WEIGHTS, SUMS):
            (checkpoint / name).unlink(missing_ok=True)  # it may be the original's, hard-linked
        save_file(weights, checkpoint / WEIGHTS, metadata={"format": "pt"})
        write_sums(checkpoint)
        # The weights have other hashes now; the code stays the recorded one.
        content = json.loads((copy / CONTENT).read_text(encoding="utf-8"))
        write_json(copy / CONTENT, content | {"files": hash_files(copy)})
        yield copy


def compare_bundles(
    params: Params,
    workspace: Workspace,
    bundle: Path,
    int8: Path,
    lineage: Mapping[str, Any],
    margin: float | None = None,
) -> Equivalence:
    """Evaluate a bundle and its copy with weights of 8 bits on the test data; arguments as `make_equivalent_bundle`.

    Raises:
        DataError: the test cannot be made here: no test data, no interval, no margin.
    """
    task = read_bundle_info(bundle).task or ""
    rule, spec = gate_rule(params, task), gate_spec(params, task)
    # Evaluate on the gate's split only.
    params = replace(params, evaluate=replace(params.evaluate, splits=[params.promotion.split]))
    measured = []
    for folder, weights in ((bundle, "float32"), (int8, "8 bits")):
        logger.info("evaluating with weights of %s", weights)
        with reevaluate_bundle(params, workspace, folder, lineage, as_served=True) as scores:
            measurement = measure(read_item_scores(scores / "items.parquet"), spec)
        if isinstance(measurement, str):
            raise DataError(f"weights of 8 bits cannot be tested: {measurement}")
        measured.append(measurement)
    before, after = measured
    # Both evaluations have the same items: the interval is of their paired differences.
    ends = interval(paired(after.evidence, before.evidence), resamples=params.evaluate.bootstrap, seed=0)
    if ends is None:
        raise DataError(
            f"weights of 8 bits cannot be tested: {spec} has no interval, which takes {MIN_GROUPS} images and "
            "`evaluate.bootstrap` above 0"
        )
    # The tolerance is what another seed would change.
    if margin is None:
        margin = rule.seed_std_of(rule.metric)
    if margin <= 0:
        raise DataError("weights of 8 bits cannot be tested with a margin of 0; pass --margin")
    low, high = ends
    return Equivalence(metric=str(spec), before=before.value(), after=after.value(), low=low, high=high, margin=margin)
