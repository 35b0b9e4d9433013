"""`Project`: results as data frames from any folder, errors that name the way out, commands with their exit code."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vlp_models import Project
from vlp_models.contrib.project_api.project import CommandError
from vlp_models.errors import DataError, MissingToolError, ParamsError
from vlp_models.metrics.score import ItemScores, write_items
from vlp_models.registry.promotion.ledger import Ledger

ROOT = Path(__file__).parents[3]
RUN = "tden-vqa"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project with the results of one run, in the files that stages write."""
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    folder = tmp_path / "reports" / "eval" / RUN
    folder.mkdir(parents=True)
    about = {"task": "vqa", "run": RUN, "variant": RUN, "model": "tden", "seed": 1, "dataset": "scenes", "n": 3}
    score = {**about, "split": "test", "metric": "accuracy", "value": 50.0, "low": 40.0, "high": 60.0, "note": ""}
    rows = [{**score, "baselines": {"majority answer": 30.0}}, {**score, "metric": "x", "low": None, "high": None}]
    rows[1] |= {"value": None, "baselines": {}}
    rows.append({**score, "task": "validation", "run": "validation", "split": "", "baselines": {}})
    (tmp_path / "reports" / "summary.json").write_text(json.dumps(rows))
    answers = [{"question_id": str(i), "image_id": f"scenes/{i // 2}", "answer": "Ja, ä"} for i in range(3)]
    (folder / "predictions-test.jsonl").write_text("".join(json.dumps(a, ensure_ascii=False) + "\n" for a in answers))
    items = ItemScores(
        **{name: score[name] for name in ("dataset", "split", "metric")},
        statistic="mean",
        test="t",
        note="",
        items=["0", "1", "2"],
        groups=["a", "a", "b"],
        parts_NK=np.array([[1.0, 1.0], [0.0, 1.0], [0.5, 1.0]]),
        slices=[["label=true"], [], []],
    )
    write_items(folder / "items.parquet", [items])
    curve = tmp_path / "reports" / "curves" / "finetune" / f"{RUN}.csv"
    curve.parent.mkdir(parents=True)
    curve.write_text("step,epoch,loss,vqa,val_loss,val_vqa\n10,1,3.5,3.5,,\n20,1,2.5,2.5,2.75,2.75\n")
    return Project(tmp_path)


def test_results_are_data_frames_from_any_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.root / "reports" / "eval")
    scores = Project().scores()
    assert list(scores["metric"]) == ["accuracy", "x"] and list(scores["split"]) == ["test", "test"]
    assert scores["value"].tolist()[0] == 50 and math.isnan(scores["value"][1]) and math.isnan(scores["low"][1])
    assert scores["baselines"][0] == {"majority answer": 30.0}
    monkeypatch.chdir("/")
    assert list(project.predictions(RUN).columns) == ["question_id", "image_id", "answer"]
    assert project.predictions(RUN)["answer"][2] == "Ja, ä"
    items = project.items(RUN, "accuracy", "test")
    assert items["value"].tolist() == [100, 0, 50] and items["group"].tolist() == ["a", "a", "b"]
    assert items["slices"][0] == ["label=true"]
    curve = project.curve(RUN)
    assert curve["loss"].tolist() == [3.5, 2.5] and curve["step"].tolist() == [10, 20]
    assert math.isnan(curve["val_loss"][0]) and project.curve(f"finetune/{RUN}").equals(curve)


def test_the_champion_is_the_ledgers(project: Project) -> None:
    assert project.champion("vqa") is None and project.decisions("vqa").empty
    ledger = Ledger(project.root / "promotions" / "ledger.jsonl")
    ledger.path.parent.mkdir()
    about = {"task": "vqa", "model": "vlp-vqa", "run_model": "tden"}
    with ledger.locked():
        for version, action in ((1, "promoted"), (2, "promoted"), (1, "rolled back"), (1, "refused")):
            numbers = {"numbers": {"value": 50.0 + version, "gain": 1.0}, "outcome": "promote", "reasons": ["why"]}
            entry = {"action": action, "version": version, "content": f"c{version}", "run": f"r{version}", "by": action}
            ledger.append({**about, **entry, "from": version - 1, "decision": numbers})
    champion = project.champion("vqa")
    assert champion is not None
    assert (champion["version"], champion["run"], champion["value"]) == (1, "r1", 51.0)
    assert champion["by"] == "rolled back", "the line that made it the champion, not the last one about it"
    decisions = project.decisions("vqa")
    assert decisions["action"].tolist() == ["promoted", "promoted", "rolled back", "refused"]
    assert decisions["reasons"][2] == ["why"] and project.champion("captioning") is None
    assert project.decisions().equals(decisions)


def test_figures_draw_intervals_baselines_and_losses(project: Project, tmp_path: Path) -> None:
    (axis,) = project.plot_scores().axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["run, 95% interval", "majority answer"]
    assert axis.lines[0].get_xdata().tolist() == [40, 60]
    (axis,) = project.plot_curve(RUN).axes
    assert [line.get_label() for line in axis.lines] == ["loss", "loss, validation", "vqa", "vqa, validation"]
    with pytest.raises(DataError, match="no scores of split val"):
        project.plot_scores("val")


def test_without_matplotlib_the_extra_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlp_models.common.packages.is_installed", lambda module: module != "matplotlib")
    with pytest.raises(
        MissingToolError, match=r'matplotlib, which is not installed: pip install "vlp-flows\[pipeline\]"'
    ):
        project.plot_curve(RUN)


def test_errors_name_the_way_out(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(DataError, match=r"no params\.yaml in it or above it; `vlp init"):
        Project(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ParamsError, match="no fine-tuning run `tden-vqq`; did you mean `tden-vqa`"):
        project.predictions("tden-vqq")
    with pytest.raises(DataError, match=r"predictions-val\.jsonl: not found; `project\.run\(\)`"):
        project.predictions(RUN, "val")
    with pytest.raises(ParamsError, match="run `tden-vq`: not in params"):
        project.curve("tden-vq")
    with pytest.raises(DataError, match="no per-item scores of CIDEr test"):
        project.items(RUN, "CIDEr", "test")


def test_a_failed_command_has_its_log_and_exit_code(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match="`vlp stage validat` exited with 2: no stage `validat`") as failed:
        project.vlp("stage", "validat")
    assert failed.value.exit_code == 2 and "did you mean `validate`" in capsys.readouterr().out
    assert project.vlp("stage", "validat", check=False) == 2


def test_importing_the_package_is_light() -> None:
    code = "import sys, vlp_models; assert not {'torch', 'numpy', 'pandas'} & set(sys.modules)"
    code += "; from vlp_models import Project; assert not {'torch', 'pandas', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
