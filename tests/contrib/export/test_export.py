"""An export is the registered version in Hugging Face's layout: the same ids, the same outputs, nothing else needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cloned_project import copy_project, run_in_process
from hub_server import REPOSITORY, hub_server
from PIL import Image
from small_project import make_model

from vlp_models import VLP
from vlp_models.common.io import hash_file
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.export import layout, licenses
from vlp_models.contrib.export.card import hub_identifier, make_hub_card
from vlp_models.contrib.export.layout import write_export
from vlp_models.contrib.export.licenses import BorrowedWeights, find_borrowed
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError, VLPError
from vlp_models.params import ModelParams, Params, to_plain
from vlp_models.serving.bundle import read_bundle_info, write_bundle
from vlp_models.serving.predictor import Predictor
from vlp_models.tasks import TASKS

ROOT = Path(__file__).parents[3]
TEXTS = (
    "a red circle, isn't it? (below: a dotted square)",
    "[SEP] a [MASK] [CLS] [UNK]",
    "Café naïve ÜBER Straße I\u0307",
    "一只猫 在 垫子上。",
    "हिन्दी ปลา 한국어 مرحبا שלום",
    "tab\tand\u200bzero\x00width\nline",
    "zzzqqq 🐱🐶 x" + "y" * 150,
    "",
)
# Raises for an import of these packages, as if they were not installed
NOT_INSTALLED = """
import sys
from importlib.machinery import ModuleSpec

class Missing:
    names = ("lightning mlflow prefect dvc pandas duckdb pyarrow cv2 great_expectations transformers scipy webdataset "
             "pycocoevalcap pycocotools typer rich ruamel psutil jinja2 fastapi sqlalchemy").split()

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] in self.names else None

    def create_module(self, spec):
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def exports(page_project: Workspace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the export of each of the project's versions, by task."""
    root = tmp_path_factory.mktemp("exports")
    for task in ("captioning", "vqa", "retrieval"):
        write_export(bundle_of(page_project, task), root / task, "# card\n")
    return {folder.name: folder for folder in root.iterdir()}


def bundle_of(workspace: Workspace, task: str) -> Path:
    return workspace.root / "bundles" / task / "bundle"


def make_bundle(workspace: Workspace, folder: Path, params: Params, task: str, made: ModelParams) -> Path:
    """Return the bundle of an untrained model."""
    folder.mkdir()
    checkpoint = make_model(workspace, 5, f"other.{task}", made=made, name="other", task=task)
    write_bundle(folder, checkpoint=checkpoint, detector=workspace.detector, features=to_plain(params.features))
    return folder


def run_python(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ---- Outputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["captioning", "vqa"])
@pytest.mark.parametrize("form", ["path", "image", "array"])
def test_export_predicts_what_the_bundle_predicts(
    task: str, form: str, exports: dict[str, Path], page_project: Workspace, photo: Path
) -> None:
    text = "is there a red circle?" if task == "vqa" else ""
    image = {"path": photo, "image": Image.open(photo), "array": np.asarray(Image.open(photo).convert("RGB"))}[form]
    known = Predictor(bundle_of(page_project, task)).predict([photo], [text])[0]
    model = VLP.from_pretrained(exports[task])
    assert model.predict(image, text) == known
    assert known["answer" if task == "vqa" else "caption"] == (
        model.answer(image, text) if task == "vqa" else model.caption(image)
    )


def test_search_ranks_as_the_demo_page_does(exports: dict[str, Path], here: Workspace) -> None:
    photos = pytest.importorskip("vlp_models.contrib.demo_page.photos")
    page = photos.PhotoSearch(bundle_of(here, "retrieval"), here, "test")
    ids = page.photos.image_ids()
    paths = [page.path(image_id) for image_id in ids]
    found = VLP.from_pretrained(str(exports["retrieval"])).search("a red circle", paths, top=3)
    assert [(ids[row], score) for row, score in found] == page.find("a red circle", 3)
    assert len(found) == 3 and VLP(exports["retrieval"]).search("a red circle", []) == []


@pytest.mark.parametrize("task", [task for task in ("nlvr", "retrieval", "vqa") if task in TASKS])
def test_model_that_reads_pixels(
    task: str, toy: None, here: Workspace, params: Params, photo: Path, tmp_path: Path
) -> None:
    made = ModelParams(family="toy", config={"side": 8, "patch": 4, "hidden": 16, "heads": 2})
    bundle = make_bundle(here, tmp_path / "bundle", params, task, made)
    write_export(bundle, tmp_path / "export", "")
    model = VLP(tmp_path / "export")
    settings = json.loads((tmp_path / "export" / "preprocessor_config.json").read_text())
    assert settings["input"] == "pixels" and settings["size"] == {"height": 8, "width": 8}
    if task == "retrieval":
        assert [row for row, _ in model.search("a circle", [photo])] == [0]
        return
    known = Predictor(bundle).predict([photo], ["is it red?"])[0]
    assert model.predict(photo, "is it red?") == known
    if task == "nlvr":
        assert model.judge(photo, "is it red?") is known["prediction"]


def test_method_of_another_task_names_the_right_one(exports: dict[str, Path], photo: Path) -> None:
    captioner, answerer = VLP(exports["captioning"]), VLP(exports["vqa"])
    with pytest.raises(DataError, match=r"of the task captioning cannot `answer`; use `caption\(\"photo.jpg\"\)`"):
        captioner.answer(photo, "what is it?")
    with pytest.raises(DataError, match=r"takes no text: `caption\("):
        captioner.predict(photo, "what is it?")
    with pytest.raises(DataError, match=r"needs a question: `answer\(\"photo.jpg\", \"What"):
        answerer.predict(photo)
    with pytest.raises(DataError, match=r"cannot `predict`; use `search\(\"a dog"):
        VLP(exports["retrieval"]).predict(photo)
    with pytest.raises(DataError, match="neither a file nor a base64 image"):
        captioner.caption("no-such-photo.jpg")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" \n", "the {} is blank"),
        ("a \udcff b", "the {} is not valid Unicode"),
        ("\ud800", "the {} is not valid Unicode"),
        (5, "the {} must be a string; found int"),
    ],
    ids=ascii,
)
def test_a_text_that_cannot_be_read_is_an_error(text: Any, message: str, exports: dict[str, Path], photo: Path) -> None:
    with pytest.raises(DataError, match=message.format("question")):
        VLP(exports["vqa"]).answer(photo, text)
    with pytest.raises(DataError, match=message.format("query")):
        VLP(exports["retrieval"]).search(text, [photo])


# ---- Files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lowercase", "accents"), [(True, None), (False, None), (False, True), (True, False)])
def test_transformers_gives_the_same_ids(lowercase: bool, accents: bool | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.train([*TEXTS[0].split(), "Café", "猫", "हिन्दी"], 120, 1, lowercase, accents)
    tokenizer.save_pretrained(tmp_path, 20)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vlp-flows", "library_name": "vlp-flows"}))
    theirs, loaded = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode_batch([text], 400).ids_BT[0].tolist()
        assert theirs(text)["input_ids"] == ids == loaded.encode_batch([text], 400).ids_BT[0].tolist(), text
    first, second = (tokenizer.pieces(text) for text in ("a red circle", "below"))
    pair = [tokenizer.cls_id, *first, tokenizer.sep_id, *second, tokenizer.sep_id]
    assert theirs("a red circle", "below")["input_ids"] == pair
    assert (theirs.pad_token_id, theirs.mask_token_id) == (tokenizer.pad_id, tokenizer.mask_id)
    assert (loaded.vocabulary, loaded.strips_accents) == (tokenizer.vocabulary, tokenizer.strips_accents)


def test_changed_file_is_refused_and_further_files_are_not_read(
    exports: dict[str, Path], photo: Path, tmp_path: Path
) -> None:
    folder = copy_folder(exports["captioning"], tmp_path / "copy")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (folder / "notes.bin").write_bytes(b"x")
    assert VLP(folder).caption(photo)
    for name in ("model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        with pytest.raises(CheckpointError, match=rf"{name} has changed since the version was exported.*download it"):
            VLP(folder)
        (folder / name).write_bytes(content)
    for name in ("search/search.json", "search/index.json", "detector/config.json", "special_tokens_map.json"):
        tampered = copy_folder(folder, tmp_path / f"with {Path(name).name}")
        (tampered / name).parent.mkdir(exist_ok=True)
        (tampered / name).write_text('{"max_caption_len": 2}')
        with pytest.raises(CheckpointError, match=f"{name} was added since the version was exported.*download it"):
            VLP(tampered)
    (folder / "vocab.txt").unlink()
    with pytest.raises(CheckpointError, match=r"vocab\.txt is missing"):
        VLP(folder)


def copy_folder(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    return target


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, r"config\.json has model_type 'bert'"),
        ({"library_name": "open_clip"}, r"config\.json has library_name 'open_clip'"),
        ({"format": "vlp-checkpoint/2"}, "a checkpoint of a project, not an export.*`vlp export"),
        ([], r"config\.json has no library_name"),
        (None, r"it has no config\.json"),
    ],
    ids=str,
)
def test_folder_of_another_kind_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        VLP.from_pretrained(tmp_path)


def test_export_is_complete_or_absent(
    page_project: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: Params
) -> None:
    bundle = bundle_of(page_project, "captioning")
    with monkeypatch.context() as broken, pytest.raises(OSError, match="disk"):
        broken.setattr(layout, "write_content", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        write_export(bundle, tmp_path / "export", "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match="mine: already exists"):
        write_export(bundle, tmp_path / "mine", "")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    write_export(bundle, tmp_path / "export", "")
    config = (tmp_path / "export" / "config.json").read_text()
    assert json.loads(config)["provenance"] == {} and str(page_project.root) not in config


def test_export_brings_no_code(
    exports: dict[str, Path], page_project: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a project's plugin exported, nor does an export choose what is imported."""
    own = {"families": {"tden": "plugins.mine:Mine"}}
    with monkeypatch.context() as patch:
        patch.setattr(layout, "active_plugins", lambda kind: own.get(kind, {}))
        with pytest.raises(CheckpointError, match=r"`plugins\.families\.tden: .*an export has no code"):
            write_export(bundle_of(page_project, "vqa"), tmp_path / "export", "")
    assert not (tmp_path / "export").exists()

    folder = copy_folder(exports["vqa"], tmp_path / "export")
    (tmp_path / "evil_module.py").write_text("class Evil: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"family": "evil"}
    (folder / "config.json").write_text(json.dumps(config))
    content = json.loads((folder / "content.json").read_text())
    content["files"]["config.json"] = hash_file(folder / "config.json")
    content["plugins"] = {"families": {"evil": "evil_module:Evil"}}
    (folder / "content.json").write_text(json.dumps(content))
    with pytest.raises(VLPError, match="unknown model family `evil`"):
        VLP(folder)
    assert "evil_module" not in sys.modules


# ---- License and card ---------------------------------------------------------------------------------------------


def lineage_of(model: dict[str, str], parents: tuple[dict[str, str], ...] = (), **params: Any) -> dict[str, Any]:
    return {"model": "m", "parents": list(parents), "params": {"models": {"m": model}, **params}}


DETECTOR = ({"role": "detector", "path": "data/detector"},)
TIMM = {"source": "timm", "timm": {"weights": "timm", "model": "vit_base_patch16_224.mae"}}


@pytest.mark.parametrize(
    ("lineage", "found"),
    [
        (lineage_of({"init": "", "image_init": "", "text_init": ""}), []),
        (lineage_of({"text_init": "package:typer"}), [("text weights", "package:typer", "MIT")]),
        (lineage_of({"text_init": "package:not-installed"}), [("text weights", "package:not-installed", "")]),
        (
            lineage_of({"image_init": "timm", "config": {"backbone": "resnet18"}}),  # type: ignore[dict-item]
            [("image weights", "timm", "apache-2.0")],
        ),
        (lineage_of({"init": "checkpoints/bert.safetensors"}), [("imported", "checkpoints/bert.safetensors", "")]),
        (lineage_of({}, DETECTOR, features=TIMM), [("backbone", "timm", "cc-by-nc-4.0")]),
        (lineage_of({}, (), features=TIMM), []),  # the model reads no regions
        (
            lineage_of(
                {}, DETECTOR, features={"source": "detector"}, detector={"source": "weights", "weights": "torchvision"}
            ),
            [("detector", "torchvision", "BSD")],
        ),
        (
            lineage_of({}, ({"role": "starts from", "path": "checkpoints/pretrain/x", "note": "changed since"},)),
            [("checkpoint", "checkpoints/pretrain/x", "")],
        ),
        (
            {
                **lineage_of({}, ({"role": "starts from", "path": "checkpoints/initial/b"},)),
                "params": {"models": {"b": {"text_init": "package:typer"}, "c": {"text_init": "package:other"}}},
            },
            [("text weights", "package:typer", "MIT")],
        ),
    ],
    ids=["own", "package", "missing", "timm", "imported", "nc", "unused", "torchvision", "changed", "other"],
)
def test_weights_of_others_are_found_with_their_licenses(
    lineage: dict[str, Any], found: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"typer": "MIT", "torchvision": "BSD"}
    monkeypatch.setattr(licenses, "license_of", lambda name: installed.get(name, ""))
    borrowed = find_borrowed(lineage)
    assert [(w.role, w.source, w.license) for w in borrowed] == found


def test_license_of_several_sources() -> None:
    def weights(*names: str) -> list[BorrowedWeights]:
        return [BorrowedWeights(role="r", source="s", license=name) for name in names]

    assert hub_identifier(weights("Apache License 2.0", "Apache-2.0")) == "apache-2.0"
    assert hub_identifier(weights("MIT", "Apache-2.0")) == hub_identifier(weights("")) == "other"
    assert hub_identifier([]) == "unknown"


def test_card_is_read_by_the_hub_and_names_every_source(page_project: Workspace) -> None:
    hub = pytest.importorskip("huggingface_hub")
    base = {"dataset": "scenes", "split": "test", "n": 200}
    scores = [
        base | {"metric": "CIDEr", "value": 43.812, "low": 36.9, "high": 50.8, "baselines": {"constant caption": 33.7}},
        base | {"metric": "SPICE", "value": None, "low": None, "high": None, "baselines": {}},
        base | {"metric": "CIDEr (greedy)", "value": 1.0, "low": None, "high": None},
    ]
    borrowed = [BorrowedWeights(role="backbone", source="timm:x", license="cc-by-nc-4.0")]
    text = make_hub_card(
        title="vlp-captioning",
        info=read_bundle_info(bundle_of(page_project, "captioning")),
        scores=scores,
        lineage={"params": {"data": {"scenes": {}}}, "validation": {"passed": True}},
        license=hub_identifier(borrowed),
        borrowed=borrowed,
        holds_captions=True,
    )
    card = hub.ModelCard(text)
    assert (card.data.license, card.data.library_name, card.data.datasets) == ("cc-by-nc-4.0", "vlp-flows", ["scenes"])
    (result,) = card.data.eval_results
    assert (result.metric_name, result.metric_value, result.dataset_split) == ("CIDEr", 43.81, "test")
    assert "| CIDEr | 43.81 | 36.90 to 50.80 | 200 | constant caption 33.70 |" in text
    assert "backbone `timm:x` (cc-by-nc-4.0)" in text and "search/ holds captions" in text and "greedy" not in text


# ---- Elsewhere ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_loads_and_captions_without_the_training_stack(exports: dict[str, Path], photo: Path) -> None:
    folder = str(exports["captioning"])
    use = f"from vlp_models import VLP\nprint(VLP.from_pretrained({folder!r}).caption({str(photo)!r}))"
    assert run_python(NOT_INSTALLED + use).strip() == VLP(exports["captioning"]).caption(photo)


@pytest.mark.slow
def test_every_family_and_task_loads_without_the_training_stack() -> None:
    run_python(
        f"{NOT_INSTALLED}\n"
        "from vlp_models.models import FAMILIES, family_class\n"
        "from vlp_models.tasks import TASKS, task_class\n"
        "import vlp_models.serving.search, vlp_models.contrib.detector.regions, vlp_models.vision.timm_backbone\n"
        "for name in FAMILIES: family_class(name)\n"
        "for name in TASKS: task_class(name)\n"
    )


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert run_python("import vlp_models, sys; print('torch' in sys.modules, 'numpy' in sys.modules)").split() == [
        "False",
        "False",
    ]


@pytest.mark.slow
def test_repository_round_trip_over_the_real_client(exports: dict[str, Path], photo: Path, tmp_path: Path) -> None:
    """Push, load, load again without a network, and meet a missing repository and one of another kind."""
    pytest.importorskip("huggingface_hub")
    folder = copy_folder(exports["captioning"], tmp_path / "export")
    (folder / "secret.env").write_text("TOKEN=1")
    load = f"from vlp_models import VLP; print(VLP.from_pretrained({REPOSITORY!r}).caption({str(photo)!r}))"
    refused = "\ntry: VLP.from_pretrained({!r})\nexcept Exception as error: print(type(error).__name__, error)"
    known = VLP(folder).caption(photo)
    with hub_server() as server:
        place = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        place |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "hf_test"}
        push = f"print(VLP({str(folder)!r}).push_to_hub({REPOSITORY!r}, private=True))"
        assert server.address in run_python(f"from vlp_models import VLP; {push}", **place)
        assert server.created[0]["visibility"] == "private"
        listed = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert set(server.files) == listed - {"secret.env"}
        server.files["pytorch_model.bin"] = b"a pickle"
        output = run_python(load + refused.format("owner/other"), **place)
        assert output.splitlines()[0] == known
        assert "DataError owner/other: no such repository on the Hugging Face Hub, or no access" in output
        assert not list((tmp_path / "hf").rglob("*.bin")), "no pickle is downloaded"
        server.files = {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"x"}
        other = run_python(
            f"from vlp_models import VLP{refused.format(REPOSITORY)}", **place | {"HF_HOME": str(tmp_path / "other")}
        )
        assert f"CheckpointError {REPOSITORY}: not a model of vlp-flows: config.json has model_type 'bert'" in other
        assert not list((tmp_path / "other").rglob("*.safetensors"))
    offline = run_python(load + refused.format("owner/other"), **place)
    assert offline.splitlines()[0] == known
    assert "owner/other: not in the cache of this machine, and the Hugging Face Hub cannot be reached" in offline


@pytest.mark.pipeline
@pytest.mark.slow
def test_command_exports_what_is_registered(
    built_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.pyfunc
    import pandas as pd

    project = copy_project(built_project, tmp_path / "project")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project}/mlflow.db")
    photo = sorted((project / "data" / "raw" / "scenes").rglob("*.png"))[-1]
    monkeypatch.setenv("VLP_IMAGE_ROOT", str(project))
    for task, text in (("captioning", ""), ("vqa", "what color is the circle?")):
        done = run_in_process(project, "vlp", "export", f"vlp-{task}/1", str(tmp_path / task), "--to", "hf")
        assert f"vlp-{task} version 1" in done.stdout and "no license stated" in done.stdout
        served = mlflow.pyfunc.load_model(f"models:/vlp-{task}/1")
        request = pd.DataFrame([{"image": str(photo.relative_to(project)), **({"text": text} if text else {})}])
        assert [VLP(tmp_path / task).predict(photo, text)] == served.predict(request)
        card = (tmp_path / task / "README.md").read_text()
        assert f"model.{'answer' if text else 'caption'}(" in card and "| scenes | test | " in card
    missing = NOT_INSTALLED.replace("lightning", "torchvision")
    load = f"from vlp_models import VLP\ntry: VLP({str(tmp_path / 'vqa')!r})\nexcept Exception as error: print(error)"
    assert 'torchvision, which is not installed; pip install "vlp-flows[serve]"' in run_python(missing + load)

    again = run_in_process(project, "vlp", "export", "vqa", str(tmp_path / "vqa"), check=False)
    assert again.returncode == 2 and "already exists" in again.stderr
    unknown = run_in_process(project, "vlp", "export", "vqa", str(tmp_path / "x"), "--to", "onnx", check=False)
    assert unknown.returncode == 2 and "known: hf" in unknown.stderr

    for options, message in (
        (["--weights", "int4"], "known: float32, int8"),
        (["--margin", "1"], "for --weights int8"),
    ):
        wrong = run_in_process(project, "vlp", "export", "vqa", str(tmp_path / "x"), *options, check=False)
        assert wrong.returncode == 2 and message in wrong.stderr
    monkeypatch.setattr(
        "vlp_models.registry.evaluations.read_lineage", lambda *_: lineage_of({"init": "w.safetensors"})
    )
    refused = run_in_process(project, "vlp", "export", "vqa", str(tmp_path / "x"), check=False)
    assert refused.returncode == 2 and "vlp-vqa version 1: unknown license: imported `w.safetensors`" in refused.stderr
    assert "--accept-unknown-license" in refused.stderr and not (tmp_path / "x").exists()
    run_in_process(project, "vlp", "export", "vqa", str(tmp_path / "x"), "--accept-unknown-license")
    assert "imported `w.safetensors` (unknown license)" in (tmp_path / "x" / "README.md").read_text()
    with pytest.raises(VLPError, match="cannot `caption`"):
        VLP.from_pretrained(tmp_path / "x").caption(photo)
