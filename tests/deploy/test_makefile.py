"""The `vlp` commands that `make` runs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLP = 'vlp() { echo "$*"; test "$1" = run || test -f "vlp_models/presets/$2.yaml"; }\n'  # a preset must exist


def calls(*arguments: str) -> list[str]:
    """Return the arguments of each `vlp` call of `make flickr8k`, up to the first that fails."""
    plain = {"PATH": os.environ["PATH"]}  # without variables of a make that runs the tests

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=60)

    made, found = run("make", "-n", "flickr8k", *arguments), []
    for line in made.stdout.partition("requirements-photographs.lock\n")[2].splitlines():
        done = run("sh", "-c", VLP + line)
        found += done.stdout.splitlines()
        if done.returncode:
            break
    return found


def test_flickr8k_preset_comes_first_then_each_model_in_order_then_run() -> None:
    first = "use flickr8k"
    assert calls() == [first, "run"]
    assert calls("ROOT=some/where", "MODELS=xgpt soho") == [
        f"{first} --set data.flickr8k.root=some/where --set data.snli_ve.root=some/where",
        "use flickr8k-xgpt",
        "use flickr8k-soho",
        "run",
    ]


def test_nothing_runs_if_a_preset_does_not_exist() -> None:
    assert calls("MODELS=xgtp soho") == ["use flickr8k", "use flickr8k-xgtp"]


def test_leaderboard_makes_a_project_per_seed_and_compares_every_run_with_tden(tmp_path: Path) -> None:
    stub = """vlp() {
        echo "$*"
        test "$1" = init || return 0
        for run in tden tden-encoder xgpt; do
            for task in captioning vqa retrieval; do mkdir -p "$2/reports/eval/$run-$task"; done
        done
    }\n"""
    settings = [f"LEADERBOARD={tmp_path}", "SEEDS=1 2", "CLAIMS=tden xgpt"]
    plain = {"PATH": os.environ["PATH"]}
    made = subprocess.run(["make", "-n", "leaderboard", *settings], cwd=ROOT, env=plain, capture_output=True, text=True)
    recipe = "for seed in" + made.stdout.partition("for seed in")[2]
    done = subprocess.run(["sh", "-ec", stub + recipe], cwd=ROOT, env=plain, capture_output=True, text=True, timeout=60)
    *projects, _, captions, _, _, _, _ = done.stdout.splitlines()
    assert projects == [
        command
        for seed in "12"
        for command in (
            f"init {tmp_path}/seed-{seed}",
            f"use leaderboard --set defaults.pretrain.seed={seed} --set defaults.finetune.seed={seed}",
            "use claims-tden",
            "use claims-xgpt",
            "run",
        )
    ]
    first, *others = re.findall(r"seed-(\d)/reports/eval/(\S+)", captions)
    assert [first, others[0]] == [("1", "tden-captioning"), ("2", "tden-captioning")]
    assert sorted(others[1:]) == [(s, f"{run}-captioning") for s in "12" for run in ("tden-encoder", "xgpt")]
    assert captions.startswith("compare ") and captions.endswith("--metric target test CIDEr")
