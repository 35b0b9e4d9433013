"""TDEN, Unified VLP, XGPT, VLMo, SOHO and variants of TDEN and XGPT with equal budgets and equal search.

    make leaderboard                                              (runs python studies/leaderboard.py)
    python studies/leaderboard.py --share 0.02 --trials 1 --seeds 2   a rehearsal of some minutes
    python studies/leaderboard.py --finished                      run nothing: write the page of the finished runs
    python studies/leaderboard.py --recorded                      begin with the runs that benchmarks/results has

`--root FLICKR8K` runs it on photographs (requirements-photographs.lock): the designs that read regions, on captioning
and retrieval; VLMo and SOHO read pixels and are left out. Results then have the name leaderboard-photographs.

Budgets, search space and contrasts are in leaderboard.toml, next to this file. A killed run continues where it stopped,
and several processes with the same arguments share the work. Writes benchmarks/results/study-leaderboard.md and
benchmarks/results/study-leaderboard.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretraining_study.arms import TASKS, Pretraining
from pretraining_study.board import (
    BUDGETS,
    Board,
    Design,
    collect,
    compare_all,
    load_recorded,
    measure_costs,
    measure_text_alone,
    read_board_plan,
    search,
)
from pretraining_study.board_page import write_board
from pretraining_study.data import PIXEL_FAMILIES, Data
from pretraining_study.judging import ROWS
from pretraining_study.photos import Photos
from pretraining_study.setting import Setting
from vlmo import IMAGES, TEXTS, pairs

TDEN = ("mlm", "moc", "ism", "msg")
XGPT = ("ic", "imlm", "ida", "tifg")


def of(objectives: Sequence[str], **more: Any) -> Pretraining:
    return Pretraining(objectives=tuple(objectives), updates=1, **more)


def design(name: str, label: str, family: str, *stages: tuple[float, Pretraining]) -> Design:
    return Design(name=name, label=label, family=family, stages=stages)


TURNS = of(XGPT, mix="alternate")
# As in the presets of the same names. `xgpt-two-stage` is `xgpt-two-pass` without its second pass, to compare it with.
DESIGNS = (
    design("tden", "TDEN", "tden", (1.0, of(TDEN))),
    design("tden-two-pass", "TDEN, two passes", "tden", (1.0, of(TDEN, scheduled_sampling="c"))),
    design(
        "unified-vlp",
        "Unified VLP",
        "unified_vlp",
        (1.0, of(("seq2seq", "bidirectional"), mix="sample", shares=(0.75, 0.25))),
    ),
    design("xgpt", "XGPT", "xgpt", (1.0, TURNS)),
    design("xgpt-two-stage", "XGPT, two stages", "xgpt", (0.5, TURNS), (0.5, of(XGPT))),
    design("xgpt-two-pass", "XGPT, two passes", "xgpt", (0.5, TURNS), (0.5, of(XGPT, scheduled_sampling="a"))),
    design("vlmo", "VLMo", "vlmo", (0.25, IMAGES), (0.25, TEXTS), (0.5, pairs("itc", "itm", "mlm"))),
    design(
        "soho",
        "SOHO",
        "soho",
        (1.0, of(("mlm", "mvm", "itm"), weights=(1.0, 0.1, 1.0), frozen=("cnn", "cnn_stem"))),
    ),
)
PLAN = read_board_plan(Path(__file__).resolve().with_suffix(".toml"), [one.name for one in DESIGNS])
SCENES = Board(
    name="leaderboard",
    title="Leaderboard: five models at equal budgets, on synthetic scenes",
    designs=DESIGNS,
    plan=PLAN,
    setting=Setting(side=48, web=3_200, train=200, batch=32, vision_warmup=600, tasks=(*TASKS, *ROWS)),
    script="studies/leaderboard.py",
    notes=(
        "Pixel models (VLMo, SOHO) read drawn scenes, after a vision warm-up that no budget counts. The others read "
        "the same scenes as regions: symbols with noise, through a fixed random projection. Between the two groups the "
        "inputs differ as well as the models.",
        "TDEN's two passes are scheme C from the start. XGPT's are scheme A in a second stage, which reads the second "
        "half of the pairs and sums the four objectives, as XGPT with two stages does in one pass; XGPT itself takes "
        "turns, an update each. VLMo reads images alone for a quarter of its pairs, then texts alone for a quarter. "
        "Each stage has its own optimizer and schedule.",
        "R@1 is among ten images for every model: the caption's own and nine for which it is false.",
    ),
)


def on_photographs(board: Board, root: Path, limit: int | None) -> tuple[Board, Photos]:
    """Return the board for Flickr8k, without the designs and contrasts that need pixels or questions, and its data."""
    designs = tuple(one for one in board.designs if one.family not in PIXEL_FAMILIES)
    names = {one.name for one in designs}
    contrasts = tuple(c for c in board.plan.contrasts if {c.first, c.second} <= names and c.metric in ("nll", "r1"))
    setting = replace(board.setting, side=0, vision_warmup=0, hidden=128, lr=1e-3, train=1000, val=400, test=1000)
    work = board.root / ".work" / "studies" / "photographs"
    photos = Photos.read(root, setting, cells=9, work=work, limit=limit)
    photos.setting = replace(photos.setting, web=len(photos.photos["train"]))
    board = replace(
        board,
        name="leaderboard-photographs",
        title="Leaderboard on photographs: Flickr8k",
        designs=designs,
        plan=replace(board.plan, contrasts=contrasts),
        setting=photos.setting,
        notes=(
            "Regions are nine cells of EfficientNet-lite0 for each photo. VLMo and SOHO: not run.",
            *board.notes[1:],
        ),
    )
    return board, photos


def main(board: Board, arguments: Sequence[str] | None = None) -> None:
    plan = board.plan
    parser = argparse.ArgumentParser(description=board.title)
    parser.add_argument("--seeds", type=int, default=plan.seeds, help=f"seeds 1 to N; the plan: {plan.seeds}")
    parser.add_argument("--trials", type=int, default=plan.trials, help=f"of each design; the plan: {plan.trials}")
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=BUDGETS, help="only these")
    parser.add_argument("--share", type=float, default=1.0, help="of the pairs and updates, for a rehearsal")
    parser.add_argument("--root", type=Path, help="Flickr8k: captions.txt, Images/, the official lists")
    parser.add_argument("--photos", type=int, help="with --root: only so many of each split, for a rehearsal")
    parser.add_argument("--finished", action="store_true", help="run nothing: write the page of the finished runs")
    parser.add_argument("--recorded", action="store_true", help="begin with the runs that benchmarks/results has")
    chosen = parser.parse_args(arguments)
    if min(chosen.seeds, chosen.trials) < 1 or chosen.seeds >= plan.search_seed:
        parser.error("--seeds and --trials must be at least 1, and seeds below the search's")
    board, seeds = board.scaled(chosen.share), range(1, chosen.seeds + 1)
    data: Any = None
    if chosen.root is not None:
        board, data = on_photographs(board, chosen.root, chosen.photos)
    elif not chosen.finished:
        print("making the data", flush=True)
        data = Data(board.setting)
    if chosen.recorded:
        try:
            load_recorded(board)
        except ValueError as error:
            parser.error(str(error))
    costs = measure_costs(board, data)
    measure_text_alone(board, data, seeds)
    if not chosen.finished:
        for line in search(board, data, chosen.trials):
            print(line, flush=True)
        for line in compare_all(board, data, costs, chosen.trials, seeds, chosen.budgets):
            print(line, flush=True)
    found = collect(board, costs, chosen.trials, seeds)
    text = write_board(board, costs, found, trials=chosen.trials, keep=chosen.share == 1 and chosen.photos is None)
    print(text)


if __name__ == "__main__":
    main(SCENES)
