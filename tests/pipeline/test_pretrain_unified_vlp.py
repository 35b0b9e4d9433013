"""Unified VLP through the real command line: objectives drawn per sample, killed and stopped, and the same bytes."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from test_pretrain import start, stop_at
from toy_dataset import TRAINER, write_workspace
from toy_unified_vlp import SIZES

from vlp_models.common.workspace import Workspace
from vlp_models.params import load_params, to_plain
from vlp_models.pipeline.stages import pretrain

EPOCHS, STEPS = 20, 120


@pytest.mark.pipeline
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mix", ["sample", "two passes"])
def test_resume_after_kill_and_stop_is_bitwise_equal(tmp_path: Path, mix: str) -> None:
    """Dropout on; kill -9 at a random step, rerun; SIGTERM at a later one, exit 75; rerun."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    shares = {"seq2seq": {"share": 0.75}, "bidirectional": {"share": 0.25}}
    run = {"model": "u", "max_epochs": EPOCHS, "recipe": {"mix": "sample", "objectives": shares}}
    if mix == "two passes":
        run |= {
            "recipe": {"mix": "sum", "objectives": {"seq2seq": 1.0, "bidirectional": 1.0}},
            "scheduled_sampling": {"scheme": "b"},
        }
    for root in (whole, broken):
        write_workspace(
            root,
            trainer={**to_plain(TRAINER), "checkpoint_every_steps": 7},
            models={"u": {"family": "unified_vlp", "config": SIZES}},
            pretrain={"u": run},
        )
    pretrain.run(load_params(whole / "params.yaml"), Workspace(whole), "u")
    killed_at = random.randrange(10, STEPS // 2)
    stopped_at = random.randrange(killed_at + 10, STEPS - 20)
    when = f"kill -9 at {killed_at}, SIGTERM at {stopped_at}"
    assert stop_at(broken, "u", killed_at, signal.SIGKILL) == -signal.SIGKILL, when
    assert stop_at(broken, "u", stopped_at, signal.SIGTERM) == 75, when + (broken / "stderr").read_text()
    assert start(broken, "u").wait(120) == 0, when + (broken / "stderr").read_text()
    assert (broken / "stderr").read_text().count("resuming from step") == 2, when
    checkpoint = "checkpoints/pretrain/u"
    for file in ("reports/curves/pretrain/u.csv", f"{checkpoint}/model.safetensors", f"{checkpoint}/config.json"):
        assert (broken / file).read_bytes() == (whole / file).read_bytes(), f"{file}; {when}"
    report = json.loads((whole / "reports/training/pretrain/u.json").read_text())
    assert (report["model"], report["family"], report["steps"]) == ("u", "unified_vlp", STEPS)
