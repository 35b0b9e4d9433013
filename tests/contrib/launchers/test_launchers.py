"""Trainings that real engines start: killed, preempted or stopped midway, they end with the weights of a local run.

`make test-cluster` runs them; each engine's tests are skipped where it is not installed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from cloned_project import copy_project, environment, run
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from engines import Kubernetes, free_port, has_slurm, slurm, step, wait_until, workers

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]
WEIGHTS = "checkpoints/pretrain/tden/model.safetensors"
STEPS, MIDWAY = 400, 60
TWO = {"trainer.devices": 1, "trainer.num_nodes": 2}


@pytest.fixture(scope="module")
def project(built_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project whose pretraining takes half a minute, trained locally with two processes."""
    folder = copy_project(built_project, tmp_path_factory.mktemp("launch") / "project")
    use(
        folder,
        {
            "trainer.accelerator": "cpu",
            "trainer.devices": 2,
            "trainer.checkpoint_every_steps": 20,
            "pretrain.tden.max_epochs": STEPS // 4,
        },
    )
    run(folder, "vlp", "stage", "pretrain", "tden")
    return folder


@pytest.fixture
def expected(project: Path) -> Iterator[dict[str, Any]]:
    """Return the local run's weights; leave the project without any trace of a training."""
    kept = project / "local.safetensors"
    if not kept.exists():
        (project / WEIGHTS).rename(kept)
    for path in (project / ".work").glob("pretrain-tden/*/*"):
        if path.name != "provenance.json":
            run(project, "rm", "-rf", str(path))
    (project / WEIGHTS).unlink(missing_ok=True)
    yield load_file(kept)
    use(project, {"trainer.launcher": "local", "trainer.devices": 2, "trainer.num_nodes": 1})


def use(project: Path, settings: dict[str, Any]) -> None:
    run(project, "vlp", "use", *(f"--set={key}={value}" for key, value in settings.items()))


@contextlib.contextmanager
def training(
    project: Path, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start `dvc repro pretrain@tden`, as `vlp run` does; what it prints is in `out.log`."""
    with (project.parent / "out.log").open("w") as output:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "vlp_models.cli.main", "stage", "pretrain", "tden"],
            cwd=project,
            env={**environment(project), **(env or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def output(project: Path) -> str:
    return (project.parent / "out.log").read_text()


def finish(project: Path, process: subprocess.Popen[str], expected: dict[str, Any]) -> None:
    """Wait for the end, and compare the weights with the local run's."""
    assert process.wait(600) == 0, output(project)
    found = load_file(project / WEIGHTS)
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in found) < 1e-6


def test_torchrun_replaces_a_killed_process(project: Path, expected: dict[str, Any]) -> None:
    use(project, {"trainer.launcher": "torchrun"})
    with training(project) as process:
        wait_until(lambda: step(project) >= MIDWAY, 300)
        workers(project)[-1].kill()
        finish(project, process, expected)
    assert "resuming from step" in output(project)


def test_a_stop_is_passed_on_and_resumed(project: Path, expected: dict[str, Any]) -> None:
    use(project, {"trainer.launcher": "torchrun"})
    with training(project) as process:
        wait_until(lambda: step(project) >= MIDWAY, 300)
        process.terminate()
        assert process.wait(120) == 75, output(project)
    assert "is saved, the same command resumes from there" in output(project)
    assert not workers(project)
    with training(project) as process:
        finish(project, process, expected)


def test_one_machine_needs_no_host_name_that_resolves(project: Path, expected: dict[str, Any]) -> None:
    """A container's often does not."""
    # Neither its own name nor `localhost`.
    nameless = 'hostname no-such-host-xyz && mount --bind /dev/null /etc/hosts && exec "$@"'
    unshare = ["unshare", "--uts", "--mount", "sh", "-c", nameless, "sh"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this account may not have a host name of its own")
    use(project, {"trainer.launcher": "torchrun"})
    with training(project, prefix=unshare) as process:
        finish(project, process, expected)


def test_a_killed_node_ends_the_training_which_then_resumes(project: Path, expected: dict[str, Any]) -> None:
    use(project, {"trainer.launcher": "torchrun"})
    with training(project) as process:
        wait_until(lambda: step(project) >= MIDWAY, 300)
        (node,) = psutil.Process(process.pid).children()
        node.kill()
        assert process.wait(60) == 2
    assert "torchrun exited with -9; first silent node" in output(project) and "run again to resume" in output(project)
    wait_until(lambda: not workers(project), 60)
    with training(project) as process:
        finish(project, process, expected)
    assert "resuming from step" in output(project)


def test_a_node_that_cannot_start_ends_the_training(project: Path, tmp_path: Path) -> None:
    use(project, {"trainer.launcher": "torchrun"})
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'vlp_models.contrib.launchers.node' in sys.orig_argv: os._exit(1)\n"
    )
    with training(project, {"PYTHONPATH": f"{tmp_path}:{project}"}) as process:
        assert process.wait(60) == 2
    assert "pretrain@tden: ended before any node wrote" in output(project)
    assert "torchrun exited with 1" in output(project)


def test_a_second_machine_joins_and_loses_its_agent(project: Path, expected: dict[str, Any]) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    use(project, {"trainer.launcher": "torchrun", **TWO, "launchers.torchrun.endpoint": endpoint})
    command = [sys.executable, "-m", "vlp_models.cli.main", "join"]
    with training(project) as process:
        other = subprocess.Popen(command, cwd=project, env=environment(project))
        try:
            wait_until(lambda: step(project) >= MIDWAY, 300)
            (agent,) = psutil.Process(other.pid).children()
            agent.kill()
            finish(project, process, expected)
        finally:
            other.terminate()
            other.wait(60)
    assert "vlp join" in output(project) and "resuming from step" in output(project)


def slurm_call(env: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def slurm_job(project: Path, folder: Path) -> Iterator[tuple[dict[str, str], str, subprocess.Popen[str]]]:
    """Start a training on two nodes of SLURM. Midway, yield SLURM's environment, the job's id and the command."""
    pytest.importorskip("submitit", reason="an extra: requirements-cluster.lock")
    if not has_slurm():
        pytest.skip("SLURM is not installed: apt-get install slurm-wlm munge")
    use(project, {"trainer.launcher": "slurm", **TWO, "launchers.slurm.partition": "main"})
    with slurm(folder) as env, training(project, env) as process:
        wait_until(lambda: step(project) >= MIDWAY, 300)
        (job,) = slurm_call(env, "squeue", "--noheader", "--format=%i").split()
        yield env, job, process


def start_now(env: dict[str, str], job: str) -> None:
    """Start a requeued job, which else waits two minutes."""
    slurm_call(env, "scontrol", "update", f"jobid={job}", "starttime=now")


def test_slurm_requeues_a_job_that_saves_its_state(project: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    with slurm_job(project, tmp_path / "slurm") as (env, job, process):
        # What SLURM sends `launchers.slurm.save_seconds` before the time limit.
        slurm_call(env, "scancel", "--signal=USR2", job)
        wait_until(lambda: "PENDING" in slurm_call(env, "squeue", "--noheader", "--jobs", job, "--format=%T"), 120)
        saved = step(project)
        start_now(env, job)
        finish(project, process, expected)
    assert f"resuming from step {saved}" in output(project)


def test_slurm_starts_a_job_again_whose_node_failed(project: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    with slurm_job(project, tmp_path / "slurm") as (env, job, process):
        slurm_call(env, "scontrol", "requeue", job)  # as after a node's failure or a preemption
        wait_until(lambda: not workers(project), 60)
        start_now(env, job)
        finish(project, process, expected)
    assert "resuming from step" in output(project)


def test_ray_replaces_a_killed_worker(project: Path, expected: dict[str, Any]) -> None:
    pytest.importorskip("ray", reason="an extra: requirements-cluster.lock")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        use(project, {"trainer.launcher": "ray", **TWO, "cluster.address": cluster.address})
        with training(project) as process:
            wait_until(lambda: step(project) >= MIDWAY, 300)
            agent = workers(project)[-1].parent()
            assert agent is not None
            actor = agent.parent()
            assert actor is not None and "ray::" in " ".join(actor.cmdline())
            actor.kill()
            finish(project, process, expected)
        assert "resuming from step" in output(project)
    finally:
        use(project, {"cluster.address": ""})
        cluster.shutdown()


@pytest.fixture
def kubernetes(project: Path, tmp_path: Path) -> Iterator[Kubernetes]:
    pytest.importorskip("kubeflow", reason="an extra: requirements-cluster.lock")
    api = Kubernetes(environment(project))
    api.write_kubeconfig(tmp_path / "kubeconfig")
    yield api
    api.close()


def test_kubeflow_runs_a_train_job_of_two_pods(
    project: Path, expected: dict[str, Any], kubernetes: Kubernetes, tmp_path: Path
) -> None:
    """The API is a stand-in; the SDK, the TrainJob and the pods' command are real."""
    settings = {"launchers.kubeflow.image": "example.org/vlp:1", "launchers.kubeflow.volume": "project"}
    settings["launchers.kubeflow.secrets"] = "{PASSWORD: vlp/mlflow}"
    use(project, {"trainer.launcher": "kubeflow", **TWO, **settings})
    with training(project, {"KUBECONFIG": str(tmp_path / "kubeconfig")}) as process:
        wait_until(lambda: step(project) >= MIDWAY, 300)
        (job,) = kubernetes.jobs.values()
        finish(project, process, expected)
    assert not kubernetes.jobs, "a complete one is deleted with its pods"
    trainer = job["spec"]["trainer"]
    assert (trainer["image"], trainer["numNodes"]) == ("example.org/vlp:1", 2)
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0] == {"name": "project", "persistentVolumeClaim": {"claimName": "project"}}
    assert pod["containers"][0]["volumeMounts"][0] == {"name": "project", "mountPath": str(project)}
    secret = {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "vlp", "key": "mlflow"}}}
    assert pod["containers"][0]["env"] == [secret]


def test_a_refused_train_job_is_an_error(project: Path, kubernetes: Kubernetes, tmp_path: Path) -> None:
    settings = {"launchers.kubeflow.image": "example.org/vlp:1", "launchers.kubeflow.volume": "project"}
    use(project, {"trainer.launcher": "kubeflow", **settings})
    kubernetes.refusal = "exceeded quota: requests.nvidia.com/gpu"
    with training(project, {"KUBECONFIG": str(tmp_path / "kubeconfig")}) as process:
        assert process.wait(120) == 2
    assert "did not accept the TrainJob" in output(project) and "exceeded quota" in output(project)
    use(project, {"trainer.launcher": "local"})


def test_a_pod_without_the_volume_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, "-m", "vlp_models.contrib.launchers.node", str(tmp_path / "no"), check=False)
    assert done.returncode == 2 and "all nodes see, under the same path" in done.stderr
