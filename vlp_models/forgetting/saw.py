"""Which checkpoints saw a picture: themselves, through what they were made of, never, or it can't be told.

A training says in its checkpoint what it was made of (`provenance`: params, hashes of every input). Where all of that
is at hand, the answer is exact: the order of samples is a function of seed and epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vlp_models.common.io import hash_path, read_json
from vlp_models.common.workspace import Workspace
from vlp_models.data.shards.contents import trained_on_inputs
from vlp_models.errors import VLPError
from vlp_models.forgetting.data_versions import DataVersion, DataVersions
from vlp_models.forgetting.learning import Learning, settings_of
from vlp_models.forgetting.order import Sight
from vlp_models.params import Params, StreamParams, TokenizerParams, build, split_start
from vlp_models.params.data import DetectorParams
from vlp_models.pipeline.dvc.lock_file import md5_of, recorded_md5
from vlp_models.pipeline.lineage import NOTE, noted
from vlp_models.pipeline.stages.detector import first_step_with
from vlp_models.pipeline.stages.tokenizer import shaped_by
from vlp_models.serving.bundle import checkpoint_info
from vlp_models.training.data import validates_on

State = Literal["saw", "through", "unknown", "never"]
DETECTOR, TOKENIZER = "data/detector", "data/tokenizer"
DAMAGED = (VLPError, OSError, KeyError, TypeError, ValueError, AttributeError)  # what reading a damaged file may raise


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of a checkpoint, a detector, a tokenizer or a registered version.

    state: `saw`: it learnt from the picture. `through`: something that it is made of did. `unknown`: can't be told from
        here. `never`: none of it did.
    how: for people.
    sight: when it first learnt from the picture itself.
    """

    name: str
    state: State
    how: str
    sight: Sight | None = None

    @property
    def clean(self) -> bool:
        return self.state == "never"


@dataclass
class Checkpoints:
    """Asks each checkpoint once."""

    params: Params
    workspace: Workspace
    data: DataVersions
    _told: dict[str, Verdict] = field(default_factory=dict)

    def all(self) -> list[Verdict]:
        """Of all that lies here: detector, tokenizer, initial models, runs; those of params.yaml and others."""
        places = [self.workspace.root / name for name in (DETECTOR, TOKENIZER)]
        found = [self.of(self.workspace.relative(path)) for path in places if (path / "manifest.json").exists()]
        for kind in ("initial", "pretrain", "finetune"):
            for path in sorted((self.workspace.root / "checkpoints" / kind).glob("*/config.json")):
                if not path.parent.name.startswith("."):
                    found.append(self.of(f"{kind}/{path.parent.name}"))
        return found

    def of(self, name: str) -> Verdict:
        """name: `pretrain/RUN`, ..., `data/detector` or `data/tokenizer`."""
        if name not in self._told:
            try:
                self._told[name] = self._ask(name)
            except DAMAGED as error:
                self._told[name] = Verdict(name=name, state="unknown", how=f"can't be told: {_line(error)}")
        return self._told[name]

    def _ask(self, name: str) -> Verdict:
        if name == DETECTOR:
            return self._detector()
        if name == TOKENIZER:
            return self._tokenizer()
        info = checkpoint_info(self.workspace.checkpoint(name))
        if split_start(name)[0] == "initial":
            return self._initial(name, info.provenance)
        return worst(name, self.trained(name, info.provenance, info.detector_id))

    def _initial(self, name: str, provenance: Mapping[str, Any]) -> Verdict:
        if eyes := provenance.get("vision_warmup"):
            from vlp_models.pipeline.initial_weights import boxes_of
            from vlp_models.pipeline.initial_weights import first_step_with as first_look

            if eyes["boxes"] != boxes_of(self.workspace):
                return Verdict(name=name, state="unknown", how="its eyes learnt from other boxes than those here")
            if step := first_look(eyes, self.workspace, self._images_here()):
                return Verdict(name=name, state="saw", how=f"by its eyes, first in step {step}")
        notes = "; the weights it begins with were imported: what they have seen, nobody here knows"
        how = "before its first step" + (notes if {"init", "image_init"} & provenance.keys() else "")
        return Verdict(name=name, state="never", how=how)

    def trained(self, run: str, provenance: Mapping[str, Any], detector_id: str) -> list[Verdict]:
        """On what a run learnt itself, first, and on what it was made of.

        Args:
            provenance: as its checkpoint or its state tells it.
            detector_id: of the regions that its model reads; empty: it reads none.
        """
        settings, inputs = settings_of(run, provenance), provenance.get("inputs", {})
        if settings is None or not trained_on_inputs(inputs):
            return [Verdict(name=run, state="unknown", how="it does not say what it was made of")]
        learning = Learning.of(run, settings)
        start = self.workspace.checkpoint(learning.start)
        made_of = [self._regions(detector_id)] if detector_id else []
        made_of += [
            self.made_of(learning.start, start.exists() and hash_path(start) == inputs.get("start")),
            self.made_of(TOKENIZER, hash_path(self.workspace.tokenizer) == inputs.get("tokenizer")),
        ]
        if learning.captioner:
            written = self.workspace.augmented(learning.captioner)
            if not written.exists() or hash_path(written) != inputs.get("augment"):
                how = "it learnt from captions that a model wrote, which are not here any more"
                return [Verdict(name=run, state="unknown", how=how)]
            made_of.append(self.of(read_json(written / "manifest.json")["params"]["start"]))
        return [self.own(learning, self.data.of(inputs), provenance, regions=bool(detector_id)), *made_of]

    def own(
        self, learning: Learning, data: DataVersion | None, provenance: Mapping[str, Any], *, regions: bool
    ) -> Verdict:
        """What a run learnt from itself, whatever it began with."""
        name = learning.run
        if data is None:
            how = f"it learnt from a state of data/shards that is neither here nor in DVC's cache; {PULL}"
            return Verdict(name=name, state="unknown", how=how)
        told = provenance.get("stream")  # where the shards were streamed
        stream = StreamParams(**({"address": "then", **told} if told else {}))
        augmented = self.workspace.augmented(learning.captioner) if learning.captioner else None
        sight = learning.sight(data.shards, data.images, stream=stream, regions=regions, augmented=augmented)
        if sight is not None:
            rewarded = "; its captions count in the rewards from the first update" if learning.scored_by_all else ""
            how = f"first in epoch {sight.epoch}, update {sight.update}{rewarded}"
            return Verdict(name=name, state="saw", how=how, sight=sight)
        if not data.complete:
            how = f"no picture of these bytes was there; of changed copies the prints of that time would tell; {PULL}"
            return Verdict(name=name, state="unknown", how=how)
        if chosen := chosen_by(learning, data):
            return Verdict(name=name, state="saw", how=chosen)
        return Verdict(name=name, state="never", how="it is in none of what it learnt from")

    def made_of(self, name: str, same: bool) -> Verdict:
        """The verdict on what something was made of; `unknown` where that is not what lies here."""
        if not same:
            return Verdict(name=name, state="unknown", how="what it was made of is not here any more")
        return self.of(name)

    def _regions(self, detector_id: str) -> Verdict:
        """Of who made the regions that a model reads."""
        file = self.workspace.features / "manifest.json"
        made = read_json(file) if file.exists() else {}
        if made.get("detector_id") != detector_id:
            return Verdict(name=DETECTOR, state="unknown", how="who made the regions it read is not here any more")
        if made["params"]["source"] in ("detector", "timm"):
            return self.of(DETECTOR)
        return Verdict(name="data/features", state="never", how="made without anything that was trained here")

    def _detector(self) -> Verdict:
        name, manifest = DETECTOR, read_json(self.workspace.detector / "manifest.json")
        if "source" not in manifest["params"] or manifest["params"]["source"] != "train":
            return Verdict(name=name, state="never", how="it was not trained here")
        p = build(DetectorParams, manifest["params"], where="detector", file="data/detector/manifest.json")
        boxed = self.workspace.validated / "boxed.parquet"
        if recorded_md5(self.workspace.root, "detector", "data/validated/boxed.parquet") not in (None, md5_of(boxed)):
            return Verdict(name=name, state="unknown", how="it was trained on other boxes than those that lie here")
        step = first_step_with(p, self.workspace, self._images_here())
        if step is None:
            return Verdict(name=name, state="never", how="it is in none of what it learnt from")
        return Verdict(name=name, state="saw", how=f"first in step {step}")

    def _tokenizer(self) -> Verdict:
        manifest = read_json(self.workspace.tokenizer / "manifest.json")
        p = build(TokenizerParams, manifest["params"], where="tokenizer", file="data/tokenizer/manifest.json")
        p = replace(p, sources=self.params.tokenizer.sources)  # which the manifest does not name
        then, now = (
            recorded_md5(self.workspace.root, "tokenizer", "data/validated"),
            recorded_md5(self.workspace.root, "validate", "data/validated"),
        )
        if then != now:
            return Verdict(name=TOKENIZER, state="unknown", how="it was made of other texts than those that lie here")
        if shaped_by(p, self.workspace, self._images_here()):
            return Verdict(name=TOKENIZER, state="saw", how="its words or answers would be others without its texts")
        return Verdict(name=TOKENIZER, state="never", how="its words and answers are the same without its texts")

    def _images_here(self) -> frozenset[str]:
        here = self.data.here()
        return here.images if here else frozenset(one.picture.image_id for one in self.data.found)


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


PULL = "`dvc fetch` of the commit that made it brings it"


def worst(name: str, parts: list[Verdict]) -> Verdict:
    """Of something by what it learnt itself, which comes first, and by what it was made of."""
    own = parts[0]
    if own.state != "saw":
        for state, of in (("through", ("saw", "through")), ("unknown", ("unknown",))):
            for part in parts[1:] if state == "through" else parts:
                if part.state in of:
                    how = part.how if part.name == name or part is own else f"{part.name}: {part.how}"
                    return Verdict(name=name, state=state, how=how)  # type: ignore[arg-type]
    return Verdict(name=name, state=own.state, how=own.how, sight=own.sight)


def chosen_by(learning: Learning, data: DataVersion) -> str:
    """Whether weights were chosen by validations that had the picture; empty: no."""
    p = learning.params
    shown = p.snapshots.keep and validates_on(data.shards, learning.view, p.sources, learning.captioned, data.images)
    return "its weights were chosen by validations on it" if shown else ""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A resume state or snapshot. step: its update."""

    path: Path
    run: str
    step: int


_STATE = re.compile(r"(?:step|snapshot)-(\d{8})\.(?:ckpt|safetensors)")


def leftovers(workspace: Workspace) -> Iterator[Leftover]:
    """States of trainings below .work: of runs that were interrupted, or whose result is kept until DVC recorded it."""
    for path in sorted((workspace.root / ".work").glob("*/*/*")):
        kind, _, name = path.parents[1].name.partition("-")
        if kind in ("pretrain", "finetune") and (match := _STATE.fullmatch(path.name)):
            yield Leftover(path=path, run=f"{kind}/{name}", step=int(match[1]))


def at_step(left: Leftover, checkpoints: Checkpoints) -> Verdict:
    """Of a state, by what its training noted beside it as it began."""
    place = checkpoints.workspace.relative(left.path)
    try:
        found = noted(left.path.parent)
        if found is None:
            how = "no made-of.json beside it says what it is made of: it is of an earlier version of the program"
            return Verdict(name=place, state="unknown", how=how)
        own, *made_of = checkpoints.trained(left.run, *found)
    except DAMAGED as error:
        return Verdict(name=place, state="unknown", how=f"can't be told by the {NOTE} beside it: {_line(error)}")
    if own.sight is not None and left.step < own.sight.update:
        own = Verdict(name=place, state="never", how=f"update {left.step}; the run would see it in {own.sight.update}")
    return worst(place, [own, *made_of])
