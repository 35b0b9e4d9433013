"""Train on one GPU by each installed launcher, and interrupt it: are the weights those of an undisturbed run?

    vlp use tiny
    vlp use --set trainer.accelerator=gpu --set tracking.uri=
    vlp run validate
    python benchmarks/stages_on_gpu.py --kinds detector features tokenizer shards initial
    python benchmarks/launchers_on_gpu.py                # --engines local torchrun; --size small

TDEN at the paper's size is pretrained on the tiny scenes, in float32, first undisturbed. Then, midway, a process is
killed (torchrun, Ray), the command is stopped and called again (local), or the job is requeued as after a preemption
(SLURM). `fsdp` is torchrun with FSDP2. Needs root for SLURM's daemons, which are started on loopback. Writes
benchmarks/results/launchers-<device>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import vlp, write_result
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))
from engines import has_slurm, slurm, step, wait_until, workers

EPOCHS, EVERY = 10, 10  # epochs of four updates each, and updates between checkpoints
SIZES: dict[str, dict[str, Any]] = {
    "paper": {
        "hidden": 768,
        "heads": 12,
        "intermediate": 3072,
        "object_layers": 6,
        "sentence_layers": 12,
        "encoder_layers": 6,
        "decoder_layers": 6,
    },
    "small": {},
}
COMMAND = [sys.executable, "-m", "vlp_models.cli.main", "stage", "pretrain", "tden"]


class Project:
    """A workspace whose pretraining is repeated."""

    def __init__(self, root: Path, accelerator: str) -> None:
        self.root, self.gpu = root, accelerator == "gpu"
        self.weights = root / "checkpoints" / "pretrain" / "tden" / "model.safetensors"

    def use(self, settings: dict[str, Any]) -> None:
        vlp(["use", *(f"--set={key}={value}" for key, value in settings.items())], self.root)

    def clear(self) -> None:
        """Remove every trace of a training."""
        for path in (self.root / ".work").glob("pretrain-tden/*/*"):
            if path.name != "provenance.json":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.weights.unlink(missing_ok=True)

    def log(self) -> str:
        return (self.root / "launch.log").read_text(encoding="utf-8", errors="replace")

    @contextlib.contextmanager
    def training(self, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """Start the stage; what it prints is in `launch.log`."""
        with (self.root / "launch.log").open("ab") as output:
            process = subprocess.Popen(COMMAND, cwd=self.root, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait(300):
            sys.exit(f"exit code {process.returncode}\n{self.log()[-3000:]}")

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a checkpoint is saved."""
        wait_until(lambda: step(self.root) or process.poll() is not None, 200)
        if process.poll() is not None:
            sys.exit(f"ended before its first checkpoint\n{self.log()[-3000:]}")


def undisturbed(project: Project) -> None:
    project.use({"trainer.launcher": "local", "trainer.strategy": "auto"})
    with project.training() as process:
        project.finish(process)


def stopped(project: Project) -> None:
    project.use({"trainer.launcher": "local", "trainer.strategy": "auto"})
    with project.training() as process:
        project.wait(process)
        process.terminate()
        if process.wait(120) != 75:
            sys.exit(f"a stop ended with {process.returncode}\n{project.log()[-3000:]}")
    with project.training() as process:
        project.finish(process)


def killed(project: Project, strategy: str = "auto") -> None:
    project.use({"trainer.launcher": "torchrun", "trainer.strategy": strategy})
    with project.training() as process:
        project.wait(process)
        workers(project.root)[-1].kill()
        project.finish(process)


def requeued(project: Project) -> None:
    project.use({"trainer.launcher": "slurm", "trainer.strategy": "auto", "launchers.slurm.partition": "main"})
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        slurm(Path(folder) / "slurm", gpus=int(project.gpu)) as env,
        project.training(env) as process,
    ):

        def call(*command: str) -> str:
            return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

        project.wait(process)
        job = call("squeue", "--noheader", "--format=%i").split()[0]
        call("scontrol", "requeue", job)
        wait_until(lambda: not workers(project.root), 60)
        call("scontrol", "update", f"jobid={job}", "starttime=now")
        project.finish(process)


def lost_actor(project: Project) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "num_gpus": int(project.gpu), "include_dashboard": False},
    )
    try:
        settings = {"trainer.launcher": "ray", "trainer.strategy": "auto", "cluster.address": cluster.address}
        project.use(settings)
        with project.training() as process:
            project.wait(process)
            agent = workers(project.root)[-1].parent()
            actor = agent.parent() if agent else None
            if actor is None or "ray::" not in " ".join(actor.cmdline()):
                sys.exit("the training's processes do not belong to a worker of Ray")
            actor.kill()
            project.finish(process)
    finally:
        project.use({"cluster.address": ""})
        cluster.shutdown()


ENGINES: dict[str, tuple[str, Callable[[Project], None]]] = {
    "again": ("none: the same command again, undisturbed", undisturbed),
    "local": ("stopped by SIGTERM, and called again", stopped),
    "torchrun": ("the training process killed", killed),
    "fsdp": ("the training process killed, FSDP2", lambda project: killed(project, "fsdp")),
    "slurm": ("the job requeued", requeued),
    "ray": ("Ray's worker killed", lost_actor),
}


def compare(project: Project, expected: dict[str, torch.Tensor]) -> float:
    """Return the greatest difference of a weight."""
    weights = load_file(project.weights)
    assert weights.keys() == expected.keys()
    return max(float((weights[name].double() - expected[name].double()).abs().max()) for name in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--size", choices=SIZES, default="paper")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parsed = parser.parse_args()
    project = Project(Path.cwd(), parsed.accelerator)
    project.use(
        {
            "trainer.accelerator": parsed.accelerator,
            "trainer.precision": "32-true",
            "trainer.devices": 1,
            "trainer.checkpoint_every_steps": EVERY,
            "pretrain.tden.max_epochs": EPOCHS,
            "pretrain.tden.cpu_processes": 1,
            "pretrain.tden.optimizer.muon_lr": 0.0,  # AdamW, as in the paper
            **{f"models.tden.config.{key}": value for key, value in SIZES[parsed.size].items()},
        }
    )
    vlp(["stage", "initial", "tden"], project.root)
    record: dict[str, Any] = {
        "claim": "an interrupted training on one GPU ends with the weights of an undisturbed one, by every launcher",
        "device": torch.cuda.get_device_name() if project.gpu else "CPU",
        "torch": torch.__version__,
        "precision": "float32",
        "engines": {},
    }
    project.clear()
    undisturbed(project)
    expected = load_file(project.weights)
    record["parameters"] = sum(weight.numel() for weight in expected.values())
    for name in parsed.engines:
        event, train = ENGINES[name]
        if name == "slurm" and not has_slurm():
            record["engines"][name] = "not installed"
            continue
        project.clear()
        (project.root / "launch.log").write_text("")
        start = time.perf_counter()
        try:
            train(project)
            resumed = [line for line in project.log().splitlines() if "resuming from step" in line]
            record["engines"][name] = {
                "event": event,
                "resumed_from_step": int(resumed[-1].rpartition("resuming from step")[2].split()[0]) if resumed else 0,
                "greatest_difference_of_a_weight": compare(project, expected),
                "seconds": round(time.perf_counter() - start, 1),
            }
        except (Exception, SystemExit) as error:  # the other engines are still worth trying
            traceback.print_exc()
            record["engines"][name] = f"failed: {type(error).__name__}: {error}"[:3000]
        print(f"{name}: {json.dumps(record['engines'][name])}", flush=True)
        write_result(f"launchers-{'cuda' if project.gpu else 'cpu'}", record)


if __name__ == "__main__":
    main()
