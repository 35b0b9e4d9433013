"""`vlp label`."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from vlp_models.common.user import current_user
from vlp_models.errors import DataError, ParamsError, Terminated

if TYPE_CHECKING:
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.label.desk import Desk
    from vlp_models.data.formats.pairs import PairsParams
    from vlp_models.params import Params

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def label(
    dataset: Annotated[
        str, typer.Argument(help="A dataset of params.yaml in the format pairs; default: the only one.")
    ] = "",
    order: Annotated[
        Literal["active", "random", "file"],
        typer.Option(help="Which photo comes next: those unlike the labeled ones first, at random, or by name."),
    ] = "active",
    drafts: Annotated[
        Literal["champion", "similar", "none"],
        typer.Option(help="Drafts: of the champion (without one, as similar), of the most similar photo, or none."),
    ] = "champion",
    split: Annotated[
        Literal["train", "val", "test"], typer.Option(help="The labels' split, if the listing names splits.")
    ] = "train",
    language: Annotated[str, typer.Option("--lang", help="The captions' language code, such as de.")] = "",
    by: Annotated[
        str, typer.Option(help="The name that is proposed on the page; default: the current user.", show_default=False)
    ] = "",
    host: Annotated[
        str, typer.Option(help="Address to listen on; default: localhost only.", show_default=False)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7861,
) -> None:
    """Caption photos on a web page: accept a draft with one key, or correct it. Each answer is saved at once.

    The photos are those in the dataset's folder without a row in its listing; a missing listing is created.

    Example: `vlp label` or `vlp label pairs --order random`
    """
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.label.background import Background
    from vlp_models.contrib.label.server import ALL_ADDRESSES, bind, make_app, own_hosts, read_token, serve
    from vlp_models.params import load_params

    params, workspace = load_params(), Workspace()
    name, source = choose_dataset(params, dataset)
    listener = bind(host, port)  # before anything is read: the port may be in use
    folder = workspace.root / ".work" / "label" / name
    desk = open_desk(params, workspace, name, source, order=order, kind=drafts, split=split, language=language)
    token = read_token(folder.parent / "token")
    title = f"Caption photos of {name}"
    app = make_app(
        desk,
        token=token,
        hosts=own_hosts(host, port),
        user=by or current_user(),
        title=title,
        cookie=f"vlp-label-{port}",  # cookies of all ports of a host are shared
    )
    # For all addresses of the machine, its name is one that a browser can open.
    name_of_host = socket.gethostname() if host in ALL_ADDRESSES else host
    shown = f"[{name_of_host}]" if ":" in name_of_host else name_of_host
    progress = desk.progress()
    print(f"{progress['labeled']:,} of {progress['photos']:,} photos in {source.root} have a caption")
    print(f"open http://{shown}:{port}/?token={token}; press Ctrl-C to stop", flush=True)
    if host not in LOOPBACK:
        print("this address works from other machines, unencrypted; anyone who has it can add captions", flush=True)
    Background(desk, params, workspace, folder, lambda text: print(text, file=sys.stderr, flush=True)).start()
    signal.signal(signal.SIGTERM, _terminate)  # the server raises the signal that ended it again
    with suppress(KeyboardInterrupt, Terminated):
        serve(app, listener)
    print(describe_end(desk, source, workspace), flush=True)


def choose_dataset(params: Params, name: str) -> tuple[str, PairsParams]:
    """Return the dataset to label, by its name or because it is the only one with a listing.

    Raises:
        ParamsError: it is not in params.yaml, or its listing is not a single file.
    """
    from vlp_models.data.formats import source_params

    pairs = {key: source for key, source in params.data.items() if source.format == "pairs"}
    if name and name not in pairs:
        raise ParamsError(f"vlp label {name}: not a dataset of the format pairs; params.yaml has {_list(pairs)}")
    if not name and len(pairs) != 1:
        raise ParamsError(
            f"vlp label: params.yaml has {_list(pairs)} in the format pairs; "
            + ("name one" if pairs else "`vlp use few-pairs` adds one for the folder data/raw/pairs")
        )
    key = name or next(iter(pairs))
    source = cast("PairsParams", source_params(key, pairs[key]))
    if not source.pairs or "*" in source.pairs:
        raise ParamsError(
            f"params.yaml: data.{key}.pairs: {source.pairs!r} is not a single file, to which captions could be added; "
            "label in a dataset of its own"
        )
    return key, source


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def open_desk(
    params: Params,
    workspace: Workspace,
    name: str,
    source: PairsParams,
    *,
    order: Literal["active", "random", "file"] = "active",
    kind: str = "champion",
    split: str = "train",
    language: str = "",
) -> Desk:
    """Read the listing and find the photos.

    Raises:
        DataError: the folder is missing, has no photo, or its listing cannot be extended.
        ParamsError: an option does not fit the listing.
    """
    from vlp_models.contrib.label.desk import Desk
    from vlp_models.contrib.label.listing import Listing
    from vlp_models.contrib.label.photos import Photos
    from vlp_models.contrib.label.queue import PhotoQueue
    from vlp_models.data.formats.splits import Division, split_held_out
    from vlp_models.data.tables import UNKNOWN, standard_language

    if language and standard_language(language) == UNKNOWN:
        raise ParamsError(f"vlp label --lang {language}: not a language code, such as de or pt-BR")
    path = workspace.root / source.root / source.pairs
    if not path.parent.is_dir():
        raise DataError(f"{path.parent}: no such folder; put the photos there, or set data.{name}.root")
    lock = workspace.root / ".work" / "label" / f"{name}.lock"
    listing = Listing(path, lock, params.validate, split=split, language=language)
    photos = Photos(path.parent, name, workspace, params.validate)
    names = photos.find()
    if not names:
        raise DataError(f"{path.parent}: no photo (JPEG, PNG, WebP, GIF or BMP) in this folder or below it")
    if not listing.names_splits and split != "train":
        raise ParamsError(
            f"vlp label --split {split}: {path} names no splits, so photos are divided by a hash of their name"
        )
    division = Division(names)

    def split_of(photo: str) -> str:
        if listing.names_splits:
            return split_held_out(photo, source.val_fraction) if split == "train" else split
        return division.split_of(photo)

    return Desk(photos, listing, PhotoQueue(names, split_of, order), names, kind=kind)


def describe_end(desk: Desk, source: PairsParams, workspace: Workspace) -> str:
    """Return what was labeled, and what to do next."""
    progress, answered = desk.progress(), desk.progress()["answered"]
    parts = ", ".join(f"{count:,} {state}" for state, count in sorted(answered.items()) if count)
    lines = [f"{sum(answered.values()):,} captions saved{f' ({parts})' if parts else ''}"]
    lines.append(f"{progress['labeled']:,} of {progress['photos']:,} photos have a caption")
    tracked = Path(f"{workspace.root / source.root}.dvc")
    steps = [f"dvc add {source.root}", f"git add {source.root}.dvc"] if tracked.exists() else []
    if answered:
        lines.append("next: " + ", ".join(f"`{step}`" for step in [*steps, "vlp run"]))
    return "\n".join(lines)


def _terminate(received: int, frame: object) -> None:
    raise Terminated()


COMMANDS = {"New data": {"label": label}}
WORK: dict[str, str] = {}
