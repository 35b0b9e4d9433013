"""Each format has keys of its own in params.yaml: the dataclass that its reader annotates `params` with."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vlp_models.common.plugins import use_plugins
from vlp_models.data.formats import FORMATS, params_class, source_params
from vlp_models.errors import ParamsError
from vlp_models.params import DatasetParams, parse_params, read_yaml, to_plain
from vlp_models.pipeline.check_params import check_runs
from vlp_models.pipeline.dvc.external import files_outside_root

PARAMS = Path(__file__).parents[2] / "params.yaml"
READER = """
from dataclasses import dataclass, field
from typing import ClassVar
from vlp_models.data.formats.base import Tables, fills
from vlp_models.params import SourceParams

@dataclass(frozen=True, kw_only=True)
class OwnParams(SourceParams):
    file_keys: ClassVar = ("listing", "lists")
    listing: str = "captions.tsv"
    lists: dict[str, list[str]] = field(default_factory=dict)
    columns: int = 3

@fills("captions")
def read(name, params: {annotation}, base):
    tables = Tables()
    tables.notes[params.listing] = params.columns
    tables.notes.update(params.lists)
    return tables
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Return a function that makes the format `own` a plugin with this annotation of `params`."""
    path = list(sys.path)

    def declare(annotation: str) -> None:
        (tmp_path / "plugins").mkdir()
        (tmp_path / "plugins" / "own.py").write_text(READER.replace("{annotation}", annotation))
        use_plugins({"formats": {"own": "plugins.own:read"}}, tmp_path)

    yield declare
    use_plugins({}, tmp_path)
    sys.path[:] = path
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "plugins"]:
        del sys.modules[loaded]


def test_every_built_in_format_has_a_class_whose_file_keys_exist() -> None:
    for name in FORMATS.builtin:
        cls = params_class(name)
        made = cls(format=name, root=".")
        assert all(hasattr(made, key) for key in cls.file_keys), name


def test_keys_stay_next_to_each_other_in_plain_data() -> None:
    plain = {"format": "pairs", "root": "a", "pairs": "p.csv", "limit": 3}
    found = to_plain(DatasetParams.of(**plain))
    assert {key: found[key] for key in plain} == plain and "options" not in found
    assert source_params("x", DatasetParams.of(**plain)).pairs == "p.csv"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": "coco", "capton": {}}, "unknown key `data.x.capton` of the format coco; did you mean `captions`?"),
        ({"format": "pairs", "karpathy": "a"}, "unknown key `data.x.karpathy` of the format pairs"),
        ({"format": "texts", "group_near_duplicates": True}, "`data.x.group_near_duplicates`: the format texts takes"),
        ({"format": "texts", "val_fraction": 0.1}, "remove the key (name the files of val in data.x.texts)"),
        ({"format": "coco", "options": {"karpathy": ""}}, "unknown key `data.x.options` of the format coco"),
        ({"format": "coco", "captions": {"train": 1}}, "`data.x.captions"),
        ({"format": "own", "colums": 1}, "unknown key `data.x.colums` of the format own; did you mean `columns`?"),
        ({"format": "own", "columns": "b"}, "`data.x.columns` must be an integer"),
    ],
    ids=["typo", "other format", "duplicates", "val", "options", "type", "plugin typo", "plugin type"],
)
def test_a_wrong_key_is_named_before_anything_runs(
    own: Callable[[str], None], keys: dict[str, Any], message: str
) -> None:
    own("OwnParams")
    with pytest.raises(ParamsError, match=re.escape(message)):
        source_params("x", DatasetParams.of(root=".", **keys))


def test_plan_checks_every_dataset() -> None:
    raw = read_yaml(PARAMS)
    raw["data"]["scenes"]["splits"] = ["train"]
    with pytest.raises(ParamsError, match=r"unknown key `data\.scenes\.splits` of the format coco"):
        check_runs(parse_params(raw))


def test_files_that_a_plugin_names_outside_of_root_are_dependencies(own: Callable[[str], None]) -> None:
    own("'OwnParams'")  # as text, like `from __future__ import annotations`
    entry = DatasetParams.of(format="own", root="data/a", listing="../b.tsv", lists={"dev": ["../c", "in"]})
    assert files_outside_root(entry) == ["data/b.tsv", "data/c"]


@pytest.mark.parametrize("annotation", ["int", "'Missing'"])
def test_an_annotation_that_is_no_class_of_keys_is_refused(own: Callable[[str], None], annotation: str) -> None:
    own(annotation)
    with pytest.raises(ParamsError, match=r"plugin plugins\.own:read: .*`params`"):
        source_params("x", DatasetParams.of(format="own", root="."))
