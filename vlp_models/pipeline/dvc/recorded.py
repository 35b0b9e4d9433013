"""Whether dvc.lock says of stages that just ran what they were made with.

DVC reads params.yaml once more when a stage has ended. A stage looks at it last of all, and fails if its params are not
those that it used (commands.py); an edit behind that look would be recorded with a result that it did not make.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from vlp_models.pipeline.dvc.repair import LOCK_FILE, locked_stages, replace

FOLDER = ".work/params"
PARAMS = "params.yaml"


def note(root: Path, stage: str, params: bytes) -> None:
    """Keeps params.yaml as a stage saw it last."""
    kept = root / FOLDER / f"{stage}.yaml"
    kept.parent.mkdir(parents=True, exist_ok=True)
    replace(kept, params)


def forget_notes(root: Path) -> None:
    """Before a run: dvc.lock may be another commit's by now, of which notes of earlier runs say nothing."""
    for kept in (root / FOLDER).glob("*.yaml"):
        kept.unlink()


def take_back(root: Path) -> list[str]:
    """Takes the stages out of dvc.lock that are recorded with other params than they noted, so that they run again.
    Their names; for when no DVC is at work. A damaged dvc.lock is left to `preflight`."""
    from ruamel.yaml import YAML

    lock_file, safe, whole = root / LOCK_FILE, YAML(typ="safe"), YAML()  # DVC reads by ruamel, too
    whole.width = 4096
    if not locked_stages(lock_file):
        return []
    notes = {kept.stem: safe.load(kept.read_bytes()) for kept in (root / FOLDER).glob("*.yaml")}
    lock = whole.load(lock_file.read_bytes())
    stages = lock["stages"]
    wrong = [stage for stage, made_with in notes.items() if stage in stages and _differ(stages[stage], made_with)]
    for stage in wrong:
        del stages[stage]
    if wrong:
        text = StringIO()
        whole.dump(lock, text)
        replace(lock_file, text.getvalue().encode())
    forget_notes(root)
    return wrong


def told(stages: list[str]) -> str:
    """What to tell people of stages that were taken back."""
    return (
        f"{PARAMS} was edited just as {', '.join(stages)} ended, which used what stood there before; the result is not "
        "recorded. Run the same command again"
    )


def _differ(entry: dict[str, Any], made_with: Any) -> bool:
    recorded = entry.get("params", {}).get(PARAMS, {})
    return any(value_at(made_with, place) != value for place, value in recorded.items())


def value_at(params: Any, place: str) -> Any:
    """What stands in params.yaml at a place like `pretrain.tden`; None: nothing."""
    for part in place.split("."):
        params = params.get(part) if isinstance(params, dict) else None
    return params
