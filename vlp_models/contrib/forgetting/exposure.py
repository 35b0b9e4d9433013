"""Which checkpoints were trained on an image: directly, through an input, not at all, or unknown.

A checkpoint stores its provenance: params and hashes of every input. Where those inputs are available, the answer is
exact, because the order of samples is a function of seed and epoch (replay.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlp_models.common.io import hash_path, read_json
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.forgetting.data_versions import DataVersion, DataVersions
from vlp_models.contrib.forgetting.inputs import (
    first_detector_step,
    first_warmup_step,
    load_provenance,
    shapes_tokenizer,
)
from vlp_models.contrib.forgetting.replay import FirstExposure, TrainingRun, run_settings
from vlp_models.data.joins import hash_boxes
from vlp_models.data.shards.contents import trained_on_inputs
from vlp_models.data.shards.dataset import ShardDataset, read_manifest
from vlp_models.errors import VLPError, first_line
from vlp_models.params import Params, StreamParams, TokenizerParams, build, split_start
from vlp_models.params.data import DetectorParams
from vlp_models.pipeline.dvc.lock_file import LOCK_FILE, read_stages
from vlp_models.pipeline.lineage import PROVENANCE
from vlp_models.serving.bundle import read_checkpoint_info
from vlp_models.training.data import validation_samples

State = Literal["exposed", "inherited", "unknown", "clean"]
DETECTOR, TOKENIZER = "data/detector", "data/tokenizer"
READ_ERRORS = (VLPError, OSError, KeyError, TypeError, ValueError, AttributeError)  # raised by reading a damaged file


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Whether a checkpoint, detector, tokenizer or registered version was trained on an image.

    state  `exposed`: trained on it. `inherited`: one of its inputs was. `unknown`: cannot be determined from what is
           available. `clean`: neither it nor any input was
    how    human-readable explanation
    first  when it was first trained on the image itself
    """

    name: str
    state: State
    how: str
    first: FirstExposure | None = None

    @property
    def clean(self) -> bool:
        return self.state == "clean"


@dataclass
class CheckpointExposures:
    """Determines the exposure of each checkpoint, once."""

    params: Params
    workspace: Workspace
    data: DataVersions
    _cache: dict[str, Exposure] = field(default_factory=dict)

    def all(self) -> list[Exposure]:
        """Return the exposure of everything in the workspace: detector, tokenizer, initial models and all runs."""
        names = [name for name in (DETECTOR, TOKENIZER) if (self.workspace.root / name / "manifest.json").exists()]
        for kind in ("initial", "pretrain", "finetune"):
            for path in sorted((self.workspace.root / "checkpoints" / kind).glob("*/config.json")):
                # A name with a dot is a temporary folder of a writer.
                if not path.parent.name.startswith("."):
                    names.append(f"{kind}/{path.parent.name}")
        return [self.of(name) for name in names]

    def of(self, name: str) -> Exposure:
        """Return the exposure of `pretrain/RUN`, ..., `data/detector` or `data/tokenizer`."""
        # Runs share inputs: each is determined once, errors included.
        if name not in self._cache:
            try:
                if name == DETECTOR:
                    self._cache[name] = self._detector()
                elif name == TOKENIZER:
                    self._cache[name] = self._tokenizer()
                else:
                    info = read_checkpoint_info(self.workspace.checkpoint(name))
                    if split_start(name)[0] == "initial":
                        self._cache[name] = self._initial(name, info.provenance)
                    else:
                        self._cache[name] = worst(name, self.trained(name, info.provenance, info.detector_id))
            except READ_ERRORS as error:
                how = f"cannot be determined: {first_line(error)}"
                self._cache[name] = Exposure(name=name, state="unknown", how=how)
        return self._cache[name]

    def _initial(self, name: str, provenance: Mapping[str, Any]) -> Exposure:
        if warmup := provenance.get("vision_warmup"):
            # With other boxes the order of its warm-up cannot be replayed.
            if warmup["boxes"] != hash_boxes(self.workspace.validated):
                return Exposure(name=name, state="unknown", how="its vision warm-up used other boxes than those here")
            if step := first_warmup_step(warmup, self.workspace, self._images_here()):
                return Exposure(name=name, state="exposed", how=f"in its vision warm-up, first in step {step}")
        notes = "; its imported weights may have been trained on it elsewhere"
        how = "not trained yet" + (notes if {"init", "image_init"} & provenance.keys() else "")
        return Exposure(name=name, state="clean", how=how)

    def trained(self, run: str, provenance: Mapping[str, Any], detector_id: str) -> list[Exposure]:
        """Return a run's own exposure first, then that of its inputs.

        Args:
            provenance: from its checkpoint or its resume state.
            detector_id: of the regions its model reads; empty: it reads none.
        """
        # The run itself comes first, then its regions, its start, its tokenizer and its captioner.
        settings, inputs = run_settings(run, provenance), provenance.get("inputs", {})
        if settings is None or not trained_on_inputs(inputs):
            return [Exposure(name=run, state="unknown", how="its provenance is missing")]
        training = TrainingRun.from_settings(run, settings)
        start = self.workspace.checkpoint(training.start)
        input_exposure = [self._regions(detector_id)] if detector_id else []
        # The start's content must be that of training time, or its own exposure proves nothing.
        start_is_same = start.exists() and hash_path(start) == inputs.get("start")
        tokenizer_is_same = hash_path(self.workspace.tokenizer) == inputs.get("tokenizer")
        for name, same in ((training.start, start_is_same), (TOKENIZER, tokenizer_is_same)):
            gone = Exposure(name=name, state="unknown", how="this input is no longer available")
            input_exposure.append(self.of(name) if same else gone)
        # Generated captions were written by another model, whose exposure they pass on.
        if training.captioner:
            captions = self.workspace.augmented(training.captioner)
            if not captions.exists() or hash_path(captions) != inputs.get("augment"):
                how = "it was trained on generated captions that are no longer available"
                return [Exposure(name=run, state="unknown", how=how)]
            input_exposure.append(self.of(read_json(captions / "manifest.json")["params"]["start"]))
        return [self.own(training, self.data.of(inputs), provenance, regions=bool(detector_id)), *input_exposure]

    def own(
        self, training: TrainingRun, data: DataVersion | None, provenance: Mapping[str, Any], *, regions: bool
    ) -> Exposure:
        """Return the exposure of a run itself, without its inputs."""
        name = training.run
        if data is None:
            how = f"it was trained on a version of data/shards that is neither here nor in DVC's cache; {PULL}"
            return Exposure(name=name, state="unknown", how=how)
        streamed = provenance.get("stream")  # set if the shards were streamed
        # Only what decides the order is recorded; the address is a placeholder that turns streaming on.
        stream = StreamParams(**({"address": "then", **streamed} if streamed else {}))
        augmented = self.workspace.augmented(training.captioner) if training.captioner else None
        exposures: list[tuple[FirstExposure, str]] = []
        for part, trained in training.parts(read_manifest(data.shards).sources).items():
            at = trained.find_first_exposure(
                data.shards, data.images, stream=stream, regions=regions, generated=augmented
            )
            if at is not None:
                exposures.append((at, f"{part}first in epoch {at.epoch}, update {at.update}"))
        if exposures:
            first = min((at for at, _ in exposures), key=lambda at: at.update)
            how = "; ".join(text for _, text in exposures)
            if training.rewards_use_all_captions:
                how += "; its captions are used by the reward from the first update"
            return Exposure(name=name, state="exposed", how=how, first=first)
        # Not exposed by what was found, but changed copies could not be searched.
        if not data.complete:
            how = f"no byte-equal copy was there; finding changed copies needs the fingerprints of that version; {PULL}"
            return Exposure(name=name, state="unknown", how=how)
        # A snapshot was chosen by its validation score, so the validation images shaped the weights, too.
        p = training.params
        if p.snapshots.keep and _validates_on(training, data.shards, data.images):
            return Exposure(name=name, state="exposed", how="its weights were chosen by validation on it")
        return Exposure(name=name, state="clean", how="not in its training data")

    def _regions(self, detector_id: str) -> Exposure:
        """Return the exposure of the detector that made the regions a model reads."""
        file = self.workspace.features / "manifest.json"
        manifest = read_json(file) if file.exists() else {}
        if manifest.get("detector_id") != detector_id:
            return Exposure(name=DETECTOR, state="unknown", how="the detector of its regions is no longer available")
        # Regions of other sources, such as imported files, come from no detector trained here.
        if manifest["params"]["source"] in ("detector", "timm"):
            return self.of(DETECTOR)
        return Exposure(name="data/features", state="clean", how="made without a detector trained here")

    def _detector(self) -> Exposure:
        name, manifest = DETECTOR, read_json(self.workspace.detector / "manifest.json")
        if "source" not in manifest["params"] or manifest["params"]["source"] != "train":
            return Exposure(name=name, state="clean", how="not trained here")
        p = build(DetectorParams, manifest["params"], where="detector", file="data/detector/manifest.json")
        boxed = self.workspace.validated / "boxed.parquet"
        # None: dvc.lock records no such run, so nothing contradicts the boxes of the workspace.
        if _recorded_md5(self.workspace.root, "detector", "data/validated/boxed.parquet") not in (None, _md5_of(boxed)):
            return Exposure(name=name, state="unknown", how="trained on other boxes than those here")
        step = first_detector_step(p, self.workspace, self._images_here())
        if step is None:
            return Exposure(name=name, state="clean", how="not in its training data")
        return Exposure(name=name, state="exposed", how=f"first in step {step}")

    def _tokenizer(self) -> Exposure:
        manifest = read_json(self.workspace.tokenizer / "manifest.json")
        p = build(TokenizerParams, manifest["params"], where="tokenizer", file="data/tokenizer/manifest.json")
        p = replace(p, sources=self.params.tokenizer.sources)  # the manifest does not store them
        stages = ("tokenizer", "validate")
        # The md5 of the texts that the tokenizer was built from, and of those that `validate` last wrote.
        then, now = (_recorded_md5(self.workspace.root, stage, "data/validated") for stage in stages)
        if then != now:
            return Exposure(name=TOKENIZER, state="unknown", how="built from other texts than those here")
        if shapes_tokenizer(p, self.workspace, self._images_here()):
            how = "its vocabulary or answers would differ without its texts"
            return Exposure(name=TOKENIZER, state="exposed", how=how)
        return Exposure(name=TOKENIZER, state="clean", how="its vocabulary and answers are the same without its texts")

    def _images_here(self) -> frozenset[str]:
        here = self.data.here()
        return here.images if here else frozenset(copy.image.image_id for copy in self.data.copies)


def _recorded_md5(root: Path, stage: str, path: str) -> str | None:
    """Return the md5 that dvc.lock records for a dependency or output of a stage, or None."""
    entry = (read_stages(root / LOCK_FILE) or {}).get(stage) or {}
    for file in (*entry.get("deps", []), *entry.get("outs", [])):
        if file["path"] == path:
            return str(file.get("md5", "")) or None
    return None


def _md5_of(file: Path) -> str | None:
    """Return a file's md5 as DVC computes it, or None if there is no such file."""
    if not file.is_file():
        return None
    with file.open("rb") as content:
        return hashlib.file_digest(content, "md5").hexdigest()


PULL = "run `dvc fetch` at the commit that made it"


def worst(name: str, parts: list[Exposure]) -> Exposure:
    """Combine the exposure of a run itself, which comes first, with that of its inputs."""
    run = parts[0]
    if run.state == "exposed":
        return replace(run, name=name)
    # An input that was exposed matters more than one that is unknown.
    for part in parts[1:]:
        if part.state in ("exposed", "inherited"):
            how = part.how if part.name == name else f"{part.name}: {part.how}"
            return Exposure(name=name, state="inherited", how=how)
    # Everything that is left is clean or unknown: one unknown part makes the whole unknown.
    for part in parts:
        if part.state == "unknown":
            how = part.how if part is run or part.name == name else f"{part.name}: {part.how}"
            return Exposure(name=name, state="unknown", how=how)
    return replace(run, name=name)


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A resume state or snapshot, saved after update `step`."""

    path: Path
    run: str
    step: int


# step-00000012.ckpt and snapshot-00000012.safetensors, with the update in eight digits.
_STATE = re.compile(r"(?:step|snapshot)-(\d{8})\.(?:ckpt|safetensors)")


def leftovers(workspace: Workspace) -> Iterator[Leftover]:
    """Yield the resume states of interrupted trainings under .work."""
    for path in sorted((workspace.root / ".work").glob("*/*/*")):
        # Folders are called pretrain-NAME and finetune-NAME.
        kind, _, name = path.parents[1].name.partition("-")
        if kind in ("pretrain", "finetune") and (match := _STATE.fullmatch(path.name)):
            yield Leftover(path=path, run=f"{kind}/{name}", step=int(match[1]))


def resume_state_exposure(state: Leftover, checkpoints: CheckpointExposures) -> Exposure:
    """Return the exposure of a resume state, from the provenance that its training recorded next to it."""
    name = checkpoints.workspace.relative(state.path)
    try:
        run, *input_exposure = checkpoints.trained(state.run, *load_provenance(state.path.parent))
    except READ_ERRORS as error:
        how = f"cannot be determined from its {PROVENANCE}: {first_line(error)}"
        return Exposure(name=name, state="unknown", how=how)
    # A state that was saved before the first update with the image is clean, unlike the run that goes on.
    if run.first is not None and state.step < run.first.update:
        how = f"update {state.step}; the run first uses it in update {run.first.update}"
        run = Exposure(name=name, state="clean", how=how)
    return worst(name, [run, *input_exposure])


def _validates_on(training: TrainingRun, shards: Path, image_ids: Set[str]) -> bool:
    """Return whether a training validates on one of these images; reads the index alone."""
    sources, captioned = training.params.sources, training.captioned
    val = ShardDataset(shards, "val", training.view, sources, regions=False, captioned=captioned)
    return bool(np.isin(validation_samples(len(val)), val.find_samples(image_ids)).any())
