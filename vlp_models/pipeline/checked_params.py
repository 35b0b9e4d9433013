"""Check params.yaml once: what passed is remembered with what the plan needs of the models, under .work/plan.

The check builds every model on torch's meta device, and importing torch takes longer than everything else that
`vlp use` and `vlp plan` do. Its result depends on some sections of params.yaml, on code and on installed packages; with
all of these equal, the remembered facts are returned. Errors are never remembered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlp_models.common.io import stat_file, write_json
from vlp_models.common.packages import quick_imports
from vlp_models.common.source_hash import ROOT, plugin_packages
from vlp_models.params import Params, to_plain
from vlp_models.pipeline.dvc.graph import InUse

if TYPE_CHECKING:
    from vlp_models.data.shards.contents import Kind

# section -> the keys that the check and the models read of it; (): all. Of `pretrain` and `finetune`, for each run.
READ: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("generate", "data", "models", "augment", "evaluate", "plugins"), ()),
    "validate": ("min_image_side", "max_image_pixels"),
    "features": ("source", "timm"),
    "tokenizer": ("special_tokens",),
    "shards": ("pixels",),
    "trainer": ("strategy", "stream", "reproducible", "torch_threads"),
    "promotion": ("tasks",),
    "pretrain": (
        *("model", "start", "sources", "recipe", "scheduled_sampling", "optimizer", "max_text_len"),
        "captions_per_image",
    ),
    "finetune": (
        *("task", "start", "sources", "evaluate_on", "max_text_len", "texts_per_image", "config", "options"),
        *("optimizer", "augment", "lora"),
    ),
}
RUNS = ("pretrain", "finetune")
PACKAGES = ("torch", "timm", "peft")  # that models are built with, or that are asked which models they have
MOST = 8  # remembered results: presets are tried one after the other


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What dvc.yaml depends on besides params.yaml.

    kinds: model -> the kind of image input it reads. used: views and metrics (pipeline/dvc/graph.py).
    """

    kinds: Mapping[str, Kind]
    used: InUse


def check_params(params: Params, root: Path) -> PlanFacts:
    """Check params.yaml as a whole (`check_runs`) unless it was checked before; return what the plan needs.

    Args:
        root: the project's folder.

    Raises:
        ParamsError: see `check_runs`.
    """
    file, key = root / ".work" / "plan" / "checked.json", _identity(params)
    checked = _read(file)
    with suppress(KeyError, TypeError):
        return _from_plain(checked[key], params)
    with quick_imports():
        from vlp_models.models.meta_model import image_kinds
        from vlp_models.pipeline.check_params import check_runs, find_in_use

    check_runs(params)
    facts = PlanFacts(kinds=image_kinds(params), used=find_in_use(params))
    kept = dict(list(checked.items())[1 - MOST :]) | {key: {"kinds": dict(facts.kinds), "used": vars(facts.used)}}
    with suppress(OSError):  # a project that cannot be written
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, kept)
    return facts


def _identity(params: Params) -> str:
    """Return a hash of everything that the check depends on."""
    plain = to_plain(params)
    sections = {name: _pick(plain[name], keys, each=name in RUNS) for name, keys in READ.items()}
    folders = {"": ROOT} | plugin_packages()
    files = {name: [folder] if folder.is_file() else folder.rglob("*.py") for name, folder in folders.items()}
    code = {name: sorted([str(path), *stat_file(path.stat())] for path in paths) for name, paths in files.items()}
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    whole = json.dumps([sections, code, versions], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()


def _pick(section: dict[str, Any], keys: tuple[str, ...], each: bool) -> dict[str, Any]:
    if each:
        return {name: _pick(run, keys, each=False) for name, run in section.items()}
    return {key: section[key] for key in keys} if keys else section


def _read(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return {}


def _from_plain(value: Any, params: Params) -> PlanFacts:
    """Return facts from JSON, in the order of params.yaml."""
    used = value["used"]
    return PlanFacts(
        kinds={name: value["kinds"][name] for name in params.models},
        used=InUse(
            filled={name: used["filled"][name] for name in params.data},
            **{part: {name: used[part][name] for name in params.finetune} for part in ("trained", "tested", "metrics")},
        ),
    )
