"""`vlp label`."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

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
    import uvicorn

    from vlp_models.common.user import current_user
    from vlp_models.common.workspace import Workspace
    from vlp_models.contrib.label.background import Background
    from vlp_models.contrib.label.desk import choose_dataset, open_desk
    from vlp_models.contrib.label.server import ALL_ADDRESSES, bind, make_app, read_token
    from vlp_models.params import load_params
    from vlp_models.pipeline.guard import stopped_by_signals

    params, workspace = load_params(), Workspace()
    name, source = choose_dataset(params, dataset)
    listener = bind(host, port)  # before anything is read: the port may be in use
    desk = open_desk(params, workspace, name, source, order=order, kind=drafts, split=split, language=language)
    folder = workspace.root / ".work" / "label"
    token = read_token(folder / "token")
    cookie = f"vlp-label-{port}"  # cookies of all ports of a host are shared
    title = f"Caption photos of {name}"
    app = make_app(desk, token=token, host=host, user=by or current_user(), title=title, cookie=cookie)
    # For all addresses of the machine, its name is one that a browser can open.
    shown = socket.gethostname() if host in ALL_ADDRESSES else f"[{host}]" if ":" in host else host
    progress = desk.progress()
    print(f"{progress['labeled']:,} of {progress['photos']:,} photos in {source.root} have a caption")
    print(f"open http://{shown}:{port}/?token={token}; press Ctrl-C to stop", flush=True)
    if host not in LOOPBACK:
        print("this address works from other machines, unencrypted; anyone who has it can add captions", flush=True)
    Background(desk, params, workspace, folder / name).start()
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
    config.timeout_graceful_shutdown = 3
    try:
        # The server raises the signal that ended it again: Ctrl-C is the usual end, SIGTERM exits with 143.
        with suppress(KeyboardInterrupt), stopped_by_signals("vlp label", announce=False):
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        progress = desk.progress()
        print(f"{desk.saved:,} captions saved")
        print(f"{progress['labeled']:,} of {progress['photos']:,} photos have a caption")
        tracked = Path(f"{workspace.root / source.root}.dvc").exists()
        steps = f"`dvc add {source.root}`, `git add {source.root}.dvc`, " if tracked else ""
        if desk.saved:
            print(f"next: {steps}`vlp run`", flush=True)


COMMANDS = {"New data": {"label": label}}
WORK: dict[str, str] = {}
