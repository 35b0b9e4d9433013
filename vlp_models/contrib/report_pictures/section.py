"""The section of the report: examples above the results; figures and training curves below them."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from vlp_models.common.pages import page_environment
from vlp_models.contrib.report_pictures.curves import read_curves
from vlp_models.contrib.report_pictures.galleries import choose_highlights, read_galleries
from vlp_models.contrib.report_pictures.pictures import read_figures
from vlp_models.evaluation.report import ReportContext, Section

GALLERIES_SHOWN = 4  # before all are folded once more
CURVES_SHOWN = 6  # charts; if there are more, all but half of that are folded


def pictures(context: ReportContext) -> Section:
    """Return the examples of all runs, the figures that pretrainings saved, and the curves of all trainings."""
    environment = page_environment(__package__)

    def render(name: str, **values: Any) -> Markup:
        return Markup(environment.get_template(name).render(**values))

    params, workspace = context.params, context.workspace
    galleries = read_galleries(params, workspace, context.missing)
    return Section(
        above=render(
            "examples.html.j2",
            galleries=galleries,
            highlights=choose_highlights(galleries),
            GALLERIES_SHOWN=GALLERIES_SHOWN,
        ),
        below=render(
            "training.html.j2",
            figures=read_figures(params, workspace),
            curves=read_curves(params, workspace),
            CURVES_SHOWN=CURVES_SHOWN,
        ),
    )
