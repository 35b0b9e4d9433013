"""`vlp export`: a registered version as a folder that other projects load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlp_models.errors import DataError, ParamsError

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
    if to not in FORMATS:
        raise ParamsError(f"vlp export: --to {to}: unknown layout; known: {', '.join(FORMATS)}")
    if weights not in WEIGHTS:
        raise ParamsError(f"vlp export: --weights {weights}: unknown; known: {', '.join(WEIGHTS)}")
    if margin is not None and weights != "int8":
        raise ParamsError("vlp export: --margin is for --weights int8")
    from contextlib import ExitStack

    from vlp_models.common.workspace import SEARCH, Workspace
    from vlp_models.params import load_params
    from vlp_models.pipeline.equivalence import compare_bundles, int8_bundle
    from vlp_models.registry.card import make_hub_card
    from vlp_models.registry.client import connect, mlflow_errors
    from vlp_models.registry.evaluations import read_lineage, read_scores
    from vlp_models.registry.licenses import find_borrowed, hub_identifier
    from vlp_models.registry.versions import download_verified_bundle, resolve_version
    from vlp_models.serving.bundle import read_bundle_info
    from vlp_models.serving.export import check_target, write_export
    from vlp_models.tasks.caption_search import CAPTIONS

    check_target(Path(directory))
    params, workspace = load_params(), Workspace()
    with mlflow_errors(params):
        client = connect(params.tracking, workspace.root)
        found = resolve_version(client, params.tracking, version)
        bundle = download_verified_bundle(found)
        lineage, scores = read_lineage(client, found), read_scores(client, found)
    name = f"{found.name} version {found.version}"
    borrowed = find_borrowed(lineage or {})
    unknown = [f"{one.role} `{one.source}`" for one in borrowed if not one.license]
    if lineage is None:
        unknown = ["all weights, since the version has no lineage"]
    if unknown and not accept_unknown_license:
        raise DataError(
            f"{name}: unknown license: {', '.join(unknown)}; find out whether the weights may be passed on, then pass "
            "--accept-unknown-license"
        )
    holds_captions = (bundle / SEARCH / CAPTIONS).exists()
    with ExitStack() as stack:
        tested = ""
        if weights == "int8":
            original, bundle = bundle, stack.enter_context(int8_bundle(bundle, workspace.root / ".work"))
            compared = compare_bundles(params, workspace, original, bundle, lineage or {}, margin)
            tested = str(compared)
            if not compared.shown:
                raise DataError(f"{name}: not exported: {tested}; export it with float32, or pass a larger --margin")
        card = make_hub_card(
            title=found.name,
            info=read_bundle_info(bundle),
            scores=scores,
            lineage=lineage or {},
            license=license or hub_identifier(borrowed),
            borrowed=borrowed,
            holds_captions=holds_captions,
            int8=tested,
        )
        write_export(bundle, Path(directory), card)
    size = sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())
    print(f"{directory}: {name}, {size / 2**20:.1f} MB")
    if tested:
        print(f"  {tested}")
    for one in borrowed:
        print(f"  {one.role} {one.source}: {one.license or 'unknown license'}")
    if holds_captions:
        print("  search/ holds captions of training images, which the model looks up")
    if not license and not borrowed:
        print("  no license stated; `--license apache-2.0`, for example, states one in README.md")
    print(f'  from vlp_models import VLP; model = VLP.from_pretrained("{directory}")')
