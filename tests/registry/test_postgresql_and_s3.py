"""MLflow on PostgreSQL with artifacts in a bucket: real servers on this machine, configured by params only."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_registry import PASSED, TRACKING, ToyRegistry, answers, toy_items, write_evaluation

from vlp_models.errors import DataError, TrackingError
from vlp_models.params import TrackingParams
from vlp_models.registry import versions
from vlp_models.registry.client import connect
from vlp_models.registry.evaluations import read_latest_evaluation, read_lineage
from vlp_models.registry.mlflow_run import DataInput
from vlp_models.registry.promotion.judge import check_readable
from vlp_models.registry.versions import VersionRecord, download_bundle, register

pgserver = pytest.importorskip("pgserver")
moto = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")


@pytest.fixture
def tracking(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackingParams]:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    folder = Path(
        tempfile.mkdtemp()
    )  # not pytest's: PostgreSQL, started by root, runs as another user, who needs access
    folder.chmod(0o755)
    bucket = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    bucket.start()
    database = pgserver.get_server(folder / "pg", cleanup_mode="stop")
    try:
        endpoint = f"http://127.0.0.1:{bucket.get_host_and_port()[1]}"
        known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "secret-of-s3", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in (known | {"MLFLOW_S3_ENDPOINT_URL": endpoint}).items():
            monkeypatch.setenv(name, value)
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="models")
        uri = database.get_uri().replace("postgresql://", "postgresql+psycopg://")
        yield dataclasses.replace(TRACKING, uri=uri, artifacts="s3://models/vlp")
    finally:
        database.cleanup()
        bucket.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.server
def test_version_is_registered_promoted_and_read_back(
    tracking: TrackingParams, tmp_path: Path, recwarn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.pyfunc

    card = "# a card\n" + "| a row for each of VQA v2's question types | 50.0 |\n" * 150
    root = tmp_path / "project"
    bundle = root / "made" / "bundle"
    (bundle / "checkpoint").mkdir(parents=True)
    (bundle / "checkpoint" / "weights").write_text("1")
    client = connect(tracking, root)
    learned = DataInput(name="scenes", context="training", digest="ab" * 32, uri="data/shards", counts={"captions": 3})
    record = VersionRecord(
        name="toy-vqa",
        task="vqa",
        run="first",
        bundle=bundle,
        content="c",
        evaluation=write_evaluation(tmp_path / "evaluation", [toy_items(answers(0.5))]),
        metrics={"accuracy": 50.0},
        tags={"run": "first"},
        card=card,
        prediction={"answer": "yes", "top": [["yes", 0.5]], "ranks": [1, 2]},
        inputs=[learned],
        lineage={"validation": PASSED},
        lineage_files={"params.yaml": "a: 1\n"},
    )
    made = register(client, record)
    version = client.get_model_version("toy-vqa", str(made.version))
    run = client.get_run(version.run_id)
    assert run.info.artifact_uri.startswith("s3://models/vlp/")
    assert len(version.description) <= 5000 < len(card) and version.description.startswith("# a card\n| a row")
    assert client.download_artifacts(version.run_id, "model_card.md", str(tmp_path)) and (
        (tmp_path / "model_card.md").read_text() == card
    )
    downloaded = download_bundle(version)
    assert (downloaded / "checkpoint" / "weights").read_text() == "1"
    assert downloaded.is_relative_to(versions._downloads_folder().name), "removed when the process ends"
    assert read_latest_evaluation(client, version)[0].metric == "accuracy"
    assert (read_lineage(client, version) or {})["validation"] == PASSED
    (known,) = run.inputs.dataset_inputs
    assert (known.dataset.name, known.tags[0].value) == ("scenes", "training")
    about = mlflow.models.get_model_info(f"models:/toy-vqa/{version.version}")
    assert [column.name for column in about.signature.outputs] == ["answer", "top", "ranks"]
    assert about.saved_input_example_info is not None
    assert not [w for w in recwarn if "type hints" in str(w.message)]

    registry = ToyRegistry(root, "toy-other", tracking)
    for share in (0.5, 0.9):
        registry.add(answers(share))
        assert registry.promote().action == "promoted"
    assert registry.aliases() == {"champion": 2, "previous": 1}
    assert registry.rollback().version == 1 and registry.actions() == ["promoted", "promoted", "rolled back"]

    promoted = registry.client.get_model_version(registry.model, "2")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(TrackingError, match="the artifact store does not answer"):
            check_readable(promoted)
    address = os.environ["MLFLOW_S3_ENDPOINT_URL"]
    boto3.resource("s3", endpoint_url=address).Bucket("models").objects.all().delete()
    with pytest.raises(DataError, match="version 2: cannot read its files"):
        check_readable(promoted)
    assert not list(root.glob("*.db")) and not (root / "artifacts").exists()
