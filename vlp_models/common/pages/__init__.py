"""Self-contained HTML pages: one file without scripts or external assets, with the look of style.css.j2."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


def page_environment(package: str) -> Environment:
    """Return the environment for the templates in a package's folder; they may include `style.css.j2`.

    Autoescaping is on: captions and names come from the data.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        # The package's own templates come first; StrictUndefined turns a missing value into an error.
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("vlp_models.common.pages", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["number"] = format_number
    return environment


def format_number(value: float) -> str:
    """Format large counts as integers, other numbers with up to two decimals."""
    if float(value).is_integer() and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:,.2f}".rstrip("0").rstrip(".")
