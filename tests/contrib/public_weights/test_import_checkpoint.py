"""vlp import-checkpoint through the command line: what it writes, and what starts from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from model_checks import load_model
from public_tden import PUBLIC, public_layout, public_task_layout
from safetensors.torch import save_file
from toy_dataset import CLASSES, FEATURE_DIM, TINY, write_shards, write_tokenizer
from typer.testing import CliRunner

from vlp_models.cli.main import app
from vlp_models.cli.presets import apply_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.public_weights.import_checkpoint import import_checkpoint
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.tden.model import TDEN
from vlp_models.params import load_params
from vlp_models.pipeline.stages import initial
from vlp_models.tasks.base import load_task_model

LENGTHS = ("--max-text-len", "12", "--max-regions", "4")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What import-checkpoint needs: shards, a tokenizer, and a params.yaml with a model of the toys' size."""
    write_shards(tmp_path / "data" / "shards")
    write_tokenizer(tmp_path / "data" / "tokenizer")
    raw = yaml.safe_load((Path(__file__).parents[3] / "params.yaml").read_text())
    raw["models"] = {"tden": {"family": "tden", "config": TINY, "seed": 5}}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_public(root: Path, **config: Any) -> TDEN:
    torch.manual_seed(4)
    vocab = Tokenizer.load(root / "data" / "tokenizer").vocab_size
    facts = DataFacts(vocab_size=vocab, mask_id=4, feature_dim=FEATURE_DIM, num_classes=len(CLASSES))
    model = build_model("tden", {**TINY, **PUBLIC, **config}, facts)
    assert isinstance(model, TDEN)
    torch.save({"model": public_layout(model), "iteration": 1}, root / "public.pth")
    return model


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["import-checkpoint", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def call_public(name: str, *more: str, file: str = "public.pth") -> str:
    return call(file, "--format", "xmodaler-tden", "--heads", "2", "--name", name, *more)


def test_model_starts_from_imported_weights(root: Path) -> None:
    model = write_public(root)
    output = call_public("theirs")
    assert "TDEN's pretraining weights" in output
    assert "randomly initialized (seed 1): fusion_decoder_norm, fusion_norm, fusion_poolers" in output
    loaded, _, info = load_model(root / "checkpoints" / "imported" / "theirs")
    assert (info.detector_id, info.name, info.task) == ("toy", "theirs", None)
    wanted = {k: v for k, v in model.state_dict().items() if not k.startswith("fusion_")}
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in wanted.items())

    preset = root / "checkpoints" / "imported" / "theirs" / "preset.yaml"
    kept = preset.read_text()
    assert "mask_scheme: bert" in kept and "LayerDrop" in kept, "what the file does not contain is output"
    apply_overlay(root / "params.yaml", preset, ["models.theirs.config.ism_margin=0.3"])  # no weight is another for it
    params = load_params("params.yaml")
    begins = params.models["theirs"]
    assert (begins.init, begins.config["fusion"]) == ("checkpoints/imported/theirs", "product")
    assert begins.config["mask_scheme"] == "mask"
    initial.run(params, Workspace(root), "theirs")
    started, _, _ = load_model(root / "checkpoints" / "initial" / "theirs")
    assert all(torch.equal(started.state_dict()[name], tensor) for name, tensor in wanted.items())


def test_imported_vqa_model_is_scored(root: Path) -> None:
    """With its own answers and lengths, whatever data/tokenizer and params.yaml have."""
    model = write_public(root)
    linear = torch.nn.Linear
    head = torch.nn.ModuleDict({name: linear(TINY["hidden"], 5) for name in ("fused", "decoder")})
    torch.save({"model": public_task_layout(model, head), "iteration": 1}, root / "public.pth")
    names = ["red", "yes", "two", "blue", "nowhere"]
    (root / "answers.json").write_text(json.dumps(names))
    with pytest.raises(CheckpointError, match="pass --max-text-len and --max-regions"):
        call_public("vqa", "--answers", "answers.json")
    with pytest.raises(CheckpointError, match="pass --max-regions, "):
        call_public("vqa", "--answers", "answers.json", "--max-text-len", "12")
    with pytest.raises(CheckpointError, match="pass --answers FILE, a JSON list of its 5 answers"):
        call_public("vqa", *LENGTHS)
    for wrong in (names[:4], {"red": 1}, [*names[:4], "red"], [*names, "red"]):
        (root / "wrong.json").write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=r"wrong\.json: not"):
            call_public("vqa", *LENGTHS, "--answers", "wrong.json")
    assert "a run of vqa" in call_public("vqa", *LENGTHS, "--answers", "answers.json")

    task_model = load_task_model(root / "checkpoints" / "imported" / "vqa")
    assert (task_model.info.max_text_len, task_model.info.max_regions) == (12, 4)
    dataset = ShardDataset(root / "data" / "shards", "val", "questions")
    samples = [dataset[i] for i in range(4)]
    batch = task_model.collate(samples)
    rows = task_model.predict(batch, samples)
    with torch.no_grad():
        fused = model.eval().fuse(batch.image, batch.text)
        both = head["fused"](fused.pooled_BP).softmax(-1) + head["decoder"](fused.decoder_BP).softmax(-1)
    assert [row["answer"] for row in rows] == [names[i] for i in both.argmax(-1).tolist()]
    assert sum(p for _, p in rows[0]["top"]) == pytest.approx(1, abs=1e-5)


def test_a_vqa_model_without_a_decoder_has_one_classifier(root: Path) -> None:
    head = torch.nn.ModuleDict({name: torch.nn.Linear(TINY["hidden"], 3) for name in ("fused", "decoder")})
    decoder = ("decoder.g_layers.", "predictor.g_")
    whole = public_task_layout(write_public(root), head)
    torch.save({k: v for k, v in whole.items() if not k.startswith(decoder)}, root / "public.pth")
    (root / "answers.json").write_text(json.dumps(["red", "green", "blue"]))
    call_public("vqa", *LENGTHS, "--answers", "answers.json")
    task_model = load_task_model(root / "checkpoints" / "imported" / "vqa")
    assert isinstance(task_model.head, torch.nn.Linear)
    assert torch.equal(task_model.head.weight, head["fused"].weight)


def test_a_vcr_model_and_a_captioner_keep_their_task(root: Path) -> None:
    model = write_public(root, use_decoder_in_fusion=False, segment_types=True, fusion_dim=12)
    head = torch.nn.Linear(12, 1)
    torch.save(public_task_layout(model, head), root / "public.pth")
    call_public("vcr", *LENGTHS)
    task_model = load_task_model(root / "checkpoints" / "imported" / "vcr")
    assert torch.equal(task_model.head.weight, head.weight)
    dataset = ShardDataset(root / "data" / "shards", "val", "choices")
    assert len(task_model.predict(task_model.collate([dataset[0]]), [dataset[0]])) == 1

    kept = ("token_embed.", "visual_embed.", "encoder.", "decoder.g_layers.", "predictor.")
    torch.save({k: v for k, v in public_layout(model).items() if k.startswith(kept)}, root / "captioner.pth")
    call_public("captioner", *LENGTHS, file="captioner.pth")
    task_model = load_task_model(root / "checkpoints" / "imported" / "captioner")
    assert isinstance(task_model.predict(task_model.collate([dataset[0]]), [dataset[0]])[0]["caption"], str)


def test_a_file_that_does_not_fit_the_data_is_refused(root: Path) -> None:
    state = public_layout(write_public(root))
    wide = torch.zeros(TINY["hidden"], FEATURE_DIM + 1)
    torch.save(state | {"visual_embed.embeddings.weight": wide}, root / "public.pth")
    with pytest.raises(CheckpointError, match="feature_dim 7, but the data here has 6"):
        call_public("public")
    assert not (root / "checkpoints" / "imported" / "public").exists()
    write_public(root)
    call_public("public")
    with pytest.raises(CheckpointError, match="exists already"):
        call_public("public")
    with pytest.raises(CheckpointError, match="known: xmodaler-tden, bert"):
        call("public.pth", "--format", "onnx", "--name", "other")
    for name in ("tden-v1.0", "../tden"):  # refused before the weights are converted, not later by `vlp use`
        with pytest.raises(CheckpointError, match="a model's name has letters, digits"):
            call_public(name)


def test_bert_fills_the_text_side(root: Path) -> None:
    from transformers import BertConfig, BertModel

    (root / "bert").mkdir()
    vocab = Tokenizer.load(root / "data" / "tokenizer").vocab_size
    bert_config = BertConfig(
        vocab_size=vocab,
        hidden_size=TINY["hidden"],
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=TINY["intermediate"],
    )
    bert = BertModel(bert_config)
    (root / "bert" / "config.json").write_text(json.dumps(bert_config.to_dict()))
    (root / "bert" / "vocab.txt").write_text((root / "data" / "tokenizer" / "vocab.txt").read_text())
    save_file({k: v.clone() for k, v in bert.state_dict().items()}, root / "bert" / "model.safetensors")
    with pytest.raises(CheckpointError, match="no model `bert`"):
        call("bert", "--format", "bert", "--name", "bert")
    output = call("bert", "--format", "bert", "--name", "tden")
    assert "BERT weights in sentence_encoder, text_embedding" in output
    fresh = output.partition("randomly initialized (seed 5): ")[2].split("\n")[0].split(", ")
    assert {"word_head", "object_encoder", "cross_encoder", "cross_decoder", "region_embedding"} <= set(fresh)
    loaded, _, _ = load_model(root / "checkpoints" / "imported" / "tden")
    words = bert.state_dict()["embeddings.word_embeddings.weight"]
    assert torch.equal(loaded.state_dict()["text_embedding.words.weight"], words)
    apply_overlay(root / "params.yaml", root / "checkpoints" / "imported" / "tden" / "preset.yaml", [])
    assert load_params("params.yaml").models["tden"].init == "checkpoints/imported/tden"

    notes = (root / "checkpoints" / "imported" / "tden" / "preset.yaml").read_text()
    assert "left out: pooler" in output and "embedding_norm_eps is 1e-05" in notes

    shutil.rmtree(root / "checkpoints" / "imported" / "tden")
    lines = (root / "bert" / "vocab.txt").read_text().splitlines()
    (root / "bert" / "vocab.txt").write_text("\n".join([*lines[:-1], "other"]) + "\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.source: vocab"):
        call("bert", "--format", "bert", "--name", "tden")


def test_missing_inputs_are_named(root: Path, tmp_path: Path) -> None:
    params = load_params("params.yaml")
    with pytest.raises(DataError, match="dvc repro shards"):
        import_checkpoint("bert", root, "tden", params, Workspace(tmp_path / "without"))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        import_checkpoint("bert", root, "tden", params, Workspace(root))
