"""The scored pairs as JSON lines, and the ends of the list with their photos as one HTML page without scripts."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlp_models.common.io import write_text
from vlp_models.common.pages import page_environment
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.influence.influence import Scored
from vlp_models.data.images import ImageError
from vlp_models.data.tables import read_table
from vlp_models.serving.images import MAX_BYTES, decode_checked

THUMBNAIL = 220  # pixels of the longer side


def to_jsonl(scored: Scored) -> str:
    """Return a line for each pair, the highest score first."""
    return "".join(
        f"{json.dumps({'run': scored.run, 'task': scored.task, **row}, ensure_ascii=False)}\n" for row in scored.rows
    )


def list_ends(scored: Scored, top: int) -> dict[str, Sequence[dict[str, Any]]]:
    """Return title -> the first pairs of either end, each with its rank, and the nearest images of a prediction."""
    ranked = [{**row, "rank": rank} for rank, row in enumerate(scored.rows, 1)]
    titles = ("more likely with", "less likely with") if scored.query.image_id else ("lower the loss", "raise the loss")
    nearest = {"nearest training images": scored.nearest[:top]} if scored.nearest else {}
    return {titles[0]: ranked[:top], titles[1]: ranked[::-1][:top]} | nearest


def write_page(scored: Scored, workspace: Workspace, path: Path, *, top: int) -> None:
    """Write the page with the `top` pairs of either end, and nearest images; never half of it."""
    template = page_environment(__package__).get_template("page.html.j2")
    lists = {title: [_with_picture(row, workspace) for row in rows] for title, rows in list_ends(scored, top).items()}
    picture = ""
    if scored.query.image_id:
        rows = read_table("images", workspace.validated, ["image_id", "path"]).to_pylist()
        paths = [row["path"] for row in rows if row["image_id"] == scored.query.image_id]
        picture = _picture(workspace.root / paths[0]) if paths else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, template.render(scored=scored, lists=lists, picture=picture))


def _with_picture(row: dict[str, Any], workspace: Workspace) -> dict[str, Any]:
    return {**row, "picture": _picture(workspace.root / row["path"]) if row["path"] else ""}


def _picture(file: Path) -> str:
    """Return a small JPEG as a data URI; empty if the file cannot be read."""
    try:
        if file.stat().st_size > MAX_BYTES:
            return ""
        image = decode_checked(file.read_bytes())
    except (OSError, ImageError):
        return ""
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    output = io.BytesIO()
    image.save(output, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(output.getvalue()).decode()}"
