"""The sections of the report: a large picture at the top, examples above the results, figures and curves below them."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from vlp_models.common.pages import page_environment
from vlp_models.contrib.report_pictures.curves import read_curves
from vlp_models.contrib.report_pictures.galleries import choose_highlights, read_galleries
from vlp_models.contrib.report_pictures.pictures import Pictures, read_figures
from vlp_models.evaluation.report import ReportContext, Section

GALLERIES_SHOWN = 4  # before all are folded once more
HERO = 640  # pixels of the longer side of the picture at the top
CURVES_SHOWN = 6  # charts; if there are more, all but half of that are folded


def pictures(context: ReportContext) -> Section:
    """Return the examples of all runs, the figures that pretrainings saved, and the curves of all trainings."""
    environment = page_environment(__package__)

    def render(name: str, **values: Any) -> Markup:
        return Markup(environment.get_template(name).render(**values))

    params, workspace = context.params, context.workspace
    galleries = read_galleries(context)
    highlights = choose_highlights(galleries)
    top = Markup("")
    if highlights.cards:
        examples, card = highlights.cards[0]
        # Without boxes: it is the photo that a reader looks at first.
        picture = Pictures(workspace, params.validate.max_image_pixels).get(card.picture.image_id, HERO)
        top = render("hero.html.j2", examples=examples, card=card, picture=picture)
    return Section(
        top=top,
        above=render(
            "examples.html.j2",
            galleries=galleries,
            highlights=highlights,
            GALLERIES_SHOWN=GALLERIES_SHOWN,
        ),
        below=render(
            "training.html.j2",
            figures=read_figures(params, workspace),
            curves=read_curves(params, workspace),
            CURVES_SHOWN=CURVES_SHOWN,
        ),
    )
