"""Plugins: model families, tasks, formats, views, metrics, generators and readers of weights outside this package.

params.yaml names them, or an installed package declares them as entry points of the groups `vlp_flows.families`,
`vlp_flows.tasks`, ...:

    plugins:
      tasks: {guess_color: "plugins.guess_color:GuessColor"}      # the class in the project's plugins/guess_color.py

From then on a plugin is an entry of the same table as the built-in ones, is hashed like them, and travels with the
versions that need it. Nothing of a plugin is imported before it is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from vlp_models.contrib import CONTRIB
from vlp_models.errors import ParamsError, first_line

PACKAGE = "vlp_models"
FOLDER = "plugins"  # of a project: its modules are `plugins.NAME`
KINDS = (
    "families",
    "tasks",
    "formats",
    "views",
    "metrics",
    "generators",
    "text_readers",
    "image_readers",
    "checkpoint_formats",
)
# A letter, then letters, digits, `_` and `-`.
_NAME = re.compile(r"[A-Za-z][\w-]*")
# `module.of.a.package:Object`: dotted identifiers, a colon, an identifier.
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

Item = TypeVar("Item")
Result = TypeVar("Result")

# kind -> its table; a table registers itself when the module that defines it is imported.
_tables: dict[str, Table] = {}
# kind -> name -> `module:object` of the plugins in use, also for tables that are not imported yet.
_active: dict[str, dict[str, str]] = {}
_on_path: set[str] = set()  # folders of projects that were added to sys.path


class Table(dict[str, str]):
    """name -> `module:object` of one kind: the built-in entries, of the core and of contrib, then those of plugins."""

    def __init__(self, kind: str, core: Mapping[str, str]) -> None:
        builtin = dict(core) | contrib_entries(kind)
        super().__init__(builtin)
        self.kind, self.builtin = kind, builtin
        _tables[kind] = self
        # The module of this table may be imported after plugins were put in use.
        self.update(_active.get(kind, {}))


def contrib_folders() -> list[str]:
    """Return the names of the folders of vlp_models/contrib that exist."""
    return [name for name in CONTRIB if importlib.util.find_spec(f"{PACKAGE}.contrib.{name}")]


def contrib_entries(kind: str) -> dict[str, str]:
    """Return name -> `module:object` of the entries of one kind that folders of contrib add."""
    entries = [CONTRIB[folder].get(kind, {}) for folder in contrib_folders()]
    return {name: target for added in entries for name, target in added.items()}


def absent_entries(kind: str) -> dict[str, str]:
    """Return name -> folder of the entries of one kind that folders of contrib would add which do not exist."""
    absent = CONTRIB.keys() - set(contrib_folders())
    return {name: folder for folder in sorted(absent) for name in CONTRIB[folder].get(kind, {})}


def use_plugins(declared: Mapping[str, Mapping[str, str]], root: Path) -> None:
    """Put the plugins of a project and those of installed packages into the tables, in place of earlier ones.

    Args:
        declared: kind -> name -> `module:object`.
        root: the project's folder, in which `plugins` is looked up.

    Raises:
        ParamsError: an unknown kind, a name or target that is malformed or taken, or a module that does not exist.
    """
    # A project's plugin replaces one of an installed package with the same name.
    plugins: dict[str, dict[str, str]] = {}
    for kind, targets in _entry_points().items():
        # A built-in entry cannot be replaced.
        builtin = _tables[kind].builtin if kind in _tables else {}
        plugins[kind] = {name: target for name, target in targets.items() if name not in builtin}
    for kind, entries in declared.items():
        for name, target in entries.items():
            _check(kind, name, target, root)
            plugins.setdefault(kind, {})[name] = target
    if has_own_plugins(declared):
        _import_from(root)
    _activate(plugins)


def _activate(plugins: dict[str, dict[str, str]]) -> None:
    """Put plugins into the tables in place of those that are active; a built-in entry cannot be replaced."""
    for kind, table in _tables.items():
        for name in _active.get(kind, {}):
            table.pop(name, None)
        # The right side of `|` wins, so a built-in entry stays what it is.
        table.update(plugins.get(kind, {}) | table.builtin)
    _active.clear()
    _active.update(plugins)


def add_plugins(declared: Mapping[str, Mapping[str, str]], root: Path) -> None:
    """Put more plugins into the tables, next to the active ones; see `use_plugins`.

    A module that both the project and `root` have is the project's.
    """
    for kind, entries in declared.items():
        for name, target in entries.items():
            _check(kind, name, target, root)
        if entries:
            _active.setdefault(kind, {}).update(entries)
            if kind in _tables:
                _tables[kind].update(entries)
    if has_own_plugins(declared):
        _add_to_path(root)


def use_installed_plugins() -> None:
    """Put the plugins of installed packages into the tables, next to those in use: an export is loaded anywhere."""
    for kind, targets in _entry_points().items():
        table: dict[str, str] = _tables.get(kind, {})
        # A plugin of the project, or one that travels with a version, comes before an installed one of the same name.
        new = {name: target for name, target in targets.items() if name not in table}
        _active.setdefault(kind, {}).update(new)
        table.update(new)


def with_plugins(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    """Return the function for another process or machine, which may lack this process's plugins."""
    # Names and folders travel, no code: the other process imports a plugin when it uses it.
    return functools.partial(_call_with_plugins, dict(_active), sorted(_on_path), function)


def _call_with_plugins(
    active: dict[str, dict[str, str]], roots: list[str], function: Callable[[Item], Result], item: Item
) -> Result:
    # A pool's process calls this for each chunk, so usually nothing changes.
    if active != _active:
        _activate(active)
    for root in roots:
        _add_to_path(Path(root))
    return function(item)


def active_plugins(kind: str) -> dict[str, str]:
    """Return name -> target of the plugins of one kind."""
    plugins = dict(_active.get(kind, {}))
    # An entry may also have been put into the table directly.
    if table := _tables.get(kind):
        plugins |= {name: target for name, target in table.items() if name not in table.builtin}
    return plugins


def import_target(target: str) -> Any:
    """Import and return the object at `module:object`.

    Raises:
        ParamsError: it is a plugin's, and its module cannot be imported or lacks the object.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a plugin's code may raise anything
        if module.partition(".")[0] == PACKAGE:
            raise
        # Name the line of the plugin that failed; for a missing class there is only its file.
        machinery = ("<frozen", importlib.__file__, __file__)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(machinery)]
        location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        reason = first_line(error)
        if isinstance(error, AttributeError) and module in sys.modules:
            location = str(getattr(sys.modules[module], "__file__", module))
        elif isinstance(error, SyntaxError):  # the frame is Python's own, which reads the file
            location, reason = f"{error.filename}:{error.lineno}", error.msg
        cause = ": ".join(filter(None, [location, type(error).__name__, reason]))
        raise ParamsError(f"plugin {target}: cannot be imported: {cause}") from error


def package_folder(package: str) -> Path | None:
    """Return the folder of a top-level package, or a module's file; None without one. Imports nothing."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def _import_from(root: Path) -> None:
    """Make `plugins` of a project importable, and remove those of another project."""
    # Python would answer with the modules of the project that was imported first.
    folder = str((root / FOLDER).resolve())
    if FOLDER in sys.modules and folder not in map(str, getattr(sys.modules[FOLDER], "__path__", [])):
        for name in [name for name in sys.modules if name == FOLDER or name.startswith(f"{FOLDER}.")]:
            del sys.modules[name]
    # Only folders that this module added: those of PYTHONPATH stay.
    for other in _on_path - {str(root.resolve())}:
        with contextlib.suppress(ValueError):
            sys.path.remove(other)
        _on_path.discard(other)
    _add_to_path(root)


def has_own_plugins(declared: Mapping[str, Mapping[str, str]]) -> bool:
    """Return whether any plugin is in a project's folder `plugins`, not in an installed package."""
    return any(target.startswith(f"{FOLDER}.") for entries in declared.values() for target in entries.values())


def _add_to_path(root: Path) -> None:
    parent = str(root.resolve())
    if parent not in sys.path:
        # At the end, so that no file of a project hides an installed module.
        sys.path.append(parent)
        _on_path.add(parent)
    # Python caches the listings of folders, and would miss a file that was written a moment ago.
    importlib.invalidate_caches()


def _check(kind: str, name: str, target: str, root: Path) -> None:
    # The opening backtick is closed by each message, after the name or after the target.
    where = f"`plugins.{kind}.{name}"
    if kind not in KINDS:
        raise ParamsError(f"`plugins.{kind}`: no such kind of plugin; known: {', '.join(KINDS)}")
    if not _NAME.fullmatch(str(name)):
        raise ParamsError(f"{where}`: a name has letters, digits, `_` and `-`, and starts with a letter")
    if not isinstance(target, str) or not _TARGET.fullmatch(target):
        raise ParamsError(f"{where}: {target!s:.80}`: expected `module:object`, such as `plugins.my_file:MyClass`")
    if kind in _tables and name in _tables[kind].builtin:
        raise ParamsError(f"{where}`: {name} is built in; choose another name for the plugin")
    module = target.partition(":")[0]
    if module.startswith(f"{FOLDER}."):
        # `plugins.a.b` is plugins/a/b.py or plugins/a/b/__init__.py.
        path = root / Path(*module.split("."))
        if not path.with_suffix(".py").is_file() and not (path / "__init__.py").is_file():
            raise ParamsError(f"{where}: {target}`: {path.with_suffix('.py')} does not exist")
    elif package_folder(module.partition(".")[0]) is None:
        raise ParamsError(f"{where}: {target}`: no package {module.partition('.')[0]} is installed")


@functools.cache
def _entry_points() -> dict[str, dict[str, str]]:
    targets: dict[str, dict[str, str]] = {}
    installed = metadata.entry_points()  # once: this reads a file of every installed package
    for kind in KINDS:
        for point in installed.select(group=f"vlp_flows.{kind}"):
            targets.setdefault(kind, {})[point.name] = point.value
    return targets
