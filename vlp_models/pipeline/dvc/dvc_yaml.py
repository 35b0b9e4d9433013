"""dvc.yaml as a file: written, read, and known again as ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FILE = "dvc.yaml"
HEADER = """\
# What depends on what; `vlp plan` makes this file from params.yaml , `dvc dag` draws it.
# data/plan/code/* list source files with their hashes: a stage depends on the code that it runs, and on no other.
"""

Stage = dict[str, Any]


def render(stages: Mapping[str, Stage]) -> str:
    """The text of dvc.yaml."""
    document = {"vars": ["params.yaml"], "stages": dict(stages)}
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return HEADER + text


def is_ours(root: Path) -> bool:
    """Whether `vlp plan` writes the dvc.yaml in `root`: there is none yet, or it begins as ours does."""
    file = root / FILE
    return not file.exists() or file.read_text(encoding="utf-8").startswith(HEADER.partition(";")[0])


def params_of(stages: Mapping[str, Stage], stage: str, key: str) -> list[str]:
    """The params that a stage is declared to depend on, such as `pretrain.tden`."""
    found = stages.get(stage, {})
    listed = found.get("do", found).get("params", [])
    return [name.replace("${key}", key) for name in listed]


def read_pipeline(root: Path) -> dict[str, Stage]:
    """The stages of the dvc.yaml in `root`; none if it can't be read."""
    try:
        return dict(yaml.safe_load((root / FILE).read_text(encoding="utf-8"))["stages"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return {}


class _Dumper(yaml.SafeDumper):
    """Short lists of a stage stay readable: one entry a line, indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)
