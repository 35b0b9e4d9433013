"""The leaderboard at a tiny size: equal budgets, equal search, resumed runs, and a page that names every tie."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import leaderboard
import pytest
import torch
from pretraining_study import adapter, board
from pretraining_study.board import BUDGETS, Board, best, pairs_of, score, suggest
from pretraining_study.board_page import judge_board, write_board
from pretraining_study.data import Data
from pretraining_study.learn import pretraining
from pretraining_study.setting import Setting

TINY = Setting(
    web=48,
    train=8,
    val=4,
    test=12,
    questions=2,
    hidden=16,
    heads=2,
    batch=8,
    feature_dim=12,
    side=48,
    vision_warmup=1,
    tasks=leaderboard.SCENES.setting.tasks,
)
CAPTIONS = {"nll", "cider", "true"}
SOME = ("tden", "unified-vlp", "xgpt-two-pass", "vlmo")  # of each kind one, to save minutes
FUSED = {"answer_nll", "vqa", "entailment_nll", "entailment", "nlvr2_nll", "nlvr2", "vcr_nll", "vcr"}
TASKS = {
    "tden": CAPTIONS | FUSED | {"r1"},
    "unified-vlp": CAPTIONS | FUSED,
    "xgpt-two-pass": CAPTIONS,
    "vlmo": FUSED | {"r1"},
}


def tiny(root: Path) -> Board:
    plan = dataclasses.replace(leaderboard.PLAN, pairs=32, tuning_updates=1, trials=2, seeds=2)
    contrasts = tuple(c for c in plan.contrasts if {c.first, c.second} <= set(SOME))
    plan = dataclasses.replace(plan, contrasts=contrasts)
    designs = tuple(design for design in leaderboard.DESIGNS if design.name in SOME)
    return dataclasses.replace(leaderboard.SCENES, setting=TINY, plan=plan, designs=designs, root=root)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Board:
    """A board after the command has run once, and once killed before that."""
    small = tiny(tmp_path_factory.mktemp("board"))
    whole, count, data = board.train_and_measure, 0, Data(TINY)

    def dies(*arguments: Any, **more: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == 12:  # in the comparison: the search has 8 runs
            raise KeyboardInterrupt
        return whole(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "train_and_measure", dies)
        patch.setattr(leaderboard, "Data", lambda setting: data)  # its drawing takes seconds
        patch.setattr(board, "ROUNDS", 4)
        patch.setattr(Data, "small", lambda self: self)
        patch.setattr(board, "measure_memory", lambda *_: {"parameters": 1, "memory": 1.0})  # a process each
        with pytest.raises(KeyboardInterrupt):
            leaderboard.main(small, [])
        before = {file: file.stat().st_mtime_ns for file in small.results.directory.rglob("*.json")}
        assert len([file for file in before if file.name.startswith("seed-")]) == 11
        count = 100
        leaderboard.main(small, [])
        assert {file: file.stat().st_mtime_ns for file in before} == before, "a finished run was made again"
        count = 11
        leaderboard.main(small, [])  # nothing is left, so nothing dies
    return small


def results(small: Board) -> tuple[Mapping[str, Any], Any]:
    costs = board.measure_costs(small, None)
    return costs, board.collect(small, costs, 2, [1, 2])


@pytest.mark.slow
def test_every_design_runs_each_task_that_it_can_do(finished: Board) -> None:
    _, found = results(finished)
    for budget in BUDGETS:
        for name, metrics in TASKS.items():
            assert found[budget][name].keys() == {1, 2}
            for result in found[budget][name].values():
                assert result["test"].keys() == metrics
                assert torch.tensor(list(result["test"].values())).isfinite().all()


@pytest.mark.slow
def test_budgets_are_equal_within_a_batch_of_each_stage(finished: Board) -> None:
    costs, found = results(finished)
    reference = costs["designs"][finished.plan.reference]
    for design in finished.designs:
        own, slack = costs["designs"][design.name], finished.setting.batch * len(design.stages)
        for budget, wanted in (("pairs", 32), *((b, reference[b] * 32 / own[b]) for b in ("flops", "seconds"))):
            assert abs(found[budget][design.name][1]["pairs"] - wanted) <= slack, (design.name, budget)
        assert own["memory"] > 0 and own["parameters"] > 0


@pytest.mark.slow
def test_every_design_has_the_same_number_of_trials_and_the_same_first_ones(finished: Board) -> None:
    settings = set()
    for design in finished.designs:
        trials = board.trials_of(finished, design, 99)
        assert len(trials) == 2 and trials[0]["settings"] == finished.defaults()
        assert all("val" in trial and "test" not in trial for trial in trials)
        assert all(trial["val"].keys() <= {"nll", "answer_nll", "vqa", "r1"} for trial in trials)
        settings.add(str([trial["settings"] for trial in trials]))
    assert len(settings) == 1, "random draws are equal for all designs"


@pytest.mark.slow
def test_the_page_has_every_design_and_every_verdict(finished: Board) -> None:
    text = finished.page.read_text()
    assert "4 designs, 2 search trials each" in text and "The plan has 2 trials and 2 seeds." in text
    for design in finished.designs:
        assert text.count(f"\n| {design.label} |") == 5, "three budgets, costs, search"
    for c in finished.plan.contrasts:
        assert text.count(f"| {c.first} - {c.second} | {measure_name(c.metric)} |") == 3
    assert text.count("- Tied: ") == text.count("- Inconclusive: ") == text.count("- Not run: ") == 3


@pytest.mark.slow
def test_another_sitting_begins_with_the_recorded_runs(
    finished: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = dataclasses.replace(finished, root=tmp_path)
    elsewhere.page.parent.mkdir(parents=True)
    elsewhere.figures.write_text(finished.figures.read_text())
    leaderboard.main(elsewhere, ["--recorded", "--finished"])
    assert elsewhere.page.read_text() == finished.page.read_text(), "nothing is lost, commits and costs included"
    assert elsewhere.figures.read_text() == finished.figures.read_text()
    other = dataclasses.replace(elsewhere, setting=dataclasses.replace(TINY, lr=1.0))
    nowhere = dataclasses.replace(elsewhere, root=tmp_path / "nowhere")
    for refused, reason in ((other, "its setting is not this run's"), (nowhere, "no runs are recorded")):
        with pytest.raises(SystemExit):
            leaderboard.main(refused, ["--recorded", "--finished"])
        assert reason in capsys.readouterr().err


def measure_name(metric: str) -> str:
    return board.METRICS[metric][0]


def made_up(values: Mapping[str, list[float]]) -> Any:
    rows = {
        name: {seed: {"test": dict.fromkeys(("nll", "answer_nll", "r1"), v)} for seed, v in enumerate(of_name, 1)}
        for name, of_name in values.items()
    }
    empty: dict[str, Any] = {design.name: {} for design in leaderboard.DESIGNS}
    return {"pairs": empty | rows, "flops": empty, "seconds": empty}


def test_equal_designs_are_tied_and_missing_ones_not_run() -> None:
    levels = {"tden": 1.0, "tden-two-pass": 1.001, "unified-vlp": 2.0, "xgpt": 1.05}
    found = made_up({name: [v + 1e-5 * (s % 2) * v for s in range(8)] for name, v in levels.items()})
    verdicts = {
        (f.budget, f.contrast.metric, f.contrast.first): f.verdict for f in judge_board(leaderboard.SCENES, found)
    }
    assert verdicts["pairs", "nll", "tden-two-pass"] == "tied"
    assert verdicts["pairs", "nll", "unified-vlp"] == verdicts["pairs", "nll", "xgpt"] == "worse"
    assert verdicts["pairs", "r1", "tden-two-pass"] == "tied" and verdicts["pairs", "r1", "vlmo"] == "not run"
    assert {v for (budget, _, _), v in verdicts.items() if budget != "pairs"} == {"not run"}
    noisy = made_up({"tden": [1.0, 1.2, 0.9], "tden-two-pass": [0.9, 1.3, 0.8]})
    assert judge_board(leaderboard.SCENES, noisy)[0].verdict == "inconclusive"


def test_a_trial_depends_on_the_earlier_ones_alone() -> None:
    plan = leaderboard.PLAN
    earlier: list[tuple[Mapping[str, float], float | None]] = []
    for number in range(7):
        settings = suggest(plan, number, earlier)
        assert settings == suggest(plan, number, earlier), "the same after a kill"
        assert all(one.low <= settings[name] <= one.high for name, one in plan.space.items())
        assert settings["dropout"] * 20 == pytest.approx(round(settings["dropout"] * 20)), "a step of 0.05"
        earlier.append((settings, None if number == 1 else -settings["lr_factor"]))
    others = [(settings, settings["lr_factor"]) for settings, _ in earlier]
    assert suggest(plan, 7, earlier) != suggest(plan, 7, others), "TPE reads the scores"
    with pytest.raises(ValueError, match="every trial"):
        best([{"score": None}])
    assert best([{"score": 1.0, "n": 1}, {"score": 1.0, "n": 2}])["n"] == 1
    assert score(plan, {"nll": 2.0, "r1": 30.0}) == pytest.approx((-2 / plan.smallest["nll"] + 30 / 3) / 2)


def test_turns_count_a_pair_once() -> None:
    settings = leaderboard.SCENES.defaults()
    arms = {d.name: leaderboard.SCENES.arm(d, 3200, settings) for d in leaderboard.DESIGNS}
    assert {pairs_of(arm, 32) for arm in arms.values()} == {3200}
    assert arms["xgpt"].updates == 400 and arms["vlmo"].updates == 100
    assert arms["xgpt-two-stage"].updates == arms["xgpt-two-pass"].updates == 250


def test_a_later_stage_goes_on_where_the_earlier_one_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    data, read = Data(TINY).for_family("xgpt"), []
    monkeypatch.setattr(adapter, "batch", lambda *a, whole=adapter.batch, **m: read.append(a[1]) or whole(*a, **m))

    def captions(name: str) -> list[int]:
        read.clear()
        design = next(one for one in leaderboard.DESIGNS if one.name == name)
        arm = tiny(Path()).arm(design, 32, leaderboard.SCENES.defaults())
        for _ in pretraining(adapter.build("xgpt", arm.config, data), arm, data, data.train(1), seed=1):
            pass
        return list(dict.fromkeys(int(row) for texts in read for row in texts.owner_N))

    whole = captions("xgpt")
    assert captions("xgpt-two-stage") == captions("xgpt-two-pass") == whole and len(whole) == 32


def test_region_models_read_the_scenes_that_pixel_models_read() -> None:
    torch.set_num_threads(1)
    data = Data(TINY)
    regions = data.for_family("tden")
    assert data.for_family("soho") is data.for_family("vlmo") is data and data.for_family("xgpt") is regions
    assert regions.val.scenes == data.val.scenes and regions.web[1].words == data.web[1].words
    assert adapter.image(regions.web[0], torch.arange(2)).mask_BR.any()  # type: ignore[union-attr]
    assert Data(dataclasses.replace(TINY, side=0)).for_family("soho").setting.side == 0


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    small = tiny(tmp_path)
    found = board.measure_memory(small, small.designs[3], Data(TINY))
    assert found["parameters"] > 1000 and found["memory"] > 0


def test_a_plan_with_an_unknown_design_is_refused(tmp_path: Path) -> None:
    text = Path(leaderboard.__file__).with_suffix(".toml").read_text()
    names = [design.name for design in leaderboard.DESIGNS]
    for old, new, message in (
        ('"xgpt"', '"xgtp"', "no design xgtp"),
        ("search_seed = 101", "search_seed = 3", "also the comparison's"),
        ("high = 0.2", "high = -0.2", "outside its range"),
        ("r1 = 3.0", "cider = 3.0", "no smallest difference of r1"),
    ):
        file = tmp_path / "plan.toml"
        file.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            board.read_board_plan(file, names)
    with pytest.raises(SystemExit):
        leaderboard.main(leaderboard.SCENES, ["--seeds", "200"])


def test_an_unfinished_board_has_a_page(tmp_path: Path) -> None:
    small = tiny(tmp_path)
    row = {"flops": 1e6, "seconds": 1e-3, "parameters": 10, "memory": 1.0}
    costs = {"designs": {d.name: row for d in small.designs}, "commit": "", "load": 0.0}
    text = write_board(small, costs, made_up({}), trials=2, keep=False)
    assert text.count("**not run**") == 3 * len(small.plan.contrasts) and "| TDEN | 0 of 2 |" in text
    assert not small.page.exists()
