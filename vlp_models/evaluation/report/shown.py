"""What pretrained models show of themselves (`ShowsItself`), with their patches cut from the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlp_models.common.io import read_json
from vlp_models.common.workspace import Workspace
from vlp_models.evaluation.report.pictures import Picture, Pictures
from vlp_models.models.figures import Figure
from vlp_models.params import Params


@dataclass(frozen=True, kw_only=True)
class ShownGroup:
    name: str
    note: str
    pictures: Sequence[Picture]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A figure of a model, as the page has it."""

    title: str
    about: str
    run: str
    groups: Sequence[ShownGroup]


def shown_by_models(params: Params, workspace: Workspace) -> list[Shown]:
    """The figures of the pretrainings of params.yaml, those that are there."""
    pictures = None
    found = []
    for run in params.pretrain:
        file = workspace.figures(f"pretrain/{run}")
        for value in read_json(file) if file.exists() else ():
            figure = Figure.from_plain(value)
            pictures = pictures or Pictures(workspace, params.validate.max_image_pixels)
            groups = [
                ShownGroup(
                    name=group.name,
                    note=group.note,
                    pictures=[pictures.patch(patch.image_id, patch.box) for patch in group.patches],
                )
                for group in figure.groups
            ]
            found.append(Shown(title=figure.title, about=figure.about, run=run, groups=groups))
    return found
