"""The studies on photographs, on a few generated photos in Flickr8k's layout and a small random CNN."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import leaderboard
import photographs
import pytest
from photographs import WITHOUT, judge, read_plan
from PIL import Image
from pretraining_study import board as boards
from pretraining_study import photos
from pretraining_study.results import Results
from pretraining_study.setting import Setting
from timm_toys import SMALL, write_weights

from vlp_models.params import TimmParams

COLORS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (30, 30, 220)}
TINY = Setting(hidden=16, heads=2, batch=8, train=6, val=4, test=6)


@pytest.fixture(scope="module")
def flickr8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flickr8k")
    (root / "Images").mkdir()
    captions = ["image,caption"]
    names = {"train": [f"{1000 + i}_a.jpg" for i in range(40)], "dev": [f"{2000 + i}_b.jpg" for i in range(8)]}
    for split, of_split in names.items():
        for number, name in enumerate(of_split):
            color = sorted(COLORS)[number % 3]
            Image.new("RGB", (64, 48), COLORS[color]).save(root / "Images" / name)
            captions += [f"{name},a {color} picture", f"{name},it is {color}"]
        (root / f"Flickr_8k.{split}Images.txt").write_text("".join(f"{name}\n" for name in of_split))
    (root / "captions.txt").write_text("\n".join(captions) + "\n")
    return root


@pytest.fixture
def small_cnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = write_weights(tmp_path / "cnn.safetensors")
    monkeypatch.setattr(photos, "TimmParams", partial(TimmParams, model=SMALL, weights=weights))


@pytest.mark.slow
@pytest.mark.usefixtures("small_cnn")
def test_from_photos_to_the_page_and_again(
    flickr8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--root", str(flickr8k), "--seeds", "2", "--share", "0.002"]
    photographs.main(words, root=tmp_path, setting=TINY)
    text = capsys.readouterr().out
    assert text.count("features of photos") == 3 and text.count("CPU s\n") == 2 * 4
    assert "2 of 3 planned seeds" in text and text.count("| 100% |") == 5 and "not run" not in text
    made = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("seed-*.json")}
    next(iter(made)).unlink()
    monkeypatch.setattr("vlp_models.vision.timm_backbone.make_backbone", None)  # features are not extracted again
    photographs.main(words, root=tmp_path, setting=TINY)
    assert capsys.readouterr().out.count("CPU s\n") == 1
    assert sum(file.stat().st_mtime_ns == time for file, time in made.items()) == len(made) - 1
    assert not list(tmp_path.rglob("study-photographs*")), "a rehearsal writes no page"


@pytest.mark.slow
@pytest.mark.usefixtures("small_cnn")
def test_draws_are_nested_and_splits_are_disjoint(flickr8k: Path, tmp_path: Path) -> None:
    data = photos.Photos.read(flickr8k, TINY, cells=4, work=tmp_path)
    few, many = data.drawn(1, 3).captions.words, data.drawn(1, 9).captions.words
    assert len(few) == 6 and not (set(few) - set(many))
    paths = [photo.path for of_split in data.photos.values() for photo in of_split]
    assert len(set(paths)) == len(paths) == 48 and len(data.photos["test"]) == 8 and data.photos["val"]
    assert data.web[0].features_IRF.shape[1:] == (4, data.setting.feature_dim)


@pytest.mark.slow
@pytest.mark.usefixtures("small_cnn")
def test_the_leaderboard_runs_on_photos(
    flickr8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "measure_memory", lambda *_: {"parameters": 1, "memory": 1.0})  # a process each
    monkeypatch.setattr(boards, "ROUNDS", 4)
    names = {"tden", "tden-two-pass", "vlmo"}
    some = tuple(design for design in leaderboard.DESIGNS if design.name in names)
    contrasts = tuple(c for c in leaderboard.PLAN.contrasts if {c.first, c.second} <= names)
    plan = replace(leaderboard.PLAN, contrasts=contrasts)
    board = replace(leaderboard.SCENES, root=tmp_path, designs=some, plan=plan)
    words = ["--root", str(flickr8k), "--share", "0.01", "--trials", "1", "--seeds", "1", "--budgets", "pairs"]
    leaderboard.main(board, words)
    text = capsys.readouterr().out
    assert (
        "# Leaderboard on photographs" in text
        and "pairs, tden, seed 1: nll" in text
        and "VLMo and SOHO: not run" in text
    )


def test_contrasts_are_judged_with_those_not_run() -> None:
    plan = read_plan(Path(photographs.__file__).with_suffix(".toml"))
    seeds = range(1, 4)

    def rows(offset: float) -> dict[int, dict[str, Any]]:
        values = {f"{share:g}": {"nll": 3 + offset + 1e-4 * offset} for share in plan.shares}
        return {s: {"test": {k: {"nll": v["nll"] * (1 + 1e-5 * s * offset)} for k, v in values.items()}} for s in seeds}

    names = ("tden", "unified-vlp")
    empty: dict[str, dict[int, dict[str, Any]]] = {n + w: {} for n in names for w in ("", WITHOUT)}
    found = empty | {"unified-vlp": rows(0.0), "unified-vlp" + WITHOUT: rows(1.0)}
    verdicts = {(r.contrast.design, r.share): r.verdict for r in judge(plan, found)}
    assert {v for (design, _), v in verdicts.items() if design == "tden"} == {"not run"}
    assert {v for (design, _), v in verdicts.items() if design != "tden"} == {"better"}
    assert "TDEN 0, Unified VLP 3 of 3 planned seeds" in photographs.write_page(plan, with_cider(found), 40)
    kept = {row["name"]: row for row in photographs.finding_rows(plan, with_cider(found))}
    assert len(kept) == 4 * (3 + 2) and "mean" not in kept["tden r1 1"]
    assert kept["unified-vlp nll 0.05"]["mean"] == pytest.approx(-1, abs=1e-3)
    assert kept["unified-vlp nll 0.05"]["verdict"] == "better"


def test_recorded_runs_are_taken_over(tmp_path: Path) -> None:
    plan = read_plan(Path(photographs.__file__).with_suffix(".toml"))
    arms, results = photographs.arms_of(plan, 100, 8), Results(tmp_path / "work", TINY)
    file = tmp_path / "study.json"
    made = {arm.name: {"2": {"arm": arm.name, "commit": "old"}} for arm in arms}
    kept = {"setting": asdict(TINY), "plan": asdict(plan), "results": made}
    file.write_text(json.dumps(kept))
    with results.claimed(arms[0], 2):
        results.write(arms[0], 2, {"arm": "mine"})
    photographs.load_recorded(file, results, arms, plan)
    assert [(results.read(arm, 2) or {}).get("arm") for arm in arms] == ["mine", *(arm.name for arm in arms[1:])]
    file.write_text(json.dumps(kept | {"setting": asdict(replace(TINY, lr=9.0))}))
    with pytest.raises(ValueError, match="its setting is not this run's"):
        photographs.load_recorded(file, results, arms, plan)


def with_cider(found: dict[str, dict[int, dict[str, Any]]]) -> dict[str, dict[int, dict[str, Any]]]:
    for result in (result for of_arm in found.values() for result in of_arm.values()):
        for values in result["test"].values():
            values["cider"] = 30.0
    return found


def test_curves_have_a_panel_for_each_contrast(tmp_path: Path) -> None:
    plan = read_plan(Path(photographs.__file__).with_suffix(".toml"))
    names = {c.design for c in plan.contrasts}
    one = {f"{share:g}": {"nll": 3 / share**0.1, "r1": 5 + share} for share in plan.shares}
    found = {n + w: {s: {"test": one} for s in (1, 2)} for n in names for w in ("", WITHOUT)}
    photographs.draw(plan, found, tmp_path / "curves.svg")
    first = (tmp_path / "curves.svg").read_bytes()
    assert first.count(b'<g id="axes_') == len(plan.contrasts)
    photographs.draw(plan, found, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_bytes() == first, "the same curves are the same bytes"
    found["unified-vlp"].pop(2)
    photographs.draw(plan, found, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_bytes().count(b'<g id="axes_') == 2, "one seed has no interval"
