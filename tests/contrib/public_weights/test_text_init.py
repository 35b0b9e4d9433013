"""`models.NAME.text_init`: the stage `initial` with a BERT's files, through params.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bert_folders import config_of, write_bert
from model_checks import load_model
from safetensors.torch import load_file
from torch import Tensor
from toy_dataset import write_workspace

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.io import hash_file
from vlp_models.common.workspace import Workspace
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError, MissingToolError
from vlp_models.models.layers.packing import Packing
from vlp_models.params import load_params
from vlp_models.pipeline.stages import initial

LEFT_OUT = ["embeddings.position_embeddings.weight[16:]", "encoder.layer.2", "pooler"]
SECOND_TYPE = "embeddings.token_type_embeddings.weight[1:]"
# family -> modules loaded from two of BERT's three layers and 16 of its positions, modules not loaded, weights left out
RECORDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "tden": (
        ["sentence_encoder", "text_embedding"],
        [
            *("cross_decoder", "cross_encoder", "fusion_norm", "fusion_poolers", "image_poolers", "object_encoder"),
            *("object_head", "region_embedding", "text_pooler", "word_head"),
        ],
        LEFT_OUT,
    ),
    "unified_vlp": (["stack", "text_embedding"], ["fusion", "region_embedding", "word_head"], LEFT_OUT),
    "xgpt": (
        [
            *(f"layers.{i}.{part}" for i in (0, 1) for part in ("attention", "attention_end", "ffn", "ffn_end")),
            "text_embedding",
        ],
        [
            *("first_region", "layers.0.cross_end", "layers.1.cross_end", "matching", "refiner", "region_embedding"),
            *("region_head", "word_bias"),
        ],
        sorted([*LEFT_OUT, SECOND_TYPE]),
    ),
    "vlmo": (
        ["text_embedding.norm", "text_embedding.positions", "text_embedding.words"],
        [
            *("blocks", "image_embedding", "image_projection", "log_scale", "match_head", "norm", "pooler"),
            *("text_embedding.type_1D", "text_projection", "word_head"),
        ],
        sorted([LEFT_OUT[0], "encoder", "pooler", SECOND_TYPE]),
    ),
    "soho": (
        ["text_embedding", "transformer"],
        [
            *("backbone", "code_head", "dictionary", "hidden_cell", "match_head", "neck", "visual_norm", "word_head"),
        ],
        LEFT_OUT,
    ),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with a folder `bert` of data/tokenizer's words."""
    write_workspace(tmp_path)
    words = Tokenizer.load(tmp_path / "data" / "tokenizer").vocabulary
    write_bert(tmp_path / "bert", vocab_size=len(words))
    (tmp_path / "bert" / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return tmp_path


def begin(
    root: Path, family: str = "tden", words: str = "bert", layers: int = 2
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights that a model of the family begins with, and the record of its words."""
    config = config_of(family, layers=layers, max_positions=16)
    if "embedding_norm_eps" in config:
        config["embedding_norm_eps"] = 1e-5  # BERT's is smaller
    model = {"family": family, "text_init": words, "config": config}
    apply_overlay(root / "params.yaml", None, [f"models.new={json.dumps(model)}"])
    initial.run(load_params(root / "params.yaml"), Workspace(root), "new")
    made, _, info = load_model(root / "checkpoints" / "initial" / "new")
    return made.state_dict(), info.provenance.get("text_init", {})


@pytest.mark.parametrize("family", RECORDS)
def test_loaded_and_missing_weights_are_logged_and_recorded(
    root: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    fresh, _ = begin(root, family, words="")
    made, kept = begin(root, family)
    loaded, missing, left_out = RECORDS[family]
    logged = capsys.readouterr().err
    assert f"of BERT's weights in {', '.join(loaded)}\n  not loaded: {', '.join(missing)}\n" in logged
    assert f"  left out: {', '.join(left_out)}\n" in logged and "from bert" in logged
    assert (kept["source"], kept["loaded"], kept["missing"], kept["left_out"]) == ("bert", loaded, missing, left_out)
    assert kept["files"] == {name: hash_file(root / "bert" / name) for name in ("config.json", "model.safetensors")}
    notes = ["config.embedding_norm_eps is 1e-05, BERT's layer_norm_eps 1e-12: the outputs differ slightly from BERT's"]
    assert kept["notes"] == (notes if family in ("tden", "xgpt") else [])
    for name, tensor in made.items():
        is_theirs = any(name == module or name.startswith(f"{module}.") for module in loaded)
        assert is_theirs != tensor.equal(fresh[name]), name
    theirs = load_file(root / "bert" / "model.safetensors")
    words = theirs["embeddings.word_embeddings.weight"]
    if family == "vlmo":  # which has no types: the first one is in every word
        words = words + theirs["embeddings.token_type_embeddings.weight"][0]
    assert made["text_embedding.words.weight"].equal(words)


@pytest.mark.parametrize("layers", [2, 3])
def test_a_whole_bert_that_embeds_sentences_brings_its_pooling(root: Path, layers: int) -> None:
    (root / "bert" / "1_Pooling").mkdir()
    (root / "bert" / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    begin(root, layers=layers)
    model, tokenizer, _ = load_model(root / "checkpoints" / "initial" / "new")
    text = tokenizer.encode_batch(["a red cube", "a big blue ball is left of the cube"], 16)
    words = Packing.of(text.mask_BT)
    states_NTD = words.pad(model.eval().encode_text(text.ids_BT, words))
    mean_ND = states_NTD.sum(1) / text.mask_BT.sum(1, keepdim=True)
    is_mean = torch.allclose(model.embed_text(text), F.normalize(mean_ND, dim=-1), atol=1e-6)
    assert is_mean == (layers == 3)  # the states of earlier layers are no embedding


def test_invalid_text_init_is_refused(root: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such folder; `models\.new\.text_init` must be a folder"):
        begin(root, words="nowhere")
    with pytest.raises(
        MissingToolError, match=r"`models\.new\.text_init: package:no-words`: not installed; install it with `uv"
    ):
        begin(root, words="package:no-words")
    config = json.loads((root / "bert" / "config.json").read_text())
    (root / "bert" / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    with pytest.raises(CheckpointError, match="heads 2, BERT's num_attention_heads 4"):
        begin(root)
