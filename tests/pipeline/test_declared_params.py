"""Every value of params.yaml that a stage reads is declared in dvc.yaml, so that a change of it runs the stage again.

The stages run in process at the tiny size, with params whose reads are recorded.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.plugins import import_target
from vlp_models.common.workspace import Workspace
from vlp_models.params import FeaturesParams, Params, TrainerParams, load_params, to_plain
from vlp_models.params.schema import contrib_sections
from vlp_models.pipeline.dvc.dvc_yaml import params_of
from vlp_models.pipeline.dvc.graph import NO_EFFECT, STAGES
from vlp_models.pipeline.stages.plan import planned

ROOT = Path(__file__).parents[2]
IN_CHECKPOINT = "stored in the checkpoint that the stage depends on"
# (stage, key) patterns of reads that dvc.yaml need not declare, with the reason.
ALLOWED = {
    ("*", "cluster.*"): "where a stage runs",
    ("*", "trainer.accelerator"): "GPU or CPU; trainings declare it",
    ("plan", "tracking.*"): "a check of params.yaml",
    **{(stage, "tracking.*"): "where curves are logged" for stage in ("pretrain", "finetune", "part")},
    **{("*", f"trainer.{key}"): reason for key, reason in NO_EFFECT[TrainerParams].items()},
    **{(stage, "evaluate.*"): "a check before the training" for stage in ("pretrain", "finetune", "part")},
    **{(stage, "finetune.*.parts.of"): "finds the run that a part is of" for stage in ("finetune", "part")},
    ("part", "finetune.*-part-*"): "the params of its run, which it declares, under the name of the part",
    ("evaluate", "evaluate.*"): "data/plan/evaluate holds what the task depends on, and nothing else reaches it",
    **{("features", f"features.{key}.*"): reason for key, reason in NO_EFFECT[FeaturesParams].items()},
    **{("features", f"features.{key}.*"): "in the id of data/detector" for key in contrib_sections(FeaturesParams)},
    ("detector", "features.source"): "its value decides which sections dvc.yaml declares",
    ("shards", "models.*"): "data/plan/reads.json holds what the stage needs of it",
    ("shards", "finetune.*.parts.of"): "data/plan/reads.json holds it",
    ("shards", "validate.m*"): "limits that every image of data/validated has passed",
    ("pretrain", "models.*"): IN_CHECKPOINT,
    ("training_stats", "models.*"): IN_CHECKPOINT,
    **{(stage, "models.*"): IN_CHECKPOINT for stage in ("finetune", "part")},
    **{(stage, "pretrain.*"): IN_CHECKPOINT for stage in ("finetune", "part")},
    ("evaluate", "pretrain.*"): IN_CHECKPOINT,
    ("register", "finetune.*"): IN_CHECKPOINT,
    ("register", "pretrain.*"): IN_CHECKPOINT,
    ("register", "models.*"): IN_CHECKPOINT,
    ("report", "pretrain.*"): "the outputs of the run change with it",
    ("report", "data.*.root"): "data/validated changes with it",
    ("report", "validate.max_image_pixels"): "a limit that every image of data/validated has passed",
}
# Functions whose reads do not change the result of a stage.
ALLOWED_CALLERS = {
    "baseline_models": "it decides which checkpoints dvc.yaml declares",
    "check_searches": "a check before the training",
    "check_search": "a check before the training",
    "start_of": "the chain of checkpoints of a run",
    "_open_curve_loggers": "MLflow stores all of params.yaml with a training",
    "lineage_record": "the lineage stores all of params.yaml",
    "variant_hash": "hash of settings that produced the checkpoints",
    "_make_record": "the bundle stores all of params.yaml",
}

Reads = dict[str, set[str]]  # key of a leaf -> functions that read it


class Recorder:
    """Records which leaves of a `Params` are read, while `monkeypatch` lasts."""

    def __init__(self, params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: Reads = {}
        self._sections: list[Any] = []  # keeps their ids valid
        self._paths: dict[int, str] = {}
        self._add(params, "")
        recorder = self

        names = {type(section): {f.name for f in dataclasses.fields(section)} for section in self._sections}

        def read(self: Any, name: str) -> Any:
            value = object.__getattribute__(self, name)
            if name in names[type(self)] and not _is_section(value):
                recorder._record(self, name)
            return value

        def replace(section: Any, **changes: Any) -> Any:
            copy = original(section, **changes)
            if id(section) in recorder._paths:
                recorder._add(copy, recorder._paths[id(section)])
            return copy

        original = dataclasses.replace
        for module in list(sys.modules.values()):
            if module is dataclasses or module.__name__.startswith("vlp_models."):
                for name in [name for name, value in vars(module).items() if value is original]:
                    monkeypatch.setattr(module, name, replace)
        for cls in {type(section) for section in self._sections}:
            monkeypatch.setattr(cls, "__getattribute__", read)

    def _add(self, value: Any, path: str) -> None:
        if dataclasses.is_dataclass(value):
            self._paths[id(value)] = path
            self._sections.append(value)
            entries = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        else:
            entries = value if isinstance(value, dict) else {}
        for key, entry in entries.items():
            self._add(entry, f"{path}.{key}".lstrip("."))

    def _record(self, owner: Any, name: str) -> None:
        caller = sys._getframe(2)
        if caller.f_globals["__name__"] in ("dataclasses", __name__):  # `replace` copies every field, `_add` lists them
            return
        while caller.f_back and caller.f_globals["__name__"] == "vlp_models.params.schema":  # `to_plain`
            caller = caller.f_back
        path = self._paths.get(id(owner))
        if path is None:  # not from params.yaml
            return
        function = f"{caller.f_globals['__name__']}.{caller.f_code.co_name}"
        self.reads.setdefault(f"{path}.{name}".lstrip("."), set()).add(function)


def _is_section(value: Any) -> bool:
    entries = list(value.values()) if isinstance(value, dict) else [value]
    return bool(entries) and all(dataclasses.is_dataclass(entry) for entry in entries)


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Reads]]:
    """Stage -> key -> reads that dvc.yaml does not declare, from a run of all stages."""
    folder = tmp_path_factory.mktemp("project")
    file = folder / "params.yaml"
    shutil.copy(ROOT / "params.yaml", file)
    settings = ["augment.tden.start=finetune/tden-captioning", "finetune.tden-vqa.parts=2"]
    apply_overlay(file, ROOT / "vlp_models" / "presets" / "tiny.yaml", settings)
    # With every key written out: dvc.yaml declares only keys that the file holds.
    file.write_text(yaml.safe_dump(to_plain(load_params(file)), sort_keys=False))
    found: dict[str, dict[str, Reads]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        workspace = Workspace(folder)
        text = planned(load_params(), workspace)
        (folder / "dvc.yaml").write_text(text)
        stages = yaml.safe_load(text)["stages"]
        names = [name for name in stages if name != "part"]
        names.insert(names.index("finetune"), "part")  # a fine-tuning averages its parts
        for stage in names:
            for key in stages[stage].get("foreach", [""]):
                params = load_params()
                run = import_target(STAGES[stage])
                with pytest.MonkeyPatch.context() as recording:
                    recorder = Recorder(params, recording)
                    run(params, workspace, key)
                declared = params_of(stages, stage, key)
                assert recorder.reads
                found.setdefault(stage, {})[key] = {
                    name: callers
                    # A section of contrib is a key of params.yaml as well.
                    for name, callers in ((key.replace("sections.", ""), c) for key, c in recorder.reads.items())
                    if not any(f"{name}.".startswith(f"{prefix}.") for prefix in declared)
                }
    return found


@pytest.mark.pipeline
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES)
def test_every_read_param_is_declared(reads: dict[str, dict[str, Reads]], stage: str) -> None:
    missing = []
    for key, undeclared in reads[stage].items():
        for name, callers in sorted(undeclared.items()):
            readers = {caller for caller in callers if caller.rpartition(".")[2] not in ALLOWED_CALLERS}
            allowed = any(fnmatch.fnmatch(stage, s) and fnmatch.fnmatch(name, pattern) for s, pattern in ALLOWED)
            if readers and not allowed:
                missing.append(f"{stage} {key}: {name}, read by {', '.join(sorted(readers))}")
    assert not missing, "add it to the stage's builder in pipeline/dvc/graph.py:\n" + "\n".join(missing)
