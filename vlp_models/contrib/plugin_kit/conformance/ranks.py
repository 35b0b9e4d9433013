"""Two processes of gloo against one: an objective's gradient must not depend on how a batch is divided.

    python -m vlp_models.contrib.plugin_kit.conformance.ranks RANK FOLDER

is one of the processes; FOLDER/trial.json names the family, its config and the project's plugins.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from vlp_models.common.environment import program_environment
from vlp_models.common.plugins import active_plugins, add_plugins
from vlp_models.contrib.plugin_kit.conformance.checks import Problem
from vlp_models.contrib.plugin_kit.conformance.scenes import SampleScenes
from vlp_models.contrib.plugin_kit.conformance.trial import Trial, build_trial, compare, rank_gradients
from vlp_models.models import known_objectives

RANKS, ROWS = 2, 7
TIMEOUT = 300  # seconds: importing torch takes a minute on a busy machine


def check_ranks(trial: Trial) -> None:
    """Check that the gradients of two processes, with three and four rows, add up to those of one with all seven."""
    # The trial's model has been trained by earlier checks; both sides start from fresh weights.
    fresh = build_trial(trial.family, trial.config, trial.scenes)
    names = known_objectives(fresh.model, fresh.scenes.facts)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = {
            "family": trial.family,
            "config": dict(trial.config),
            "scenes": str(trial.scenes.root),
            "plugins": {"families": active_plugins("families")},
            "root": str(Path.cwd()),
            "objectives": names,
        }
        (folder / "trial.json").write_text(json.dumps(settings), encoding="utf-8")
        _run_ranks(folder)
        parts = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(RANKS)]
    for name in names:
        context = f"with {name} in two processes: use gather_rows and draw_uniform of objectives/distributed.py"
        for weight, gradient in rank_gradients(fresh, name, 0, ROWS).items():
            # Each process divides by the counts of the whole batch, so gradients add up instead of being averaged.
            total = sum((part[f"{name}/{weight}"] for part in parts), torch.tensor(0.0))
            compare({f"gradient of {weight}": [total]}, {f"gradient of {weight}": [gradient]}, context)


def _run_ranks(folder: Path) -> None:
    command = [sys.executable, "-m", "vlp_models.contrib.plugin_kit.conformance.ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], env=program_environment(), stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        # Waits for one process after the other; a deadlock of the two shows as a timeout.
        errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    except subprocess.TimeoutExpired:
        raise Problem(
            f"two processes did not finish within {TIMEOUT} s: one of them waits for the other, because a condition "
            "that differs between them decides whether they exchange rows"
        ) from None
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors, strict=True):
        if process.returncode:
            raise Problem(f"a process of two failed: {(error.strip().splitlines() or ['no message'])[-1]}")


def main(rank: int, folder: Path) -> None:
    """Compute this process's gradients of each objective."""
    settings: dict[str, Any] = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    add_plugins(settings["plugins"], Path(settings["root"]))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT),
    )
    trial = build_trial(settings["family"], settings["config"], SampleScenes.open(Path(settings["scenes"])))
    # Rows 0 to 2 and 3 to 6: uneven, so that a mean over processes would show as an error.
    first, last = ROWS * rank // RANKS, ROWS * (rank + 1) // RANKS
    gradients = {
        f"{name}/{weight}": gradient.contiguous()
        for name in settings["objectives"]
        for weight, gradient in rank_gradients(trial, name, first, last).items()
    }
    save_file(gradients, folder / f"rank-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
