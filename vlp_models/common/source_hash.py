"""The source files that a module runs on: its own, those it imports, and so on. Read from the source, nothing is run.

A stage depends on exactly these files (`dvc.yaml`, through data/plan/code), and a training resumes after a kill only
with the same ones. A file counts by its syntax tree: comments, docstrings and layout make nothing stale. Imports inside
functions count, imports for type checkers do not. A name that is looked up in a
table (model family, converter, task, format, generator) is not an import: each has its own list of files, and the
tables themselves do not count, so a new entry makes no existing result stale.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from vlp_models.common.io import stat_file
from vlp_models.errors import ParamsError

PACKAGE = "vlp_models"
ROOT = Path(__file__).parents[1]  # of the package that is running
TABLES = ("FAMILIES", "TASKS", "FORMATS", "GENERATORS", "READERS", "IMAGE_READERS")  # name -> `module:Class`


def other_package(folder: Path) -> Path | None:
    """Return the `vlp_models` package inside `folder` if its code differs from the one that is running.

    In a temporary copy of the project by `dvc exp run --temp` or `--queue`, the code of the original runs: the same,
    unless it has been edited since.
    """
    theirs = folder.absolute() / PACKAGE
    if not (theirs / "cli").is_dir() or ROOT.samefile(theirs):
        return None
    ours, copied = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.py")} for root in (ROOT, theirs)
    )
    return None if ours == copied else theirs


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
    """Return path below the package -> sha256 for the modules and everything that they import.

    Args:
        modules: dotted names such as `vlp_models.pipeline.stages.pretrain`, or targets such as
            `vlp_models.tasks.vqa:VQA`, which are listed themselves as well. The other files of a module's folder
            (templates, fonts) belong to the module.

    Raises:
        ValueError: a module does not exist.
    """
    names = sorted(modules)
    todo, found = [_file_of(name.partition(":")[0], root) for name in names], set[Path]()
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        parts = path.relative_to(root).parts[:-1]
        todo += [
            root.joinpath(*parts[:n], "__init__.py") for n in range(len(parts) + 1)
        ]  # importing a.b runs a as well
        # Hidden files are what an editor or a desktop leaves there.
        files = (other for other in path.parent.iterdir() if other.is_file() and not other.name.startswith("."))
        todo += [other for other in files if other.suffix not in (".py", ".pyc")]
        if path.suffix == ".py":
            todo += [root / name for name in _imports(path, root, stat_file(path.stat()))]
    targets = {name: "" for name in names if ":" in name}
    return targets | {str(path.relative_to(root)): hash_source(path) for path in sorted(found)}


def code_hash(modules: Iterable[str], root: Path = ROOT) -> str:
    """Return one hash for all files of `hash_sources`."""
    digest = hashlib.sha256()
    for name, sha256 in hash_sources(modules, root).items():
        digest.update(f"{sha256}  {name}\n".encode())
    return digest.hexdigest()


def hash_source(path: Path) -> str:
    """Return the sha256 of what a source file does: its syntax tree without docstrings and tables."""
    return _hash_source(path, stat_file(path.stat()))


def hash_source_text(content: bytes, name: str) -> str:
    """Return `hash_source` of a file's content, such as that of another git commit."""
    if name.endswith(".py"):
        with contextlib.suppress(SyntaxError, ValueError):  # a damaged file has a hash, too
            tree = ast.parse(content)
            _drop_docstrings_and_tables(tree, is_package=name.rpartition("/")[2] == "__init__.py")
            content = _structure(tree).encode(errors="surrogatepass")
    return hashlib.sha256(content).hexdigest()


@functools.cache
def _hash_source(path: Path, changed: tuple[int, ...]) -> str:
    return hash_source_text(path.read_bytes(), path.name)


def _drop_docstrings_and_tables(tree: ast.Module, is_package: bool) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                del node.body[0]
    if is_package:
        tree.body = [node for node in tree.body if not _is_table(node)]


def _is_table(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id in TABLES for target in targets)


def _structure(node: object) -> str:
    """Return a syntax tree as text that is the same in every version of Python, unlike `ast.dump`'s."""
    if isinstance(node, ast.AST):
        # Versions differ in which empty fields a node has.
        fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return f"{type(node).__name__}({','.join(f'{name}={_structure(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_structure, node))}]"
    return repr(node)


def _file_of(module: str, root: Path) -> Path:
    parts = module.split(".")[1:]
    for path in (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py")):
        if path.is_file():
            return path
    raise ValueError(f"{module}: no such module in {root}")


@functools.cache
def _imports(path: Path, root: Path, changed: tuple[int, ...]) -> tuple[str, ...]:
    """Return the package's files that the file at `path` imports directly."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    names: set[str] = set()
    _collect_imports(tree, names, [PACKAGE, *path.relative_to(root).parts[:-1]])
    found = set()
    for name in names:
        try:
            found.add(str(_file_of(name, root).relative_to(root)))
        except ValueError:
            continue  # an attribute of a module
    return tuple(sorted(found))


def _collect_imports(node: ast.AST, names: set[str], package: list[str]) -> None:
    """Add the dotted names that `node` imports. package: the file's own, which relative imports start from."""
    if isinstance(node, ast.Import):
        names |= {alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE}
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) + 1 - node.level] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        if module.split(".")[0] == PACKAGE:
            names.add(module)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    # Of `if TYPE_CHECKING:` only the `else` branch runs.
    test = node.test if isinstance(node, ast.If) else None
    for_types = getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"
    for child in node.orelse if for_types else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        _collect_imports(child, names, package)
