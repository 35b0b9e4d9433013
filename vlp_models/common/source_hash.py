"""Which of this package's files a module runs on: it, what it imports, and so on; read from the source, not run.

A stage depends on exactly these files (`dvc.yaml`, through data/plan/code), and a training that goes on after a kill
goes on only with the same ones. Imports inside functions count, those for type checkers alone don't. What is looked up
by name (a model family, a task, a format, a world) is no import: each has a record of its own, so the table of names
does not count either. A new line in it makes nothing stale that was there before.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from vlp_models.errors import ParamsError

PACKAGE = "vlp_models"
ROOT = Path(__file__).parents[1]  # of the package that runs
TABLES = ("FAMILIES", "TASKS", "FORMATS", "GENERATORS")  # of places by name: `module:Class`


def other_package(folder: Path) -> Path | None:
    """Return the `vlp_models` package inside `folder` if it is not the one that is running."""
    theirs = folder.absolute() / PACKAGE
    return theirs if (theirs / "cli").is_dir() and not ROOT.samefile(theirs) else None


def refuse_other_package(folder: Path) -> None:
    """Refuse to work in a checkout whose code is not the code that runs: DVC would record the wrong source hashes.

    Raises:
        ParamsError: `folder` holds another copy of this package.
    """
    theirs = other_package(folder)
    if theirs is not None:
        raise ParamsError(
            f"{folder / 'params.yaml'}: this folder has its own code ({theirs}), but {ROOT} is running; "
            f"run `make install` there, or set PYTHONPATH={theirs.parent}"
        )


def hash_sources(modules: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """{path below the package: sha256} of the modules and all that they import, by path.

    modules: dotted names, such as `vlp_models.pipeline.stages.pretrain`, or `module:name` targets, such as
    `vlp_models.tasks.vqa:VQA`, which are listed themselves as well. A folder's other files (templates, fonts) come
    with any module of it.

    Raises:
        ValueError: there is no such module.
    """
    names = sorted(modules)
    todo, found = [_file(name.partition(":")[0], root) for name in names], set[Path]()
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        todo += [root.joinpath(*parts, "__init__.py") for parts in _packages(path, root)]
        todo += [other for other in path.parent.iterdir() if other.is_file() and _counts(other)]
        if path.suffix == ".py":
            todo += _imported(path, root)
    places = {name: "" for name in names if ":" in name}
    files = {str(path.relative_to(root)): hash_source(path) for path in sorted(found)}
    return places | files


def _counts(other: Path) -> bool:
    """A file that is no module: what an editor or a desktop leaves there, hidden, is no part of the program."""
    return other.suffix not in (".py", ".pyc") and not other.name.startswith(".")


def code_hash(modules: Iterable[str], root: Path = ROOT) -> str:
    """One hash for all these files."""
    digest = hashlib.sha256()
    for name, sha256 in hash_sources(modules, root).items():
        digest.update(f"{sha256}  {name}\n".encode())
    return digest.hexdigest()


def hash_source(path: Path) -> str:
    """The sha256 by which `hash_sources` knows a file: without the tables."""
    return _sha256(path, path.stat().st_mtime_ns)


def _file(name: str, root: Path) -> Path:
    parts = name.split(".")[1:]
    for path in (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py")):
        if path.is_file():
            return path
    raise ValueError(f"{name}: no such module in {root}")


def _packages(path: Path, root: Path) -> list[tuple[str, ...]]:
    """Importing a.b.c runs a and a.b as well."""
    parts = path.relative_to(root).parts[:-1]
    return [parts[:n] for n in range(len(parts) + 1)]


@functools.cache
def _sha256(path: Path, changed: int) -> str:
    return hash_source_text(path.read_bytes(), path.name)


def hash_source_text(content: bytes, name: str) -> str:
    """`hash_source` of what a file holds, such as git's of another commit."""
    package = name.rpartition("/")[2] == "__init__.py"
    return hashlib.sha256(_without_tables(content) if package else content).hexdigest()


def _without_tables(source: bytes) -> bytes:
    lines = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id in TABLES for target in targets):
            lines[node.lineno - 1 : node.end_lineno] = [b""] * (node.end_lineno - node.lineno + 1)  # type: ignore[operator]
    return b"".join(lines)


def _imported(path: Path, root: Path) -> list[Path]:
    return [root / name for name in _imports(path, root, path.stat().st_mtime_ns)]


@functools.cache
def _imports(path: Path, root: Path, changed: int) -> tuple[str, ...]:
    """The package's files that the file at `path` imports by itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    names: set[str] = set()
    _collect(tree, names, [PACKAGE, *path.relative_to(root).parts[:-1]])
    found = set()
    for name in names:
        try:
            found.add(str(_file(name, root).relative_to(root)))
        except ValueError:
            continue  # an attribute of the module before it
    return tuple(sorted(found))


def _collect(node: ast.AST, names: set[str], package: list[str]) -> None:
    """package: the file's own, which relative imports begin with."""
    if isinstance(node, ast.Import):
        names |= {alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE}
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) + 1 - node.level] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        if module.split(".")[0] == PACKAGE:
            names.add(module)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    for_types = isinstance(node, ast.If) and _is_for_types(node.test)
    for child in node.orelse if for_types else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        _collect(child, names, package)


def _is_for_types(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"
