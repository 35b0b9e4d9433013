"""Datasets of the Hub by name, through the real client and a stand-in for the Hub on loopback."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hf_folders import Write, image, write_imagefolder, write_parquet, write_webdataset
from hub_server import COMMIT, REPOSITORY, HubServer, hub_server
from ruamel.yaml import YAML

from vlp_models.common.io import hash_path
from vlp_models.params import DatasetParams, load_params
from vlp_models.pipeline.dvc.external import explain_roots
from vlp_models.pipeline.dvc.graph import NOTHING

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TOKEN = "hf_secret"
OTHER = "b" * 40
CODE = {"pets.py": b"raise SystemExit", "weights.bin": b"pickle", "data.pkl": b"pickle", "README.md": b"# Pets"}
VLP = "from vlp_models.cli.main import main; main()"
PREPARE = """
import dataclasses, sys
from pathlib import Path
from vlp_models.common.workspace import Workspace
from vlp_models.errors import VLPError
from vlp_models.params import DatasetParams, load_params
from vlp_models.pipeline.stages import prepare
source = DatasetParams.of(format="hf", root=sys.argv[2])
params = dataclasses.replace(load_params(sys.argv[1]), data={"pets": source})
try:
    prepare.run(params, Workspace(Path.cwd()), "pets")
except VLPError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(hub: HubServer, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, since the client reads its environment once."""
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    place = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder.parent / "cache"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **place, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert TOKEN not in done.stdout + done.stderr
    return done


def prepare(hub: HubServer, folder: Path, root: str = f"hf://{REPOSITORY}@{COMMIT}", **variables: str) -> str:
    """Run `prepare` on a dataset; return the error that it raises, or nothing."""
    done = run(hub, folder, "-c", PREPARE, str(ROOT / "params.yaml"), root, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def images(folder: Path) -> set[bytes]:
    return set(files_below(folder / "data" / "interim" / "pets" / "images").values())


@pytest.mark.parametrize("write", [write_parquet, write_imagefolder, write_webdataset])
def test_name_gives_what_the_folder_gives(hub: HubServer, tmp_path: Path, write: Write) -> None:
    """Data alone is downloaded, once; without a network the cache is enough."""
    write(tmp_path / "pets")
    data = files_below(tmp_path / "pets")
    hub.files = data | CODE | {".hidden/a.parquet": b"no"}
    assert prepare(hub, tmp_path / "one") == ""
    assert images(tmp_path / "one") >= {image(n) for n in (0, 1, 2, 3, 5)}
    assert set(hub.downloaded) - {".hidden/a.parquet", "README.md"} == set(data)
    assert prepare(hub, tmp_path / "local", str(tmp_path / "pets")) == ""
    captions = [tmp_path / where / "data" / "interim" / "pets" / "captions.parquet" for where in ("one", "local")]
    assert captions[0].read_bytes() == captions[1].read_bytes()
    hub.downloaded.clear()
    assert prepare(hub, tmp_path / "two", HF_HUB_OFFLINE="1") == "" and not hub.downloaded
    assert hash_path(tmp_path / "one" / "data" / "interim") == hash_path(tmp_path / "two" / "data" / "interim")


def test_parquet_files_are_preferred_and_a_folder_is_enough(hub: HubServer, tmp_path: Path) -> None:
    write_parquet(tmp_path / "en")
    write_webdataset(tmp_path / "en" / "tars")
    write_imagefolder(tmp_path / "de")
    hub.files = {f"en/{name}": content for name, content in files_below(tmp_path / "en").items()}
    hub.files |= {f"de/{name}": content for name, content in files_below(tmp_path / "de").items()}
    assert prepare(hub, tmp_path / "one", f"hf://datasets/{REPOSITORY}@{COMMIT}/en") == ""
    assert set(hub.downloaded) == {f"en/data/{split}-00000-of-00001.parquet" for split in ("train", "test")}


def test_tars_are_preferred_to_the_tables_that_img2dataset_writes_next_to_them(hub: HubServer, tmp_path: Path) -> None:
    write_webdataset(tmp_path / "pets")
    tars = files_below(tmp_path / "pets")
    hub.files = tars | {name.replace(".tar", ".parquet"): b"a table of URLs" for name in tars}
    assert prepare(hub, tmp_path / "one") == ""
    assert set(hub.downloaded) == set(tars)


def test_a_file_with_a_wrong_hash_is_refused(hub: HubServer, tmp_path: Path) -> None:
    write_parquet(tmp_path / "pets")
    hub.files = files_below(tmp_path / "pets")
    name = "data/test-00000-of-00001.parquet"
    hub.damaged[name] = hub.files[name][:-5] + b"12345"  # of the same size, which is all that the client compares
    message = prepare(hub, tmp_path / "one")
    assert message.startswith(f"DataError: data.pets: {name} of hf://{REPOSITORY}@{COMMIT} does not have the hash")
    damaged = Path(message.split("delete ")[1].removesuffix(" and run again"))
    assert (
        damaged.read_bytes() == hub.damaged.pop(name) and not (tmp_path / "one" / "data" / "interim" / "pets").exists()
    )
    damaged.unlink()
    assert prepare(hub, tmp_path / "one") == "" and images(tmp_path / "one")


def test_an_imagefolder_does_not_lead_out_of_the_dataset(hub: HubServer, tmp_path: Path) -> None:
    write_imagefolder(tmp_path / "pets")
    hub.files = files_below(tmp_path / "pets")
    secret = tmp_path / "secret.png"
    secret.write_bytes(image(7))
    for path in (f"../../../../../../{secret}", str(secret), "../../../../../../../secret.png", "missing.png"):
        hub.files["train/metadata.jsonl"] += f'{{"file_name": "{path}", "text": "x"}}\n'.encode()
    assert prepare(hub, tmp_path / "one") == ""
    assert image(0) in images(tmp_path / "one") and image(7) not in images(tmp_path / "one")


def test_errors_name_the_repository_and_the_way_out(hub: HubServer, tmp_path: Path) -> None:
    root = f"hf://{REPOSITORY}@{COMMIT}"
    hub.files = dict(CODE)
    message = prepare(hub, tmp_path / "one")
    assert (
        "has no .parquet, no .tar and no metadata.jsonl or metadata.csv, but .bin, .md, .pkl, .py; the Hub" in message
    )
    message = prepare(hub, tmp_path / "one", f"hf://owner/other@{COMMIT}", HF_TOKEN=TOKEN)
    assert f"data.pets: hf://owner/other@{COMMIT}: no such dataset at {hub.address}, or it is private" in message
    assert "set HF_TOKEN" in message
    message = prepare(hub, tmp_path / "one", f"hf://{REPOSITORY}@{OTHER}")
    assert f"the dataset has no revision {OTHER}" in message
    for moving, reason in (("", "it names no commit"), ("@main", "`main` is not a commit and may move")):
        message = prepare(hub, tmp_path / "one", f"hf://{REPOSITORY}{moving}")
        assert (
            f"{reason}, so results could change; run `vlp use --set data.pets.root=hf://{REPOSITORY}{moving}`"
            in message
        )
    assert "write it as hf://OWNER/NAME[@REVISION][/FOLDER]" in prepare(hub, tmp_path / "one", "hf://owner")

    write_parquet(tmp_path / "pets")
    hub.files, hub.token = files_below(tmp_path / "pets"), TOKEN
    message = prepare(hub, tmp_path / "one", HF_HOME=str(tmp_path / "new"))
    assert f"{root}: the dataset is gated; accept its terms at {hub.address}/datasets/{REPOSITORY}" in message
    wrong = prepare(hub, tmp_path / "one", HF_HOME=str(tmp_path / "new"), HF_TOKEN=f"{TOKEN}2")
    assert wrong == message
    partial = prepare(hub, tmp_path / "one", HF_HOME=str(tmp_path / "new"), HF_HUB_OFFLINE="1")
    assert f"{root}: not complete in the cache {tmp_path / 'new' / 'hub'}, and HF_HUB_OFFLINE is set; unset" in partial
    assert prepare(hub, tmp_path / "one", HF_HOME=str(tmp_path / "new"), HF_TOKEN=TOKEN) == ""


def test_without_a_network_the_cache_is_named(hub: HubServer, tmp_path: Path) -> None:
    unreachable = prepare(hub, tmp_path / "one", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "empty"))
    assert "http://127.0.0.1:9 (by HF_ENDPOINT) cannot be reached (" in unreachable
    assert "refused); run again where there is a network, or set HF_HOME" in unreachable
    assert f"hf download {REPOSITORY} --repo-type dataset --revision {COMMIT}" in unreachable


def test_use_writes_the_commit_of_a_moving_name(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(ROOT / "params.yaml", folder)

    def use(*assign: str, **variables: str) -> str:
        options = [part for text in assign for part in ("--set", text)]
        done = run(hub, folder, "-c", VLP, "use", *options, **variables)
        assert (done.returncode == 0) == ("vlp: " not in done.stderr), done.stderr
        return done.stderr

    notes = use(f"data.pets={{format: hf, root: hf://{REPOSITORY}}}")
    assert f"hf://{REPOSITORY} may move, so params.yaml gets its commit of now" in notes
    params = load_params(folder / "params.yaml")
    assert params.data["pets"].root == f"hf://{REPOSITORY}@{COMMIT}"
    assert YAML(typ="safe").load(folder / "params.yaml")["data"]["pets"], "DVC's parser reads it"
    stages = yaml.safe_load((folder / "dvc.yaml").read_text())["stages"]
    assert stages["prepare"]["foreach"]["pets"]["root"] == NOTHING, "the commit is a param, the cache no dependency"
    assert stages["prepare"]["foreach"]["scenes"]["root"] == "data/raw/scenes"
    wrong = dataclasses.replace(params, data={"pets": DatasetParams.of(format="coco", root=f"hf://{REPOSITORY}")})
    assert "the format coco reads a folder, not an address" in explain_roots(wrong, folder)[0]

    hub.revisions["main"] = OTHER
    assert "may move" not in use("tokenizer.vocab_size=500")
    assert load_params(folder / "params.yaml").data["pets"].root == f"hf://{REPOSITORY}@{COMMIT}"
    use(f"data.pets.root=hf://{REPOSITORY}@main/en")
    assert load_params(folder / "params.yaml").data["pets"].root == f"hf://{REPOSITORY}@{OTHER}/en"
    before = (folder / "params.yaml").read_bytes()
    assert "has no revision v7" in use(f"data.pets.root=hf://{REPOSITORY}@v7")
    assert "so its commit is unknown" in use(f"data.pets.root=hf://{REPOSITORY}", HF_HUB_OFFLINE="1")
    assert (folder / "params.yaml").read_bytes() == before

    bare = before.decode().replace(f'"hf://{REPOSITORY}@{OTHER}/en"', f"hf://{REPOSITORY}@{OTHER}")
    (folder / "params.yaml").write_text(bare)
    done = run(hub, folder, "-c", VLP, "plan")
    assert "params.yaml: not valid YAML: line" in done.stderr and done.returncode == 2
    assert "put a text with a colon in quotes" in done.stderr
