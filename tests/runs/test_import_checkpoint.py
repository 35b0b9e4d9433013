"""vlp import-checkpoint through the command line, and training from what it leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from public_tden import PUBLIC, public_layout, public_task_layout
from safetensors.torch import load_file, save_file
from toy_world import CLASSES, FEATURE_DIM, TINY, write_workspace
from typer.testing import CliRunner

from vlp_models.cli import app
from vlp_models.data.dataset import ShardDataset
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError
from vlp_models.models import build_model
from vlp_models.models.checkpoint import load_model
from vlp_models.models.tden.model import TDEN
from vlp_models.overlay import apply_overlay
from vlp_models.params import load_params
from vlp_models.runs.import_checkpoint import import_checkpoint
from vlp_models.stages import finetune, pretrain
from vlp_models.tasks.load import load_task_model
from vlp_models.workspace.paths import Workspace


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_workspace(tmp_path, pretrain={"max_epochs": 1})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_public(root: Path, **config: Any) -> TDEN:
    torch.manual_seed(4)
    sizes = {"feature_dim": FEATURE_DIM, "num_classes": len(CLASSES)}
    vocab = Tokenizer.load(root / "data" / "tokenizer").vocab_size
    model = build_model("tden", {**TINY, **PUBLIC, **config}, **{"vocab_size": vocab, **sizes})
    assert isinstance(model, TDEN)
    torch.save({"model": public_layout(model), "iteration": 1}, root / "public.pth")
    return model


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["import-checkpoint", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def unchanged(file: Path, wanted: dict[str, torch.Tensor]) -> bool:
    weights = load_file(file)
    return all(torch.equal(weights[f"model.{name}"], tensor) for name, tensor in wanted.items())


def test_training_starts_from_an_imported_model(root: Path) -> None:
    model = write_public(root)
    said = call("public.pth", "--format", "xmodaler-tden", "--out", "checkpoints/public", "--heads", "2")
    assert "TDEN's pretraining weights" in said
    assert "fresh (seed 1): fusion_decoder_norm, fusion_norm, fusion_poolers" in said
    loaded, _, config = load_model(root / "checkpoints" / "public")
    assert config["detector_id"] == "toy"
    wanted = {k: v for k, v in model.state_dict().items() if not k.startswith("fusion_")}
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in wanted.items())

    # fine-tuned as it is
    params = load_params("params.yaml")
    still = replace(params.finetune["captioning"].optimizer, lr=0.0, muon_lr=0.0)
    run = replace(params.finetune["captioning"], init="public", optimizer=still)
    finetune.run(replace(params, finetune={"captioning": run}), Workspace(root), "captioning")
    wanted_of_captioning = {k: v for k, v in wanted.items() if "running" not in k and "num_batches" not in k}
    assert unchanged(root / "checkpoints" / "captioning" / "model.safetensors", wanted_of_captioning)

    # pretrained further, once params.yaml asks for its architecture
    apply_overlay(
        root / "params.yaml",
        None,
        ["pretrain.init=checkpoints/public", "pretrain.optimizer.lr=0.0", "pretrain.optimizer.muon_lr=0.0"],
    )
    with pytest.raises(CheckpointError, match=r"tie_lm_head: True here, False there.*vlp use"):
        pretrain.run(load_params("params.yaml"), Workspace(root))
    free = "model.config.segment_types=true"  # no weight is another one for it
    apply_overlay(root / "params.yaml", root / "checkpoints" / "public" / "preset.yaml", [free])
    pretrain.run(load_params("params.yaml"), Workspace(root))
    assert unchanged(root / "checkpoints" / "pretrain" / "model.safetensors", wanted_of_captioning)


def test_a_vqa_model_is_scored_as_it_is(root: Path) -> None:
    """Its own answers, whatever data/tokenizer has; learnt further, it keeps both classifiers."""
    model = write_public(root)
    linear = torch.nn.Linear
    head = torch.nn.ModuleDict({name: linear(TINY["hidden"], 5) for name in ("fused", "decoder")})
    torch.save({"model": public_task_layout(model, head), "iteration": 1}, root / "public.pth")
    arguments = ("public.pth", "--format", "xmodaler-tden", "--heads", "2", "--out", "checkpoints/vqa")
    with pytest.raises(CheckpointError, match="give --answers FILE, a JSON list of its 5 answers"):
        call(*arguments)
    names = ["red", "yes", "two", "blue", "nowhere"]
    for wrong in (names[:4], {"red": 1}, [*names[:4], "red"], [*names, "red"]):
        (root / "answers.json").write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=r"answers\.json: not"):
            call(*arguments, "--answers", "answers.json")
    (root / "answers.json").write_text(json.dumps(names))
    assert "vlp stage evaluate RUN, a run of vqa" in call(*arguments, "--answers", "answers.json")

    task_model = load_task_model(root / "checkpoints" / "vqa")
    dataset = ShardDataset(root / "data" / "shards", "val", "questions")
    samples = [dataset[i] for i in range(4)]
    batch = task_model.collate(samples)
    rows = task_model.predict(batch, samples)
    with torch.no_grad():
        fused = model.eval().fuse(batch.image, batch.text)
        both = head["fused"](fused.pooled_BP).softmax(-1) + head["decoder"](fused.decoder_BP).softmax(-1)
    assert [row["answer"] for row in rows] == [names[i] for i in both.argmax(-1).tolist()]
    assert sum(p for _, p in rows[0]["top"]) == pytest.approx(1, abs=1e-5)
    loss = task_model.loss(batch)
    loss.mean.backward()
    assert all(bool(p.grad.any()) for p in task_model.head.parameters())

    params = load_params("params.yaml")
    run = replace(params.finetune["vqa"], init="vqa")
    finetune.run(replace(params, finetune={"further": run}), Workspace(root), "further")
    assert load_task_model(root / "checkpoints" / "further").head.keys() == head.keys()


def test_a_vcr_model_and_a_captioner_keep_their_task(root: Path) -> None:
    model = write_public(root, use_decoder_in_fusion=False, segment_types=True, fusion_dim=12)
    head = torch.nn.Linear(12, 1)
    torch.save(public_task_layout(model, head), root / "public.pth")
    call("public.pth", "--format", "xmodaler-tden", "--heads", "2", "--out", "checkpoints/vcr")
    task_model = load_task_model(root / "checkpoints" / "vcr")
    assert torch.equal(task_model.head.weight, head.weight)
    dataset = ShardDataset(root / "data" / "shards", "val", "choices")
    assert len(task_model.predict(task_model.collate([dataset[0]]), [dataset[0]])) == 1

    kept = ("token_embed.", "visual_embed.", "encoder.", "decoder.g_layers.", "predictor.")
    torch.save({k: v for k, v in public_layout(model).items() if k.startswith(kept)}, root / "captioner.pth")
    call("captioner.pth", "--format", "xmodaler-tden", "--heads", "2", "--out", "checkpoints/captioning")
    task_model = load_task_model(root / "checkpoints" / "captioning")
    assert isinstance(task_model.predict(task_model.collate([dataset[0]]), [dataset[0]])[0]["caption"], str)


def test_a_file_that_does_not_fit_the_data_is_refused(root: Path) -> None:
    arguments = ("public.pth", "--format", "xmodaler-tden", "--heads", "2", "--out")
    model = write_public(root)
    state = public_layout(model)
    wide = torch.zeros(TINY["hidden"], FEATURE_DIM + 1)
    torch.save(state | {"visual_embed.embeddings.weight": wide}, root / "public.pth")
    with pytest.raises(CheckpointError, match="feature_dim 7, but the data here has 6"):
        call(*arguments, "checkpoints/public")
    assert not (root / "checkpoints" / "public").exists()
    write_public(root)
    call(*arguments, "checkpoints/public")
    with pytest.raises(CheckpointError, match="there already"):
        call(*arguments, "checkpoints/public")
    with pytest.raises(CheckpointError, match="known: xmodaler-tden, bert"):
        call("public.pth", "--format", "onnx", "--out", "checkpoints/other")


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
    said = call("bert", "--format", "bert", "--out", "checkpoints/bert")
    assert "BERT weights in sentence_encoder, text_embedding" in said
    fresh = said.partition("fresh (seed 1): ")[2].split("\n")[0].split(", ")
    assert {"word_head", "object_encoder", "cross_encoder", "cross_decoder", "region_embedding"} <= set(fresh)
    loaded, _, _ = load_model(root / "checkpoints" / "bert")
    words = bert.state_dict()["embeddings.word_embeddings.weight"]
    assert torch.equal(loaded.state_dict()["text_embedding.words.weight"], words)
    apply_overlay(root / "params.yaml", root / "checkpoints" / "bert" / "preset.yaml", [])
    assert load_params("params.yaml").pretrain.init == "checkpoints/bert"

    with (root / "bert" / "vocab.txt").open("a") as file:
        file.write("new\n")
    with pytest.raises(CheckpointError, match=r"tokenizer\.source: vocab"):
        call("bert", "--format", "bert", "--out", "checkpoints/again")


def test_what_must_be_there_first_is_named(tmp_path: Path) -> None:
    root = tmp_path / "with"
    params = write_workspace(root)
    with pytest.raises(DataError, match="dvc repro shards"):
        import_checkpoint("bert", root, root / "out", params, Workspace(tmp_path / "without"))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        import_checkpoint("bert", root, root / "out", params, Workspace(root))
