"""What the docs add to Sphinx: checked source references, drawings, formulas as MathML, and generated reference pages.

{src}`vlp_models/models/tden/model.py`   a file or folder of the repository; the build fails if it does not exist
```{drawing} pipeline```                 a diagram of drawings.py, inline, in the colors of the theme
$...$ and $$...$$                        MathML, which browsers draw without a script
reference/params.md, cli.md, objectives.md  written from the schema of params.yaml, the commands and the models
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).parent))
from drawings import DRAWINGS, ROOT, draw

logger = logging.getLogger(__name__)
ENTRY = re.compile(r"^([\w./]+(?:, [\w./]+)*) {2,}(\S.*)$")  # of a docstring: `name  meaning`


def source_role(
    name: str, rawtext: str, text: str, lineno: int, inliner: Any, options: Any = None, content: Any = None
) -> tuple[list[nodes.Node], list[nodes.Node]]:
    """Refer to a file of the repository; warn (an error in a strict build) if it does not exist.

    It is a link if the environment variable DOCS_REPOSITORY has the repository's address.
    """
    if not (ROOT / text).exists():
        source = inliner.document.settings.env.docname
        logger.warning("no such file: %s", text, location=(source, lineno))
    literal = nodes.literal(rawtext, text, classes=["file"])
    repository = os.environ.get("DOCS_REPOSITORY", "").rstrip("/")
    if not repository:
        return [literal], []
    return [nodes.reference("", "", literal, refuri=f"{repository}/blob/main/{text}")], []


class DrawingDirective(Directive):
    """Insert a drawing."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in DRAWINGS:
            raise self.error(f"no drawing {name!r}; there are {', '.join(DRAWINGS)}")
        return [nodes.raw("", f'<figure class="drawing">{draw(name)}</figure>', format="html")]


def write_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def write_math_block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def write_reference(app: Sphinx) -> None:
    """Write the generated pages of reference/ before Sphinx reads the sources."""
    from reference import cli_page, objectives_page, params_page

    for name, make in (("params", params_page), ("cli", cli_page), ("objectives", objectives_page)):
        path = Path(app.srcdir) / "reference" / f"{name}.md"
        text = make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def tidy_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn the plain tables of our docstrings (`name  meaning`) into field lists, and Markdown tables into text."""
    tidied: list[str] = []
    entry = False  # the line before is one of a table of ours, or continues it
    for line in lines:
        if line.startswith("|"):
            tidied += [] if tidied and tidied[-1].startswith("    |") else ["::", ""]
            tidied.append(f"    {line}")
        elif match := ENTRY.match(line):
            tidied += [] if entry else [""]
            tidied.append(f":{match[1]}: {match[2]}")
            entry = True
            continue
        elif entry and line.startswith("  "):
            tidied.append(f"    {line.strip()}")
            continue
        else:
            tidied += ["", line] if entry or (tidied and tidied[-1].startswith("    |")) else [line]
        entry = False
    lines[:] = tidied


def check_sizes(app: Sphinx, env: Any) -> None:
    """Warn of a page over 12 kB, which should be split. Generated references are exempt."""
    for name in env.found_docs:
        size = Path(env.doc2path(name)).stat().st_size
        if size > 12_288 and name not in ("reference/params", "reference/cli"):
            logger.warning("page of %d bytes; the limit is 12,288", size, location=name)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("src", source_role)
    app.add_directive("drawing", DrawingDirective)
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", tidy_docstring)
    app.connect("env-updated", check_sizes)
    try:
        app.add_html_math_renderer("mathml", (write_math, None), (write_math_block, None))
    except ExtensionError as error:
        logger.warning("%s", error)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
