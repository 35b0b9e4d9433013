"""Configuration of the docs: `make docs` builds them into docs/_build/html; every warning is an error.

DOCS_REPOSITORY=https://... links source files to a public repository.
"""

import sys
from importlib.metadata import version as package_version
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent.parent)]

project = "vlp-flows"
author = "The vlp-flows authors"
copyright = "2026, The vlp-flows authors"
try:
    release = package_version("vlp-flows")
except Exception:
    release = "0.1.0"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "site_pages",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext", "pictures/*.py"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 4
html_math_renderer = "mathml"
copybutton_exclude = ".linenos, .gp, .go"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
suppress_warnings = ["myst.strikethrough"]
default_role = "code"  # single backticks of docstrings

html_theme = "furo"
html_title = "vlp-flows"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#3b5bdb", "color-brand-content": "#3b5bdb"},
    "dark_css_variables": {"color-brand-primary": "#91a7ff", "color-brand-content": "#91a7ff"},
    "top_of_page_buttons": [],
}
