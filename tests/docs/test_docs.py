"""README and docs agree with the code: commands, options, links, figures, sources, generated pages, sizes.

test_docs_commands.py runs the commands, test_figures.py compares figures with the files they come from.
`make docs` checks the rest: it fails on every broken reference between pages, missing file and unknown drawing.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from vlp_models.cli.main import app
from vlp_models.cli.presets import list_presets

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
READMES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "data/README.md")]
GENERATED = {"params": "params_page", "cli": "cli_page", "objectives": "objectives_page"}
FENCE = re.compile(r"^```([^`\n]*)\n(.*?)^```$\n?", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def commands(page: Path) -> Iterator[list[str]]:
    """Yield every `vlp` command of a page, in blocks and in the text."""
    text = page.read_text(encoding="utf-8")
    blocks = [body for language, body in FENCE.findall(text) if language in ("bash", "console", "")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(vlp [a-z][^`]*)`", FENCE.sub("", text))
    for line in lines:
        for part in re.split(r"&&|;|\|", line.strip().removeprefix("$ ")):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # a part of a quoted text
                continue
            if words and words[0] == "vlp" and len(words) > 1:
                yield words[1:]


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_options_and_presets_exist(page: Path) -> None:
    known: Any = typer.main.get_command(app)
    for name, *words in commands(page):
        if name.startswith("-") or name.isupper() or name == "...":
            continue
        assert name in known.commands, f"`vlp {name}`"
        options = {option for p in known.commands[name].params for option in [*p.opts, *p.secondary_opts]}
        for word in words:
            option = word.partition("=")[0]
            assert not word.startswith("--") or option in options | {"--help"}, f"`vlp {name} {word}`"
        preset = words[0] if name == "use" and words and re.fullmatch(r"[a-z][\w-]+", words[0]) else ""
        assert preset in {"", "toy", *list_presets()}, f"`vlp use {preset}`"


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_links_of_the_readmes_exist(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_figures_of_the_readme_are_those_of_the_docs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Results")[2].partition("## Limits")[0]
    docs = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "results").glob("*.md"))
    figures = {n for row in re.findall(r"^\|.*\|$", section, re.M) for n in NUMBER.findall(row.split("|", 3)[-1])}
    assert figures
    missing = {n for n in figures if n not in NUMBER.findall(docs)}
    assert not missing, "in README, not in docs/results"


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=lambda page: page.stem)
def test_tables_of_figures_name_their_source(page: Path) -> None:
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.M):
        measured = re.findall(r"(?<![\w.@])\d+\.\d+", "\n".join(re.findall(r"^\|.*\|$", section, re.M)))
        assert len(measured) < 3 or "Source:" in section, section.partition("\n")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_page_is_short(page: Path) -> None:
    if page.parent.name != "reference" or page.stem not in {"params", "cli"}:
        assert page.stat().st_size <= 12_288


@pytest.mark.parametrize(("name", "function"), GENERATED.items())
def test_generated_pages_are_up_to_date(name: str, function: str) -> None:
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        import reference
    finally:
        sys.path.pop(0)
    text = (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
    assert text == getattr(reference, function)(), "run `make docs`, and commit the page"


@pytest.mark.parametrize("bundle", sorted((DOCS / "results" / "runs").glob("*.run.zip")), ids=lambda path: path.stem)
def test_figures_of_the_demo_replay_from_their_bundles(bundle: Path) -> None:
    from vlp_models.contrib.bundles.replay import score
    from vlp_models.contrib.bundles.run_bundle import open_bundle

    assert not [finding for finding in score(open_bundle(bundle)) if finding.equal is False]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("params/load.py", "not found; run in the project root, or pass --params"),
        ("common/packages.py", "not installed; install it with"),
        ("params/schema.py", "; did you mean `"),
        ("pipeline/dvc/external.py", "it should hold a dataset of the format "),
        ("pipeline/stages/validate.py", "validate: more bad rows than validate.max_bad_fraction allows ("),
        (
            "common/lock.py",
            "is using this workspace; wait for it to finish or stop it (training saves its state first)",
        ),
        ("registry/promotion/gate.py", " baseline has on the same "),
        ("registry/versions.py", ": nothing registered; run `vlp run`, then `vlp promote`"),
        ("cli/pipeline.py", "The pipeline stopped at the stage above. Finished stages are kept"),
    ],
)
def test_messages_of_first_failures_are_those_of_the_code(file: str, message: str) -> None:
    source = (ROOT / "vlp_models" / file).read_text(encoding="utf-8")
    assert message in re.sub(r'"\n\s*f?"', "", source), "and correct docs/get-started/troubleshooting.md"
    assert message in (DOCS / "get-started" / "troubleshooting.md").read_text(encoding="utf-8")
