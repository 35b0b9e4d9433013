"""A campaign continues after its last complete line, and a fixed loss counts as fixed."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import campaign
import pytest
from ground import Ground
from injure import KINDS, draw
from moments import Outcome

STAGES = ["validate", "shards", "pretrain@tden", "finetune@tden-vqa", "register", "report"]


class Finished(Ground):
    """A ground without a pipeline: only its stages are read."""

    @property
    def stages(self) -> list[str]:
        return STAGES


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"seed": 1, "count": 5, "only": None, "kind": None, "reports": folder, **changes})


def session(
    options: argparse.Namespace, most: int, problems: tuple[int, ...] = (), missed: tuple[int, ...] = ()
) -> list[int]:
    """Run a session of `most` faults; return their numbers."""
    numbers = []
    for number in itertools.islice(campaign._numbers(options, Finished(options.reports / "ground")), most):
        outcome = Outcome(draw(options.seed, number, STAGES), hit=number not in missed, seconds=1.0)
        outcome.problems += ["lost"] * (number in problems)
        alone = options.only is not None or bool(options.kind)
        record = {"seed": options.seed, "alone": alone, "ended": "", "code": "", **outcome.record}
        campaign._append(options.reports / campaign.FILE, record)
        numbers.append(number)
    return numbers


def test_campaign_continues_and_ends_with_enough_hits(tmp_path: Path) -> None:
    assert session(options(tmp_path), 3, missed=(1,)) == [0, 1, 2]
    file = tmp_path / campaign.FILE
    file.write_text(file.read_text() + '{"seed": 1, "num')  # killed while writing
    assert session(options(tmp_path), 100) == [3, 4, 5], "five in all; one came too late"
    assert session(options(tmp_path), 100) == []
    assert session(options(tmp_path, count=7), 100) == [6, 7]
    assert session(options(tmp_path, seed=2, count=2), 100) == [0, 1], "another seed starts at 0"
    assert [record["number"] for record in campaign.read(file)] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


def test_loss_counts_until_the_same_fault_is_survived(tmp_path: Path) -> None:
    session(options(tmp_path), 2, problems=(1,))
    file = tmp_path / campaign.FILE
    assert [record["number"] for record in campaign.still_lost(campaign.read(file))] == [1]
    assert session(options(tmp_path, only=1), 9) == [1]
    assert campaign.still_lost(campaign.read(file)) == []
    page = campaign._page(options(tmp_path), campaign.read(file))
    assert "1 lost; of these 1 were fixed" in page and "## Lost" in page
    assert session(options(tmp_path, count=3), 9) == [2], "a fault injected alone does not count"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn_and_can_be_requested(kind: str, tmp_path: Path) -> None:
    kinds = {draw(1, number, STAGES).kind for number in range(400)}
    assert kind in kinds
    number = session(options(tmp_path, kind=kind, count=1), 1)[0]
    assert draw(1, number, STAGES).kind == kind
    assert draw(1, number, STAGES) == draw(1, number, STAGES)
    assert json.loads((tmp_path / campaign.FILE).read_text())["alone"] is True
