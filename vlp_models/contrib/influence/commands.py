"""`vlp influence`."""

from __future__ import annotations

from typing import Annotated

import typer


def influence(
    run: Annotated[str, typer.Argument(help="A fine-tuning run, or a version of the checkpoint that is here.")],
    split: Annotated[str, typer.Option(help="The split whose mean loss is explained.")] = "val",
    prediction: Annotated[
        str, typer.Option(help="Explain this prediction instead: an image, question or caption id.", show_default=False)
    ] = "",
    top: Annotated[int, typer.Option(min=0, help="How many pairs of each end to print, and to show on the page.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Draws the batches and their order.")] = 1,
) -> None:
    """Score each training pair of a run: whether leaving it out would raise or lower the loss, or change a prediction.

    Example: `vlp influence tden-captioning`, or with `--prediction coco/000123.jpg`
    """
    from vlp_models.common.io import write_text
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.influence.influence import resolve_run, score_run
    from vlp_models.contrib.influence.page import list_ends, to_jsonl, write_page
    from vlp_models.params import load_params
    from vlp_models.pipeline.guard import stopped_by_signals

    params, workspace = load_params(), Workspace()
    with stopped_by_signals("influence"):
        run = resolve_run(params, workspace, run)
        scored = score_run(params, workspace, run, split=split, prediction=prediction, seed=seed)
    # `validate` reads the scores for val: a test score must not choose the training data.
    name = "influence-prediction" if prediction else "influence" if split == "val" else f"influence-{split}"
    page = workspace.reports / f"{name}.html"
    if not prediction:
        write_text(page.with_suffix(".jsonl"), to_jsonl(scored))
    write_page(scored, workspace, page, top=top)
    print(f"{scored.run}: {len(scored.rows):,} training pairs scored for {scored.query.title}")
    for title, rows in list_ends(scored, top).items():
        print(f"{title}:")
        for row in rows:
            number = f"{row['similarity']:.3f}" if "similarity" in row else f"{row['rank']:6,}."
            print(f"  {number}  {row['pair_id']}: {row['text']!r:.100}")
    print(f"page      {page}")


COMMANDS = {"New data": {"influence": influence}}
WORK: dict[str, str] = {}
