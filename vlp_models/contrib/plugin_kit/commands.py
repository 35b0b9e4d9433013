"""Commands for models, tasks and formats of your own: new writes one from a scaffold, try checks it in seconds."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlp_models.errors import ParamsError

if TYPE_CHECKING:
    from vlp_models.contrib.plugin_kit.conformance.checks import Result

SCAFFOLDS = Path(__file__).parent / "scaffolds"


@dataclass(frozen=True, kw_only=True)
class Scaffold:
    """A kind of plugin that `vlp new` writes.

    table    its section of params.yaml's `plugins`
    target   `module:object`, of its `{name}` and the name of its class, `{Name}`
    example  the name that the scaffold has, and its class and title, which are replaced
    """

    table: str
    target: str
    example: tuple[str, str, str]


KINDS = {
    "family": Scaffold(table="families", target="plugins.{name}.model:{Name}", example=("toy", "Toy", "")),
    "task": Scaffold(
        table="tasks", target="plugins.{name}:{Name}", example=("guess_color", "GuessColor", "Guess the color")
    ),
    "format": Scaffold(table="formats", target="plugins.{name}:read", example=("captions_tsv", "", "")),
}
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*")


def try_plugin(
    name: Annotated[
        str,
        typer.Argument(
            help="A family, a task or a format: built in, or named under `plugins` in params.yaml.",
            autocompletion=lambda: [name for names in _tables().values() for name in names],
        ),
    ],
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", "-S", help="`key=value`: the family's config, or the format's keys in `data.NAME`."),
    ] = None,
    root: Annotated[str, typer.Option(help="Formats: the folder to read.")] = "",
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Families: also compare two processes with one; ten seconds more.")
    ] = False,
) -> None:
    """Check a model family, a task or a format in seconds, without running the pipeline.

    A family or a task is tried on eight synthetic scenes, in a temporary folder: it builds, trains, predicts and loads,
    and no row depends on padding or on other rows. A built-in family is tried at a small size. A format reads the
    folder given by --root, and how many rows each table has is printed. Exits with 1 if a check fails.
    Example: `vlp try toy --set hidden=64`
    """
    from rich.console import Console
    from rich.text import Text

    from vlp_models.cli.presets import merge_into, parse_assignment
    from vlp_models.common.redaction import redact
    from vlp_models.params import to_plain

    kind = _kind_of(name)
    merged: dict[str, Any] = {}
    for assignment in assign or []:
        merge_into(merged, parse_assignment(assignment), "", [])
    config = to_plain(merged)
    if kind != "formats" and root:
        raise ParamsError(f"--root is for formats; {name} is not one of them")
    if kind != "families" and ranks:
        raise ParamsError(f"--ranks is for families; {name} is not one of them")
    if kind == "tasks" and assign:
        raise ParamsError(f"--set is for families and formats; set the options of {name} in `finetune.RUN.options`")
    if kind == "formats" and not root:
        raise ParamsError(f"vlp try {name}: name the folder to read: `vlp try {name} --root FOLDER`")
    failed = False
    for result in _try_format(name, root, config) if kind == "formats" else _try_on_scenes(name, kind, config, ranks):
        text = redact(result.problem or result.detail)
        state, style = ("problem", "red") if result.problem else ("ok", "green")
        line = Text.assemble((f"{state:8}", style), result.check, f": {text}" if text else "")
        Console(soft_wrap=True).print(line)
        failed = failed or bool(result.problem)
    if failed:
        raise typer.Exit(1)


def _try_on_scenes(name: str, kind: str, config: dict[str, Any], ranks: bool) -> Iterator[Result]:
    import torch

    from vlp_models.contrib.plugin_kit.conformance.families import try_family
    from vlp_models.contrib.plugin_kit.conformance.scenes import write_sample_scenes
    from vlp_models.contrib.plugin_kit.conformance.tasks import try_task

    torch.set_num_threads(1)  # small models: more threads slow them down
    with tempfile.TemporaryDirectory(prefix="vlp-try-") as folder:
        scenes = write_sample_scenes(Path(folder))
        yield from try_family(name, config, scenes, ranks=ranks) if kind == "families" else try_task(name, scenes)


def _try_format(name: str, root: str, config: dict[str, Any]) -> Iterator[Result]:
    from vlp_models.contrib.plugin_kit.conformance.formats import try_format
    from vlp_models.params import DatasetParams, build

    params = build(DatasetParams, {**config, "format": name, "root": root}, where="data.NAME", file="--set")
    return try_format(params, Path.cwd())


def _tables() -> dict[str, list[str]]:
    """Return kind -> names, with the plugins of params.yaml if the folder has one."""
    from vlp_models.data.formats import FORMATS
    from vlp_models.models import FAMILIES
    from vlp_models.params import load_params
    from vlp_models.tasks import TASKS

    # Loading params.yaml registers its plugins in the tables.
    if Path("params.yaml").exists():
        load_params()
    return {"families": list(FAMILIES), "tasks": list(TASKS), "formats": list(FORMATS)}


def _kind_of(name: str) -> str:
    """Return the table that a name is in."""
    from vlp_models.params.schema import suggestion

    tables = _tables()
    kinds = [kind for kind, names in tables.items() if name in names]
    if not kinds:
        all_names = [other for names in tables.values() for other in names]
        raise ParamsError(
            f"no family, task or format `{name}`{suggestion(name, all_names)}; `vlp new family {name}` writes one"
        )
    if len(kinds) > 1:
        raise ParamsError(f"{name} is the name of several plugins ({', '.join(kinds)}); rename one in params.yaml")
    return kinds[0]


def new(
    kind: Annotated[str, typer.Argument(help="family, task or format.", autocompletion=lambda: list(KINDS))],
    name: Annotated[str, typer.Argument(help="Its name: lower-case letters, digits and `_`.")],
) -> None:
    """Write a plugin from a scaffold, a complete small example, and name it in params.yaml.

    A family is a dual encoder of pixels that also writes captions, a task guesses a color, a format reads captions.tsv.
    Each works as it is: `vlp try NAME`, then change it. Example: `vlp new family toy && vlp try toy`
    """
    from vlp_models.cli.pipeline import plan_files, run_lock
    from vlp_models.cli.presets import merge_overlay
    from vlp_models.common.io import write_together
    from vlp_models.common.plugins import use_plugins
    from vlp_models.common.workspace import Workspace
    from vlp_models.params import load_params

    files = scaffold(kind, name, Path.cwd())
    table, target = KINDS[kind].table, KINDS[kind].target.format(name=name, Name=class_name(name))
    workspace, params_file = Workspace(), Path("params.yaml")
    with run_lock(workspace, "new"):
        # Files first: params.yaml can only name a plugin that can be imported. All or nothing.
        declared = {k: dict(v) for k, v in load_params(params_file).plugins.items()}
        written: list[Path] = []
        try:
            for path, text in files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
                written.append(path)
            merged = merge_overlay(params_file, None, [f"plugins.{table}.{name}={target}"])
            planned = plan_files(merged.params, workspace, merged.facts, merged.raw)
            write_together({params_file: merged.text, **planned})
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # a folder that is not empty stays
                    path.parent.rmdir()
                    path.parent.parent.rmdir()
            # The tables of this process must not name a plugin whose files were removed.
            use_plugins(declared, Path.cwd())
            raise
    for path in files:
        print(path.relative_to(Path.cwd()))
    print(f"params.yaml: plugins.{table}.{name}: {target}")
    print(f"\nnext: vlp try {name}{' --root FOLDER' if kind == 'format' else ''}")


def scaffold(kind: str, name: str, root: Path) -> dict[Path, str]:
    """Return path -> text of a new plugin in the project `root`.

    Raises:
        ParamsError: an unknown kind, or a name that is not an identifier, is taken, or whose file exists.
    """
    from keyword import iskeyword

    from vlp_models.params.schema import suggestion

    if kind not in KINDS:
        raise ParamsError(f"no scaffold for a `{kind}`{suggestion(kind, KINDS)}")
    if not _IDENTIFIER.fullmatch(name) or iskeyword(name):
        raise ParamsError(
            f"`{name}` cannot be a Python module: use lower-case letters, digits and `_`, starting with a letter"
        )
    for table, names in _tables().items():
        if name in names:
            raise ParamsError(f"the name {name} is taken: it is one of the {table}; choose another one")
    folder = root / "plugins"
    # A package or a module of this name would be imported in place of the other.
    for path in (folder / name, folder / f"{name}.py"):
        if path.exists():
            raise ParamsError(f"{path}: exists; choose another name, or move it away")
    example, source = KINDS[kind].example, SCAFFOLDS / kind
    file = source / f"{example[0]}.py"
    if file.exists():
        return {folder / f"{name}.py": _rename(file, example, name)}
    return {folder / name / path.name: _rename(path, example, name) for path in sorted(source.glob("*.py"))}


def class_name(name: str) -> str:
    """Return the name of the plugin's class: `my_model` -> `MyModel`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _rename(file: Path, example: tuple[str, str, str], name: str) -> str:
    """Return a scaffold's text with the name, class and title of another plugin."""
    text = file.read_text(encoding="utf-8")
    new_names = (name, class_name(name), name.replace("_", " ").capitalize())
    for before, after in zip(example, new_names, strict=True):
        # `Toy` in `ToyConfig` as well, but not in a longer word
        text = re.sub(rf"\b{before}(?=\b|[A-Z])", after, text) if before else text
    return text


COMMANDS = {"Your own models, tasks and formats": {"new": new, "try": try_plugin}}
WORK = {"new": "checking params.yaml"}
