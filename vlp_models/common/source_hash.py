"""The source files that a module runs on: its own, those it imports, and so on. Read from the source, nothing is run.

A stage depends on exactly these files (`dvc.yaml`, through data/plan/code), and a training resumes after a kill only
with the same ones. A file counts by its syntax tree: comments, docstrings and layout make nothing stale. Imports inside
functions count, imports for type checkers do not. A plugin's files are those that it imports from its own package and
from this one. A name that is looked up in a table (model family, converter, task, format, view, generator) is not an
import: each has its own list of files, and the tables themselves do not count, so a new entry makes no existing result
stale.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vlp_models.common.io import read_json_or_none, stat_file, to_json
from vlp_models.common.packages import FOLDER, OWN, own_record, recorded_version
from vlp_models.common.plugins import FOLDER as PLUGINS
from vlp_models.common.plugins import KINDS, PACKAGE, active_plugins, package_folder
from vlp_models.errors import ParamsError

ROOT = Path(__file__).parents[1]  # of the package that is running
# Tables of an `__init__.py` that list entries; in the others all entries come from CONTRIB.
TABLES = ("CONTRIB", "FAMILIES", "FORMATS", "GENERATORS", "REGION_SOURCES", "TASKS", "VIEW_MODULES")


def other_package(folder: Path) -> Path | None:
    """Return the `vlp_models` package inside `folder` if its code differs from the one that is running.

    In a temporary copy of the project by `dvc exp run --temp` or `--queue`, the code of the original runs: the same,
    unless it has been edited since.
    """
    package = folder.absolute() / PACKAGE
    if not (package / "cli").is_dir() or ROOT.samefile(package):
        return None
    running = {path.relative_to(ROOT): path.read_bytes() for path in ROOT.rglob("*.py")}
    other = {path.relative_to(package): path.read_bytes() for path in package.rglob("*.py")}
    return None if running == other else package


def refuse_other_package(folder: Path) -> None:
    """Refuse to work in a checkout whose code is not the code that runs: DVC would record the wrong source hashes."""
    package = other_package(folder)
    if package is not None:
        raise ParamsError(
            f"{folder / 'params.yaml'}: this folder has its own code ({package}), but {ROOT} is running; "
            f"run `make install` there, or set PYTHONPATH={package.parent}"
        )


def hash_sources(modules: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """Return path below the package -> sha256 for the modules and everything that they import.

    Args:
        modules: dotted names such as `vlp_models.pipeline.stages.pretrain`, or targets such as
            `vlp_models.tasks.vqa:VQA`, which are listed themselves as well. The other files of a module's folder
            (templates, fonts) belong to the module. The path of a plugin's file starts with its package's name and `:`.
    """
    names = sorted(modules)
    # Follow imports from the modules until no file is new.
    pending = [_find(name.partition(":")[0], root) for name in names]
    hashes: dict[Path, tuple[str, str]] = {}  # file -> its name, sha256
    # Imports may be circular, so each file is read once.
    while pending:
        source = pending.pop()
        if source.path not in hashes:
            sha256, imports = _read(source, root, stat_file(source.path.stat()))
            hashes[source.path] = (source.name, sha256)
            pending += [*source.files_next_to_it(), *imports]
    # A target is listed as well: another class of the same file is another dependency.
    targets = {name: "" for name in names if ":" in name}
    return targets | dict(sorted(hashes.values()))


def plugin_packages() -> dict[str, Path]:
    """Return the top-level packages of the active plugins -> their folder, or the file of a module."""
    targets = [target for kind in KINDS for target in active_plugins(kind).values()]
    names = {target.partition(":")[0].partition(".")[0] for target in targets}
    folders = {name: package_folder(name) for name in sorted(names - {PACKAGE})}
    return {name: folder for name, folder in folders.items() if folder is not None}


def outdated_plugin_records(targets: Iterable[str], root: Path) -> dict[Path, str]:
    """Return path -> new text of each packages/PACKAGE.json that does not match the installed package of plugins.

    Args:
        targets: `module:object` of plugins in use; those in the project's own folder need no record.
    """
    packages: dict[str, list[str]] = {}
    for target in targets:
        package = target.partition(":")[0].partition(".")[0]
        if package not in (PACKAGE, PLUGINS):
            packages.setdefault(package, []).append(target)
    records = {root / plugin_record(name): describe_plugins(name, plugins) for name, plugins in packages.items()}
    return {path: to_json(record) for path, record in records.items() if read_json_or_none(path) != record}


def plugin_record(package: str) -> str:
    """Return the path that DVC tracks for an installed package of plugins, whose folder differs between machines."""
    return f"{FOLDER}/{package}.json"


def describe_plugins(package: str, targets: Iterable[str]) -> dict[str, Any]:
    """Return name and version of the installed package of plugins, and a hash of the files of it that they run on."""
    names = sorted(set(targets))
    own_files = {name: sha256 for name, sha256 in hash_sources(names).items() if name.startswith(f"{package}:")}
    distributions = metadata.packages_distributions().get(package, [])
    return {
        "package": next(iter(distributions), package),
        "version": metadata.version(distributions[0]) if distributions else "",
        "plugins": names,
        "code": hashlib.sha256(to_json(own_files).encode()).hexdigest(),
    }


def changed_packages(root: Path) -> list[str]:
    """Return the installed packages whose code is not what the project's records have: this one, those of plugins."""
    changed = [OWN] if recorded_version(root) and own_record(root) else []
    for file in sorted((root / FOLDER).glob("*.json")):
        record = read_json_or_none(file)
        if isinstance(record, dict) and "plugins" in record:
            try:
                is_same = describe_plugins(file.stem, record["plugins"]) == record
            except (ValueError, ParamsError):  # the package is gone, or its code is not Python
                is_same = False
            changed += [] if is_same else [str(record["package"])]
    return changed


def code_hash(modules: Iterable[str]) -> str:
    """Return one hash for all files of `hash_sources`."""
    digest = hashlib.sha256()
    for name, sha256 in hash_sources(modules).items():
        # As `sha256sum` prints a line.
        digest.update(f"{sha256}  {name}\n".encode())
    return digest.hexdigest()


def hash_source(path: Path) -> str:
    """Return the sha256 of a source file's syntax tree without docstrings and tables."""
    return hash_source_text(path.read_bytes(), path.name)


def hash_source_text(content: bytes, name: str) -> str:
    """Return `hash_source` of a file's content, such as that of another git commit."""
    if name.endswith(".py"):
        return _hash_python(content, name.rpartition("/")[2] == "__init__.py")
    return hashlib.sha256(content).hexdigest()


@functools.lru_cache(2048)  # registered versions hold copies of the same files
def _hash_python(content: bytes, is_package: bool) -> str:
    with contextlib.suppress(SyntaxError, ValueError):  # a damaged file has a hash, too
        return _hash_tree(ast.parse(content), is_package)
    return hashlib.sha256(content).hexdigest()


def _hash_tree(tree: ast.Module, is_package: bool) -> str:
    _drop_docstrings(tree)
    # The tables of an `__init__.py` do not count, so a new entry makes nothing stale.
    if is_package:
        tree.body = [node for node in tree.body if not _is_table(node)]
    return hashlib.sha256(_structure(tree).encode()).hexdigest()


_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")  # the fields of statements that hold statements


def _drop_docstrings(block: ast.AST) -> None:
    for statement in _statements(block):
        _drop_docstrings(statement)
    if isinstance(block, _WITH_DOCSTRING) and block.body:
        first = block.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            del block.body[0]


def _statements(block: ast.AST, fields: Sequence[str] = _BLOCKS) -> list[ast.AST]:
    return [statement for name in fields for statement in getattr(block, name, ())]


def _is_table(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id in TABLES for target in targets)


def _structure(node: object) -> str:
    """Return a syntax tree as text that is the same in every version of Python, unlike `ast.dump`'s."""
    if isinstance(node, ast.AST):
        fields = []
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != []:  # versions differ in which empty fields a node has
                fields.append(f"{name}={_structure(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join([_structure(value) for value in node])}]"
    return repr(node)


@dataclass(frozen=True)
class _Source:
    """A file of a package. folder: the package's, or the file itself if the package is a single module."""

    package: str
    folder: Path
    path: Path

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders between the package's and the file."""
        return self.path.relative_to(self.folder).parts[:-1]

    @property
    def name(self) -> str:
        name = self.path.name if self.path == self.folder else self.path.relative_to(self.folder).as_posix()
        return name if self.package == PACKAGE else f"{self.package}:{name}"

    def files_next_to_it(self) -> list[_Source]:
        """Return the `__init__.py` that an import runs before the file, and the data files in its folder."""
        # A single-file package has no folder.
        if self.path == self.folder:
            return []
        # Of `vlp_models/a/b.py`: vlp_models/__init__.py and vlp_models/a/__init__.py.
        inits = (self.folder.joinpath(*self.parts[:n], "__init__.py") for n in range(len(self.parts) + 1))
        # Hidden files are what an editor or a desktop leaves there.
        data = [
            path for path in self.path.parent.iterdir() if path.suffix not in (".py", ".pyc") and path.name[0] != "."
        ]
        return [_Source(self.package, self.folder, path) for path in (*inits, *data) if path.is_file()]


def _find(module: str, root: Path) -> _Source:
    package, *parts = module.split(".")
    folder = root if package == PACKAGE else package_folder(package)
    if folder is not None and folder.is_file() and not parts:
        return _Source(package, folder, folder)
    if folder is not None:
        # A module `a.b` is a/b.py or a/b/__init__.py.
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return _Source(package, folder, path)
    raise ValueError(f"{module}: no such module in {folder or 'the installed packages'}")


# Cached per file and its `stat_file` numbers (`changed`): an edited file is read again.
@functools.cache
def _read(source: _Source, root: Path, changed: tuple[int, ...]) -> tuple[str, tuple[_Source, ...]]:
    """Return a file's hash, and the files of this package, and of the source's own, that it imports directly."""
    content = source.path.read_bytes()
    if source.path.suffix != ".py":
        return hash_source_text(content, source.path.name), ()
    try:
        tree = ast.parse(content, filename=str(source.path))
    except SyntaxError as error:
        raise ParamsError(f"{source.path}:{error.lineno}: SyntaxError: {error.msg}") from None
    names: set[str] = set()
    parts = [] if source.path == source.folder else list(source.parts)
    _collect_imports(tree, names, [source.package, *parts])
    imports = []
    for name in sorted(names):
        with contextlib.suppress(ValueError):  # an attribute of a module
            imports.append(_find(name, root))
    return _hash_tree(tree, source.path.name == "__init__.py"), tuple(imports)


def _collect_imports(node: ast.AST, names: set[str], package: list[str]) -> None:
    """Add the dotted names that `node` imports. package: the file's own, which relative imports start from."""
    followed = (PACKAGE, package[0])
    if isinstance(node, ast.Import):
        names |= {alias.name for alias in node.names if alias.name.split(".")[0] in followed}
    elif isinstance(node, ast.ImportFrom):
        # One dot is the file's own package, each further dot the one above it.
        base = package[: len(package) + 1 - node.level] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        if module.split(".")[0] in followed:
            names.add(module)
            # `from a import b`: b may be a module or an attribute of a; `_read` drops what is not a file.
            names |= {f"{module}.{alias.name}" for alias in node.names}
    # Of `if TYPE_CHECKING:` only the `else` branch runs.
    test = node.test if isinstance(node, ast.If) else None
    for_types = getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"
    for child in _statements(node, ("orelse",) if for_types else _BLOCKS):
        _collect_imports(child, names, package)
