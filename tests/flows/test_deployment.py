"""docs/guides/deployment.md on a real Prefect server: deploy, event, refusal, failure, two at once, cancel.

fastapi >= 0.151 and sqlalchemy >= 2.1 break Prefect 3.8 without an error at import or deploy; the latter only stops
schedules from creating runs. So one test waits for a scheduled run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
import yaml
from flow_project import break_stage, set_flow
from unattended_site import ROOT, TRAINER, Site, documented_commands, open_site, wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.mark.core
def test_event_triggers_a_run_that_publishes_artifacts(site: Site) -> None:
    deployments = {d["name"]: d for d in site.server.post("/deployments/filter", {})}
    assert set(deployments) == {"weekly", "model", "alias", "task", "webhook"}
    assert [schedule["active"] for schedule in deployments["weekly"]["schedules"]] == [False], "shipped paused"
    names = {automation["name"] for automation in site.server.post("/automations/filter", {})}
    assert "mark dead runs as crashed" in names
    assert site.server.flow_runs("SCHEDULED") == []

    emit = next(command for command in documented_commands("get-started/unattended.md") if "event emit" in command)
    site.server.run(shlex.split(emit.removeprefix("prefect ")), site.project)
    run = str(site.server.wait_for_any("COMPLETED", 180)["id"])
    assert site.server.flow_run(run)["parameters"]["reason"] == "dataset.updated vlp.dataset.ingested"
    assert "promote vqa: refused" in site.server.flow_run(run)["state"]["message"]
    name = site.server.flow_run(run)["name"]
    assert name.startswith("retrain: ") and name.endswith(", refused"), "the list of runs shows names and a green bar"
    assert "promote vqa: refused" in site.next_message("Completed")
    states = site.server.task_states(run)
    assert states.pop("promote vqa") == "Refused"
    assert states.pop("ingest") == "Skipped"
    states.pop("drift")  # runs if reports/ingest.json may have changed
    assert set(states.values()) == {"Completed"}
    assert {"validate", "features", "pretrain tden", "finetune tden-vqa", "evaluate", "register", "report"} <= set(
        states
    )
    artifacts = site.server.artifacts(run)
    links = {"report", "mlflow-captioning", "mlflow-vqa"}
    assert set(artifacts) == {"parts", "ingest", "drift", "promotion", "candidates", "results", "validation"} | links
    assert "40.8" in artifacts["results"], "the champion's value next to the challenger's"
    assert "gain 0.2 is below 0.5" in artifacts["promotion"]
    assert "caption length" in artifacts["drift"]
    assert f"{site.project}/reports/index.html" in artifacts["report"]
    assert "#/models/vlp-vqa/versions/1" in artifacts["mlflow-vqa"]


def test_failing_stage_fails_the_run_with_its_last_lines(site: Site) -> None:
    text = (site.project / "dvc.yaml").read_text()
    break_stage(site.project, "pretrain", "sys.exit('disk on fire')")
    run = site.server.start_run("retrain/weekly")
    message = site.server.wait_for(run, "FAILED")["message"]
    (site.project / "dvc.yaml").write_text(text)
    assert "dvc repro pretrain@tden training_stats exited with code 255" in message and "\ndisk on fire\n" in message
    assert "\ndisk on fire\n" in site.next_message("Failed")
    states = site.server.task_states(run)
    assert states["pretrain tden"] == "Failed" and "evaluate" not in states
    assert "validate" in site.server.artifacts(run)["parts"], "artifacts are published even so"


def test_second_run_gets_the_name_of_the_first_and_a_canceled_trainer_saves(site: Site) -> None:
    text = (site.project / "dvc.yaml").read_text()
    (site.project / "trainer.py").write_text(TRAINER)
    break_stage(site.project, "pretrain", "import trainer")
    first = site.server.start_run("retrain/weekly")
    wait_until(lambda: (site.project / "started").exists(), 120)
    second = site.server.start_run("train/model", run="tden-vqa")
    message = site.server.wait_for(second, "CANCELLED")["message"]  # plain-ok
    assert re.search(r"another flow retrain \(retrain\) \(pid \d+\) is using this workspace", message)
    assert site.next_message("Cancelled") == message  # plain-ok

    site.server.run(["flow-run", "cancel", first], site.project)
    site.server.wait_for(first, "CANCELLED")  # plain-ok
    assert site.next_message("Cancelled") == "Flow run was cancelled."  # plain-ok
    wait_until(lambda: (site.project / "saved").exists())
    (site.project / "dvc.yaml").write_text(text)
    assert site.server.task_states(first)["features"] == "Up to date", "an earlier run computed them"


def test_other_deployments_wait_for_one_another(site: Site) -> None:
    (site.project / "asked.txt").unlink(missing_ok=True)
    set_flow(site.project, wait_minutes=5)
    runs = [
        site.server.start_run("train/model", run="tden-vqa", preset="tiny"),
        site.server.start_run("evaluate/alias", task="vqa"),
        site.server.start_run("promote/task", task="captioning"),
        site.server.start_run("rollback/task", task="captioning"),
    ]
    wrong = site.server.start_run("promote/task", task="captoning; rm -rf http://ann:hunter2@127.0.0.1/")
    for run in runs:
        site.server.wait_for(run, "COMPLETED")
    assert set(site.server.task_states(runs[0])) == {
        *("prepare the workspace", "use tiny", "validate", "features", "pretrain tden"),
        *("finetune tden-vqa", "evaluate", "publish results"),
    }
    message = site.server.wait_for(wrong, "FAILED")["message"]
    assert "rm -rf http://***@127.0.0.1/' is not a task; known: captioning" in message and "hunter2" not in message
    asked = sorted((site.project / "asked.txt").read_text().split())
    assert asked == ["evaluate-alias-vqa-champion", "promote-captioning", "rollback-captioning", "use-tiny"]


def test_resumed_schedule_creates_runs(site: Site) -> None:
    weekly = next(d for d in site.server.post("/deployments/filter", {}) if d["name"] == "weekly")
    schedule = weekly["schedules"][0]["id"]
    site.server.run(["deployment", "schedule", "resume", "retrain/weekly", schedule], site.project)
    assert site.server.wait_for_any("SCHEDULED", 90)["deployment_id"] == weekly["id"]


def test_kubernetes_deployments_can_be_registered(site: Site) -> None:
    """On a real server, with the shipped job template; this needs no cluster."""
    folder = "deploy/kubernetes"
    template = ["--base-job-template", f"{folder}/job-template.json"]
    site.server.run(["work-pool", "create", "vlp-kubernetes", "--type", "kubernetes", *template], site.project)
    site.server.env["VLP_IMAGE"] = "registry.example.org/vlp@sha256:0"
    site.server.run(["deploy", "--all", "--prefect-file", f"{folder}/prefect.yaml"], site.project)
    deployments = [d for d in site.server.post("/deployments/filter", {}) if d["work_pool_name"] == "vlp-kubernetes"]
    variables = {d["entrypoint"].partition(":")[2]: d["job_variables"] for d in deployments}
    assert variables["retrain"]["image"] == "registry.example.org/vlp@sha256:0"
    assert variables["retrain"]["gpus"] == 1 and variables["rollback"]["gpus"] == 0
    for file in ("workspace.yaml", "worker-values.yaml"):
        assert all(yaml.safe_load_all((ROOT / folder / file).read_text()))
