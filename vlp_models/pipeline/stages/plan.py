"""plan: check params.yaml as a whole before anything is computed, and list the source code behind each stage.

Every other stage depends on one of these lists (data/plan/code), so a change of the source code makes exactly the
stages that use it stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import is_same_text, output_directory, read_json, write_json
from vlp_models.common.packages import OWN_RECORD, check_installed, holds_own_code, quick_imports
from vlp_models.common.source_hash import PACKAGE, hash_sources
from vlp_models.common.workspace import Workspace
from vlp_models.curation.duplicates import WITHDRAWN
from vlp_models.curation.validation import FLAGS, VALIDATION_PAGES
from vlp_models.data.shards import AUGMENTED, STREAMING
from vlp_models.errors import ParamsError
from vlp_models.evaluation.report import REPORT_SECTIONS
from vlp_models.models import BASELINES, FIGURES, SHARED_OBJECTIVES
from vlp_models.models.convert import INIT_READERS
from vlp_models.params import EvaluateParams, Params, read_yaml, to_plain
from vlp_models.params.schema import check_known
from vlp_models.pipeline.dvc.dvc_yaml import FILE, is_generated, render
from vlp_models.pipeline.dvc.external import named_sources
from vlp_models.pipeline.dvc.graph import NO_EFFECT, STAGES, InUse, build_pipeline
from vlp_models.serving.bundle import SERVING_MODULES
from vlp_models.synthetic import SCENE_FILES
from vlp_models.training import ADAPTERS, PARTS, STRATEGIES
from vlp_models.vision import DETECTORS, EXTRACTORS, REGION_SOURCES, WARMUPS

if TYPE_CHECKING:
    from vlp_models.data.shards.contents import Kind


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What dvc.yaml depends on besides params.yaml.

    kinds: model -> the kind of image input it reads. used: views and metrics (pipeline/dvc/graph.py).
    """

    kinds: Mapping[str, Kind]
    used: InUse

    @property
    def regions(self) -> bool:
        """Whether any model reads region features."""
        return "regions" in self.kinds.values()


def run(params: Params, workspace: Workspace, key: str = "") -> None:
    """Write data/plan.

    Raises:
        ParamsError: dvc.yaml does not match params.yaml, or a check of params.yaml fails.
        MissingToolError: a package that params.yaml names is not installed.
    """
    from vlp_models.registry.curve_loggers import check_sinks

    facts = check_params(params)
    check_current(params, workspace, facts)
    check_installed(named_sources(params, regions=facts.regions))
    check_regions(params, facts)
    check_sinks(params.tracking)
    read = set(facts.kinds.values())
    with output_directory(workspace.plan) as directory:
        write_json(directory / "nothing.json", {})  # stands for an optional dependency (pipeline/dvc/graph.py)
        reads: dict[str, Any] = {kind: kind in read for kind in ("regions", "pixels", "texts")}
        # Only if there are any, so that the shards of other projects stay valid.
        write_json(directory / "reads.json", reads | ({"parts": params.parts} if params.parts else {}))
        # A file per task, so that an option of one task makes only its own evaluations stale.
        for task in sorted({run.task for run in params.finetune.values()}):
            write_json(directory / "evaluate" / f"{task}.json", planned_settings(params, task))
        for kind, names in code_modules().items():
            for name, module in names.items():
                write_json(directory / "code" / kind / f"{name}.json", _hash_code(kind, name, module))


def check_params(params: Params) -> PlanFacts:
    """Check params.yaml as a whole, which builds every model on torch's meta device; return what the plan needs."""
    with quick_imports():  # torch, which takes most of the time
        from vlp_models.models.meta_model import image_kinds
        from vlp_models.pipeline.check_params import check_runs, find_in_use

    check_runs(params)
    return PlanFacts(kinds=image_kinds(params), used=find_in_use(params))


def check_regions(params: Params, facts: PlanFacts) -> None:
    """Refuse a source of regions, or a detector, of contrib that is not installed, if any model reads regions.

    Not part of `check_params`: the default params.yaml names a detector, and `vlp init` works without one.
    """
    if facts.regions:
        check_known(params.features.source, REGION_SOURCES, "features.source")
        if params.features.backbone is None and params.detector.source != "none":
            check_known(params.detector.source, DETECTORS, "detector.source")


def planned_settings(params: Params, task: str) -> dict[str, Any]:
    """Return what the evaluation of a task depends on of params.yaml's `evaluate`."""
    from vlp_models.tasks import task_class

    settings = to_plain(task_class(task).evaluate_settings(params.evaluate, task))
    return {name: value for name, value in settings.items() if name not in (*NO_EFFECT[EvaluateParams], "tasks")}


def check_current(params: Params, workspace: Workspace, facts: PlanFacts) -> None:
    """Check that dvc.yaml is what params.yaml gives."""
    file = workspace.root / FILE
    # A dvc.yaml that the user wrote is not checked.
    if not is_generated(workspace.root) or not file.exists():
        return
    if not is_same_text(file, planned(params, workspace, facts=facts)):
        raise ParamsError(
            f"{FILE} is out of date: models, runs or datasets in params.yaml have changed; run `vlp plan`"
        )


def planned(
    params: Params, workspace: Workspace, raw: Mapping[str, Any] | None = None, facts: PlanFacts | None = None
) -> str:
    """Return the content of dvc.yaml that params.yaml gives.

    Args:
        raw: params.yaml as plain data; default: read it.
        facts: of params that have been checked; default: check them.

    Raises:
        ParamsError: a check of params.yaml fails.
    """
    raw = read_yaml(workspace.root / "params.yaml") if raw is None else raw
    # In a clone the package's folder is the dependency, otherwise a record of the installed package.
    package = PACKAGE if holds_own_code(workspace.root) else OWN_RECORD
    facts = facts or check_params(params)
    return render(
        build_pipeline(
            params,
            raw,
            kinds=facts.kinds,
            used=facts.used,
            exists=lambda file: (workspace.root / file).exists(),
            package=package,
        )
    )


def changed_code(workspace: Workspace) -> list[str]:
    """Return what runs on other code than when `plan` last ran: `stages/evaluate`, `models/tden`, ...; sorted."""
    changed = []
    for kind, names in code_modules().items():
        for name, module in names.items():
            file = workspace.plan / "code" / kind / f"{name}.json"
            if file.exists() and read_json(file) != _hash_code(kind, name, module):
                changed.append(f"{kind}/{name}")
    return sorted(changed)


def _hash_code(kind: str, name: str, module: str) -> dict[str, str]:
    # `prepare` recognizes withdrawn images, a registered version includes the code that serves it, a training may be
    # streamed, sharded or train adapters, ...
    tables: dict[tuple[str, str], Iterable[str]] = {
        ("stages", "prepare"): WITHDRAWN.values(),
        ("stages", "validate"): FLAGS.values(),
        ("stages", "register"): [*SERVING_MODULES, *EXTRACTORS.values()],
        ("stages", "pretrain"): [*SHARED_OBJECTIVES.values(), *STRATEGIES.values(), *STREAMING.values()],
        **dict.fromkeys(
            (("stages", "finetune"), ("stages", "part")),
            tuple(v for table in (ADAPTERS, AUGMENTED, PARTS, STRATEGIES, STREAMING) for v in table.values()),
        ),
        ("stages", "report"): REPORT_SECTIONS.values(),
        ("stages", "features"): [*REGION_SOURCES.values(), *EXTRACTORS.values()],
        ("generators", "objects"): SCENE_FILES.values(),
        # A pretraining writes figures of its model, and an evaluation scores one as it was loaded.
        **{("models", family): [target] for family, target in [*FIGURES.items(), *BASELINES.items()]},
    }
    # The reader of `text_init` or `image_init` calls that of the family.
    readers = [INIT_READERS[kind]] if kind in INIT_READERS else []
    return hash_sources([module, *readers, *tables.get((kind, name), ())])


def code_modules() -> dict[str, dict[str, str]]:
    """Return kind -> name -> module, for everything with a list of its own."""
    from vlp_models.data.formats import FORMATS
    from vlp_models.data.views import VIEW_MODULES
    from vlp_models.metrics import METRICS
    from vlp_models.models import FAMILIES
    from vlp_models.models.convert import IMAGE_READERS, TEXT_READERS
    from vlp_models.synthetic import GENERATORS
    from vlp_models.tasks import TASKS

    # every table of plugins, and of what few projects use, so that a stage can depend on the code of one entry
    tables = {
        "models": FAMILIES,
        "text_init": TEXT_READERS,
        "image_init": IMAGE_READERS,
        "tasks": TASKS,
        "formats": FORMATS,
        "views": VIEW_MODULES,
        "metrics": METRICS,
        "generators": GENERATORS,
        "detectors": DETECTORS,
        "warmups": WARMUPS,
        "validation_pages": VALIDATION_PAGES,
    }
    return {
        # `plan` itself depends on the package as a whole.
        "stages": {name: target.partition(":")[0] for name, target in STAGES.items() if name != "plan"},
        **{kind: dict(places) for kind, places in tables.items()},
    }
