"""`vlp export`: a registered version as a folder that other projects load."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlp_models.errors import DataError, MissingToolError, ParamsError

if TYPE_CHECKING:
    from vlp_models.contrib.export.licenses import BorrowedWeights

FORMATS = ("hf",)
WEIGHTS = ("float32", "int8")


def export(
    version: Annotated[str, typer.Argument(help="A task or version: vqa, vlp-vqa/3, vlp-vqa@champion.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The new folder.")],
    to: Annotated[str, typer.Option(help="The layout: hf, that of the Hugging Face Hub.")] = "hf",
    weights: Annotated[
        str,
        typer.Option(
            help="float32, or int8: linear layers with 8 bits a weight, if an equivalence test on this project's test "
            "data shows no loss beyond --margin.",
        ),
    ] = "float32",
    margin: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="For int8: the largest difference, in the gate's metric; default: its deviation over seeds.",
            show_default=False,
        ),
    ] = None,
    license: Annotated[
        str,
        typer.Option(
            help="The model card's license, as the Hub names it, e.g. apache-2.0; default: that of the weights it "
            "started from.",
            show_default=False,
        ),
    ] = "",
    accept_unknown_license: Annotated[
        bool,
        typer.Option("--accept-unknown-license", help="Export even if the license of borrowed weights is unknown."),
    ] = False,
) -> None:
    """Export a registered version to a folder that `VLP.from_pretrained` loads anywhere.

    Example: `vlp export captioning my-captioner`
    """
    for option, value, values in (("--to", to, FORMATS), ("--weights", weights, WEIGHTS)):
        if value not in values:
            raise ParamsError(f"vlp export: {option} {value}: unknown; known: {', '.join(values)}")
    if margin is not None and weights != "int8":
        raise ParamsError("vlp export: --margin is for --weights int8")

    # After the options were checked, since these imports take seconds.
    from vlp_models.common.plugins import import_target
    from vlp_models.common.workspace import SEARCH, Workspace
    from vlp_models.contrib.export.card import hub_identifier, make_hub_card
    from vlp_models.contrib.export.layout import EXPORT_WEIGHTS, check_target, write_export
    from vlp_models.contrib.export.licenses import find_borrowed
    from vlp_models.params import load_params
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.evaluations import read_lineage, read_scores
    from vlp_models.registry.versions import download_verified_bundle, resolve_version
    from vlp_models.serving.bundle import read_bundle_info
    from vlp_models.tasks.caption_search import CAPTIONS

    if weights != "float32" and weights not in EXPORT_WEIGHTS:
        raise MissingToolError("vlp export: --weights int8 needs vlp_models/contrib/int8, which is not installed")
    target = Path(directory)
    # Before a download that may take minutes.
    check_target(target)
    params, workspace = load_params(), Workspace()
    with mlflow_errors(params):
        client = connect(params.tracking, workspace.root)
        registered = resolve_version(client, params.tracking, version)
        bundle = download_verified_bundle(registered)
        lineage, scores = read_lineage(client, registered), read_scores(client, registered)
    name = f"{registered.name} version {registered.version}"

    borrowed = find_borrowed(lineage or {})
    if not accept_unknown_license:
        _check_licenses(name, borrowed, lineage)
    # The bundle itself, unless other weights are made from it; those are deleted when the block ends.
    exports: AbstractContextManager[tuple[Path, str]] = nullcontext((bundle, ""))
    if weights != "float32":
        make_bundle = import_target(EXPORT_WEIGHTS[weights])
        exports = make_bundle(params, workspace, bundle, lineage or {}, margin, name)
    with exports as (exported, equivalence):
        holds_captions = (exported / SEARCH / CAPTIONS).exists()
        card = make_hub_card(
            title=registered.name,
            info=read_bundle_info(exported),
            scores=scores,
            lineage=lineage or {},
            license=license or hub_identifier(borrowed),
            borrowed=borrowed,
            holds_captions=holds_captions,
            int8=equivalence,
        )
        write_export(exported, target, card)

    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{directory}: {name}, {size / 2**20:.1f} MB")
    if equivalence:
        print(f"  {equivalence}")
    for source in borrowed:
        print(f"  {source.role} {source.source}: {source.license or 'unknown license'}")
    if holds_captions:
        print("  search/ holds captions of training images, which the model looks up")
    if not license and not borrowed:
        print("  no license stated; `--license apache-2.0`, for example, states one in README.md")
    print(f'  from vlp_models import VLP; model = VLP.from_pretrained("{directory}")')


def _check_licenses(name: str, borrowed: list[BorrowedWeights], lineage: dict[str, Any] | None) -> None:
    """Check that the licenses of all weights that the version started from are known."""
    unknown = [f"{source.role} `{source.source}`" for source in borrowed if not source.license]
    if lineage is None:
        unknown = ["all weights, since the version has no lineage"]
    if unknown:
        raise DataError(
            f"{name}: unknown license: {', '.join(unknown)}; find out whether the weights may be passed on, then pass "
            "--accept-unknown-license"
        )


COMMANDS = {"Use a model": {"export": export}}
WORK = {"export": "reading the registry"}
