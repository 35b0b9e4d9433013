"""The views of the data, by name: one file each, and plugins.

A new view is a file with a `View` and a line here (or a plugin of the kind `views`), a reader that fills its table
(data/formats/), and the rules that only it needs. A stage depends on the views that it reads and on no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from vlp_models.common.plugins import Table, import_target
from vlp_models.data.views.base import OTHER_IMAGES, TEXT, Column, Type, View
from vlp_models.errors import ParamsError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "LOCATION",
    "OTHER_IMAGES",
    "TABLES",
    "TEXT",
    "VIEWS",
    "VIEW_MODULES",
    "Column",
    "Computed",
    "View",
    "index_columns",
]

VIEW_MODULES = Table(
    "views",
    {
        "images": "vlp_models.data.views.images:VIEW",
        "captions": "vlp_models.data.views.captions:VIEW",
        "questions": "vlp_models.data.views.questions:VIEW",
        "statements": "vlp_models.data.views.statements:VIEW",
        "choices": "vlp_models.data.views.choices:VIEW",
        "hypotheses": "vlp_models.data.views.hypotheses:VIEW",
        "image_pairs": "vlp_models.data.views.image_pairs:VIEW",
        "texts": "vlp_models.data.views.texts:VIEW",
    },
)
V = TypeVar("V")
# names of files next to the tables of the views
_OTHER_TABLES = ("images", "objects", "quarantine", "truth", "languages", "near_duplicates", "boxed")
# columns of the index that locate a sample, which every view has, with Arrow's name of their type
LOCATION = {
    "view": "string",
    "sample_id": "string",
    "image_id": "string",
    "source": "string",
    "shard": "int32",  # -1: the sample has no image
    "key": "string",  # name of the image's members
    "regions_offset": "int64",
    "regions_size": "int64",  # 0: the shards have no regions
    "pixels_offset": "int64",
    "pixels_size": "int64",  # 0: the shards have no pixels
    "pixels_extension": "string",
}


class Computed(Mapping[str, V]):
    """A mapping whose names and values are looked up at each access: plugins may add views after the import."""

    def __init__(self, names: Callable[[], Iterable[str]], get: Callable[[str], V]) -> None:
        """get: may raise a KeyError."""
        self._names, self._get = names, get

    def __getitem__(self, name: str) -> V:
        return self._get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _load(name: str) -> View:
    target = VIEW_MODULES[name]
    view = import_target(target)
    if not isinstance(view, View) or view.name != name:
        actual = f"a View named `{view.name}`" if isinstance(view, View) else f"a {type(view).__name__}"
        raise ParamsError(f"plugin {target}: `plugins.views.{name}` must be a View named `{name}`, but is {actual}")
    return view


def _load_table(name: str) -> View:
    if not (view := _load(name)).table:
        # A view without a table, such as `images`, has no rows of its own.
        raise KeyError(name)
    return view


VIEWS: Mapping[str, View] = Computed(lambda: VIEW_MODULES, _load)  # a view is imported when it is looked up
TABLES: Mapping[str, View] = Computed(lambda: [name for name, view in VIEWS.items() if view.table], _load_table)


def index_columns() -> dict[str, pa.DataType]:
    """Return the columns of all views in the shards' index, `text` first.

    Raises:
        ParamsError: a view has the name of another table, or a column that another view has with another type.
    """
    types: dict[str, Type] = {"text": "string"}
    arrow_types = {"text": TEXT.arrow_type}
    for name, view in VIEWS.items():
        if view.table and name in _OTHER_TABLES:
            raise ParamsError(f"plugin {VIEW_MODULES[name]}: a view cannot have the name of the table `{name}`")
        # columns of one name share a column of the index, so they need one type
        for column in view.indexed:
            where = f"the column `{column.name}` of the view {name}"
            if column.name in LOCATION:
                raise ParamsError(f"{where} has the name of a column that every sample has; rename it")
            if types.setdefault(column.name, column.type) != column.type:
                raise ParamsError(f"{where} has another type in another view; rename it")
            arrow_types[column.name] = column.arrow_type
    return arrow_types
