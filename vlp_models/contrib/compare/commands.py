"""`vlp compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlp_models.errors import ParamsError

EVALUATED = Path("reports/eval")  # of a project


def compare(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]FILE",
            help="Result files, the baseline's first. Files of one name are seeds of one model. In a project, names of "
            "evaluated runs, too.",
            show_default=False,
        ),
    ],
    metric: Annotated[
        list[str] | None, typer.Option(help="What to compare by, if the files have several; may be repeated.")
    ] = None,
    common: Annotated[
        bool, typer.Option("--common", help="Compare on the items that all files have; the others are listed.")
    ] = False,
    lower: Annotated[bool, typer.Option("--lower-is-better", help="The metric is a loss or an error rate.")] = False,
    relevant: Annotated[
        float,
        typer.Option(
            min=0,
            help="The smallest gain that matters, in the metric's unit: `keep` also if so large a gain is ruled out.",
        ),
    ] = 0.0,
    seed_std: Annotated[
        float, typer.Option("--seed-std", min=0, help="Known standard deviation of the metric over seeds of one model.")
    ] = 0.0,
    item: Annotated[str, typer.Option(help="Column that identifies an item.")] = "",
    score: Annotated[str, typer.Option(help="Column with the scores.")] = "",
    cluster: Annotated[
        str,
        typer.Option(help="Column that names an item's cluster, such as its image: a cluster is resampled as a whole."),
    ] = "",
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of the intervals and the verdicts.")] = 0.95,
    resamples: Annotated[int, typer.Option(min=100, help="Draws of each test.")] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the comparison as a page.")] = None,
) -> None:
    """Compare models by the scores of their test items: promote, keep or inconclusive.

    Reads the results of this project (items.parquet, or a run's folder), lmms-eval and lm-evaluation-harness (samples),
    VLMEvalKit, Inspect, and any table with the columns item, score and, if there are, cluster, seed, model and metric.
    Values are means of the scores per item. p is two-sided, and corrected for the number of rows, as are the intervals.
    `detectable` is the smallest gain that the test finds with 80% power.

    Example: `vlp compare old=old.csv new=new-seed1.csv new=new-seed2.csv --html comparison.html`
    """
    from vlp_models.contrib.compare.comparison import compare as compare_files
    from vlp_models.contrib.compare.page import as_json as to_json
    from vlp_models.contrib.compare.page import print_comparison, write_page
    from vlp_models.contrib.compare.scored import Columns

    if html is not None and html.is_dir():
        raise ParamsError(f"--html {html}: a folder; name the file to write")
    comparison = compare_files(
        [_of_project(file) for file in files],
        columns=Columns(item=item, score=score, cluster=cluster),
        metrics=tuple(metric or ()),
        common=common,
        lower_is_better=lower,
        relevant=relevant,
        seed_std=seed_std,
        confidence=confidence,
        resamples=resamples,
    )
    if html is not None:
        write_page(comparison, html)
    if as_json:
        print(to_json(comparison), end="")
        return
    print_comparison(comparison)
    if html is not None:
        print(f"page: {html}")


def _of_project(file: str) -> str:
    """Return the folder of an evaluated run of this project, if `file` names one; else `file`."""
    # The name may contain `=`, a path of this project does not: split at the last one.
    name, equals, path = file.rpartition("=")
    folder = EVALUATED / path
    return f"{name}{equals}{folder}" if not Path(path).exists() and (folder / "items.parquet").exists() else file


COMMANDS = {"Compare models, check figures": {"compare": compare}}
WORK: dict[str, str] = {}  # it shows its own progress
