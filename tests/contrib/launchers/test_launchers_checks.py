"""What is checked before and around a launched training, without any engine."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import yaml

from vlp_models.common.io import write_json
from vlp_models.common.log import configure_logging
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.launchers import launch as seam
from vlp_models.contrib.launchers import node, torchrun, worker
from vlp_models.contrib.launchers.launch import LAUNCH, OUTCOME, STOP, Launch, is_there, launch, write_outcome
from vlp_models.contrib.launchers.machine import describe_machine
from vlp_models.contrib.launchers.params import KubeflowParams, LaunchersParams, TorchrunParams
from vlp_models.errors import LaunchError, MissingToolError, Terminated
from vlp_models.params import Params, parse_params
from vlp_models.pipeline.guard import LAUNCHED, RECORDED
from vlp_models.pipeline.unrecorded_results import restore_unrecorded_result, save_unrecorded_result

OTHER = {"package": {"package": "vlp-flows", "version": "9.9", "code": "f" * 64}, "versions": {}}
ROOT = Path(__file__).parents[3]


def start(tmp_path: Path, section: LaunchersParams | None = None, **trainer: Any) -> int:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text())
    params = parse_params(raw | {"trainer": raw["trainer"] | trainer})
    params = dataclasses.replace(params, sections=params.sections | ({"launchers": section} if section else {}))
    return launch(params, Workspace(tmp_path), "pretrain", "tden", "params.yaml")


@pytest.fixture
def wanted(tmp_path: Path) -> Launch:
    """Return a launch whose folder is written."""
    made = Launch(
        id="abc",
        root=str(tmp_path),
        stage="pretrain",
        key="tden",
        params_file="params.yaml",
        nodes=1,
        devices=1,
        gpu=False,
        by_dvc=True,
        endpoint="",
        machine=describe_machine(),
    )
    made.folder.mkdir(parents=True)
    write_json(made.folder / LAUNCH, dataclasses.asdict(made))
    return made


def test_several_nodes_without_a_meeting_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"`launchers\.torchrun\.endpoint`: HOST:PORT"):
        start(tmp_path, launcher="torchrun", num_nodes=2)


@pytest.mark.parametrize("kind", ["slurm", "ray", "kubeflow"])
def test_an_engine_without_its_package_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == seam.PACKAGES[kind]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, seam.PACKAGES[kind], None)
    monkeypatch.delitem(sys.modules, seam.LAUNCHERS[kind].partition(":")[0], raising=False)
    with pytest.raises(MissingToolError, match=rf"vlp-flows\[{kind}\]"):
        start(tmp_path, launcher=kind, accelerator="cpu")


@pytest.mark.parametrize("key", ["image", "volume"])
def test_kubeflow_needs_an_image_and_a_volume(tmp_path: Path, key: str) -> None:
    pytest.importorskip("kubeflow")
    settings = {"image": "example.org/vlp:1", "volume": "project", key: ""}
    section = LaunchersParams(kubeflow=KubeflowParams(**settings))
    with pytest.raises(LaunchError, match=rf"needs `launchers\.kubeflow\.{key}`"):
        start(tmp_path, section, launcher="kubeflow", accelerator="cpu")


def test_a_slurm_controller_that_does_not_answer_is_named_while_its_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("submitit")
    from vlp_models.contrib.launchers import slurm

    configure_logging()
    monkeypatch.setattr(slurm, "POLL_EVERY", 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 'error: Unable to contact slurm controller' >&2; exit 1\n")
    squeue.chmod(0o755)
    job = slurm.SlurmJob("7")
    assert job.end() is None and job.end() is None
    assert capsys.readouterr().err.count("Unable to contact slurm controller); waiting for squeue") == 1


def test_slurm_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="are you indeed on a slurm cluster"):
        start(tmp_path, launcher="slurm", accelerator="cpu")


def test_a_node_that_does_not_see_the_folder_reports_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="on a file system that all nodes see, under the same path"):
        node.run_node(tmp_path / "elsewhere", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": OTHER}, r"has another vlp_models \(version .*install the same one there: version 9\.9"),
        ({"gpu": True, "devices": 64}, r"has \d+ GPUs; `trainer\.devices: 64`"),
        ({"nodes": 2}, r"host name no-such-host\.invalid does not resolve; add it to /etc/hosts"),
    ],
    ids=["another version", "too few GPUs", "host name"],
)
def test_a_node_that_cannot_take_part_ends_the_training(
    wanted: Launch, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "no-such-host.invalid")
    write_json(wanted.folder / LAUNCH, dataclasses.asdict(wanted) | change)
    assert node.run_node(wanted.folder, 0, "127.0.0.1:29500") == 0
    with pytest.raises(LaunchError, match=rf"pretrain@tden: .*{message}"):
        seam._exit_code(wanted, "ended")


def test_a_lost_node_is_named_with_its_last_lines(wanted: Launch) -> None:
    for host, age in (("good", 0), ("bad", 90)):
        alive = wanted.folder / f"node-{len(host)}-{host}.alive"
        alive.touch()
        os.utime(alive, (time.time() - age,) * 2)
        alive.with_suffix(".log").write_text(f"last words of {host}\n")
    with pytest.raises(LaunchError, match=r"(?s)first silent node: bad, .*run again to resume.*last words of bad"):
        seam._exit_code(wanted, "SLURM job 7: NODE_FAIL")


def test_a_job_that_wrote_nothing_points_to_the_file_system(wanted: Launch) -> None:
    with pytest.raises(LaunchError, match=r"ended before any node wrote .*\(SLURM job 7: FAILED\).*all nodes see"):
        seam._exit_code(wanted, "SLURM job 7: FAILED")


def test_a_stop_before_the_start_is_no_error_of_the_engine(wanted: Launch) -> None:
    (wanted.folder / STOP).touch()
    with pytest.raises(Terminated):
        seam._exit_code(wanted, "stopped while it waited")


@pytest.mark.parametrize(
    ("code", "lost", "before", "exit_code", "outcome"),
    [
        (0, False, None, 0, 0),
        (2, False, None, 0, 2),
        (75, True, 3, 0, 3),
        (75, True, None, 1, None),
        (75, False, None, 1, None),
        (143, False, None, 1, None),
    ],
    ids=["done", "refused", "lost after an error", "lost", "stopped by torchrun", "stopped by torchrun before updates"],
)
def test_torchrun_starts_again_only_what_that_helps(
    wanted: Launch,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    lost: bool,
    before: int | None,
    exit_code: int,
    outcome: int | None,
) -> None:
    monkeypatch.setattr(worker, "WAIT", 0.0)
    if before is not None:
        write_outcome(wanted.folder, "other", before)
    assert worker.finish(wanted.folder, code, lost=lost) == exit_code
    file = wanted.folder / OUTCOME
    assert (json.loads(file.read_text())["code"] if file.exists() else None) == outcome


@pytest.mark.parametrize("code", [75, 143])
def test_a_requested_stop_is_the_outcome(wanted: Launch, code: int) -> None:
    (wanted.folder / STOP).touch()
    assert worker.finish(wanted.folder, code, lost=False) == 0
    assert json.loads((wanted.folder / OUTCOME).read_text())["code"] == code


@pytest.mark.parametrize("kind", ["slurm", "ray", "kubeflow"])
def test_what_to_reserve_must_be_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(LaunchError, match=r"needs `trainer\.accelerator: gpu` or `cpu`"):
        start(tmp_path, launcher=kind)


class Silent:
    """A job whose engine does not report its end."""

    canceled = cleaned_up = False

    def end(self) -> str | None:
        return None

    def cancel(self) -> None:
        self.canceled = True

    def clean_up(self) -> None:
        self.cleaned_up = True


def test_an_outcome_ends_the_wait_for_an_engine_that_does_not_report(
    wanted: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(seam, "POLL", 0.01)
    write_outcome(wanted.folder, "host", 3)
    ended = seam._follow(Silent(), wanted)
    assert "does not report" in ended and seam._exit_code(wanted, ended) == 3


def test_a_stop_cancels_a_job_that_waits_in_a_queue(wanted: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Silent()

    def interrupted() -> str | None:
        raise KeyboardInterrupt

    ends = iter([interrupted, lambda: None])
    monkeypatch.setattr(job, "end", lambda: next(ends)())
    assert seam._follow(job, wanted) == "stopped while it waited"
    assert job.canceled


def test_a_launched_training_keeps_its_result_until_dvc_has_recorded_it(
    wanted: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC's variables do not reach the nodes; launch.json has whether DVC runs the stage."""
    for name in ("DVC_STAGE", RECORDED, LAUNCHED):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    workspace = Workspace(tmp_path)
    work, output = workspace.work("pretrain-tden", "0123"), tmp_path / "checkpoints" / "model"

    def train() -> None:
        if not restore_unrecorded_result(workspace, work, "pretrain@tden"):
            output.parent.mkdir(parents=True)
            output.write_text("learned")
            save_unrecorded_result(workspace, work, "pretrain@tden", [output])

    monkeypatch.setattr(worker, "run_command", train)
    monkeypatch.setattr(sys, "argv", ["worker", str(wanted.folder), wanted.id])
    with pytest.raises(SystemExit):
        worker.main()
    output.unlink()  # as DVC does, which was killed while it hashed the output
    output.parent.rmdir()
    monkeypatch.setattr(sys, "argv", ["worker", str(wanted.folder), wanted.id])
    monkeypatch.setenv("RANK", "1")
    assert restore_unrecorded_result(workspace, work, "pretrain@tden") and not output.exists(), "rank 0 writes"
    monkeypatch.setenv("RANK", "0")
    assert restore_unrecorded_result(workspace, work, "pretrain@tden") and output.read_text() == "learned"


def join_until_taking_part(root: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> list[tuple[str, str]]:
    """Return the training and the endpoint of the first launches in which `vlp join` takes part."""
    found: list[tuple[str, str]] = []

    def take_part(folder: Path, index: int, endpoint: str) -> int:
        found.append((folder.name, endpoint))
        if len(found) == times:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(torchrun, "run_node", take_part)
    with pytest.raises(KeyboardInterrupt):
        torchrun.join(root, 1)
    return found


def write_launch(wanted: Launch, **changes: Any) -> Path:
    made = dataclasses.replace(wanted, **changes)
    made.folder.mkdir(parents=True, exist_ok=True)
    write_json(made.folder / LAUNCH, dataclasses.asdict(made))
    return made.folder


def test_join_meets_each_training_at_its_own_endpoint(
    wanted: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """params.yaml may have changed since `vlp join` was started."""
    write_launch(wanted, nodes=2, endpoint="first:1")
    write_launch(wanted, nodes=2, endpoint="second:2", key="two-pass", id="abd")
    (write_launch(wanted, nodes=2, key="refused", id="abe") / STOP).touch()
    found = join_until_taking_part(tmp_path, monkeypatch, 2)
    assert found == [("pretrain-tden", "first:1"), ("pretrain-two-pass", "second:2")]


def test_join_refuses_a_training_without_an_endpoint(wanted: Launch, tmp_path: Path) -> None:
    folder = write_launch(wanted, nodes=2)
    with pytest.raises(LaunchError, match=rf"{folder / LAUNCH}: .*`launchers\.torchrun\.endpoint` in params\.yaml"):
        torchrun.join(tmp_path, 1)


@pytest.mark.parametrize(("kind", "stored"), [("torchrun", "first:29500"), ("slurm", "")])
def test_the_endpoint_is_stored_with_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stored: str
) -> None:
    section, job = LaunchersParams(torchrun=TorchrunParams(endpoint="first:29500")), Silent()

    def run(launch: Launch, params: Params) -> Silent:
        write_outcome(launch.folder, "host", 0)
        monkeypatch.setattr(job, "end", lambda: "ended")
        return job

    engine = SimpleNamespace(start=run)
    monkeypatch.setitem(sys.modules, seam.LAUNCHERS[kind].partition(":")[0], cast(ModuleType, engine))
    assert start(tmp_path, section, launcher=kind, accelerator="cpu", num_nodes=2) == 0
    assert Launch.read(tmp_path / ".work" / "launches" / "pretrain-tden").endpoint == stored
    assert job.cleaned_up and not job.canceled


@pytest.mark.parametrize(("status", "deleted"), [("Complete", True), ("Failed", False)])
def test_a_complete_train_job_is_deleted(monkeypatch: pytest.MonkeyPatch, status: str, deleted: bool) -> None:
    """With a stand-in for Kubeflow's SDK; tests/cluster has one for the API."""
    for name in ("", ".common", ".common.types", ".trainer", ".trainer.options"):
        monkeypatch.setitem(sys.modules, f"kubeflow{name}", MagicMock())
    own = "vlp_models.contrib.launchers.kubeflow"
    monkeypatch.setitem(sys.modules, own, MagicMock())  # is put back in the end
    del sys.modules[own]
    kubeflow = importlib.import_module(own)
    client = MagicMock()
    client.get_job.return_value.status = status
    job = kubeflow.TrainJob(client, "vlp-pretrain-abc")
    assert job.end() == f"TrainJob vlp-pretrain-abc: {status}"
    client.delete_job.assert_not_called()
    job.clean_up()
    assert [call.args for call in client.delete_job.call_args_list] == ([("vlp-pretrain-abc",)] if deleted else [])


def test_a_launch_file_that_cannot_be_read_now_does_not_stop_its_processes(wanted: Launch) -> None:
    file = wanted.folder / LAUNCH
    assert worker._is_current(wanted.folder, wanted.id) and not worker._is_current(wanted.folder, "newer")
    file.write_text("")
    assert worker._is_current(wanted.folder, wanted.id), "read while the file system does not respond"
    file.unlink()
    assert not worker._is_current(wanted.folder, wanted.id)
    file.mkdir()  # reading it is an OSError
    assert worker._is_current(wanted.folder, wanted.id)


def test_signs_of_life_go_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "BEAT", 0.01)
    alive = tmp_path / "folder" / "node-0-host.alive"
    with node._signs_of_life(alive):
        time.sleep(0.1)
        alive.parent.mkdir()
        deadline = time.monotonic() + 20
        while not alive.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_file_system_that_does_not_respond_is_no_file_and_no_end(
    wanted: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_there(wanted.folder / ("x" * 300))  # Path.exists raises
    output = seam._Output(wanted)
    log = wanted.folder / "node-0-host.log"
    log.mkdir()
    output.copy()
    log.rmdir()
    log.write_text("a line\n")
    output.copy()
    assert capsys.readouterr().err == "a line\n"
