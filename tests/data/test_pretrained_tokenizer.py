"""Tokenizers of other models than BERT: GPT-2's kind (byte-level BPE) and XLM-R's kind (SentencePiece's Unigram)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_tokenizers import TEXTS, WRITERS, write_bpe, write_unigram
from transformers import AutoTokenizer

from vlp_models.common.workspace import Workspace
from vlp_models.data.bert_folder import read_tokenizer
from vlp_models.data.tables import SCHEMAS, write_table
from vlp_models.data.tokenizer import CLS, SEP, Tokenizer, read_pretrained
from vlp_models.errors import DataError, ParamsError
from vlp_models.models import DataFacts, build_model
from vlp_models.objectives.masked_modeling import mask_tokens, word_range
from vlp_models.params import load_params
from vlp_models.pipeline.stages.tokenizer import run


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return read_tokenizer(folder, lowercase=False)


def test_texts_of_any_script_survive(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode_batch([text], 200).ids_BT[0].tolist()
        assert ids[0] == tokenizer.cls_id and ids[-1] == tokenizer.sep_id
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids[1:-1]) == text  # as a decoder writes it


def test_ids_are_those_of_transformers(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    ours, saved = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    pretrained = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode_batch([text], 200).ids_BT[0].tolist()
        assert ids == ours.encode_batch([text], 200).ids_BT[0].tolist() == saved(text)["input_ids"]
        assert ids[1:-1] == pretrained(text, add_special_tokens=False)["input_ids"]
    assert ours.matches(tokenizer) and tokenizer.matches(ours)
    assert not ours.matches(read_pretrained(folder, {"sep": "a"}))
    ours.save(tmp_path / "again")
    assert all((tmp_path / "again" / f.name).read_bytes() == f.read_bytes() for f in tmp_path.glob("*.json"))


def test_dropout_of_a_bpe_is_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_bpe(tmp_path) / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["model"]["dropout"] = 0.5
    file.write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = read_tokenizer(tmp_path, lowercase=False)
    assert f"{tmp_path}: its BPE dropout (0.5) is off" in capsys.readouterr().err
    tokenizer.save(tmp_path / "saved")
    for same in (tokenizer, Tokenizer.load(tmp_path / "saved")):
        assert len({tuple(same.encode_batch([TEXTS[0]], 200).ids_BT[0].tolist()) for _ in range(20)}) == 1
    assert json.loads((tmp_path / "saved" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["dropout"] is None


def test_special_tokens_never_come_from_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_batch(["a </s> b <mask> c <|endoftext|>"], 99).ids_BT[0].tolist()
    assert not {tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id} & set(ids[1:-1])


def test_pieces_of_a_word_belong_together(tokenizer: Tokenizer) -> None:
    text = "A läuft, 小狗 dog"
    encoded = tokenizer.encode_batch([text, "a"], 99, whole_words=True)
    assert encoded.word_BT is not None
    word_T, ids_T = encoded.word_BT[0].tolist(), encoded.ids_BT[0].tolist()
    written = [tokenizer.decode([i for i, own in zip(ids_T, word_T, strict=True) if own == word]) for word in range(6)]
    assert written == ["A", "läuft", ",", "小", "狗", "dog"]
    assert tokenizer.split(text) == written
    first = SEP if tokenizer.cls_id == tokenizer.sep_id else CLS
    assert (tokenizer.merge(ids_T)[0], tokenizer.merge(ids_T)[-1]) == (first, SEP)
    assert tokenizer.merge(ids_T)[1:-1] == written
    assert word_T[0] == -1 and word_T[-1] == -1


def test_a_text_is_truncated_and_keeps_its_end(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_batch(["a dog", "小さな犬が走る。" * 9], 12)
    assert encoded.ids_BT.shape == (2, 12) and encoded.ids_BT[1, -1] == tokenizer.sep_id
    assert encoded.cut_B is not None and encoded.cut_B.tolist() == [False, True]
    assert "\ufffd" not in tokenizer.decode(encoded.ids_BT[1])


def test_a_missing_mask_token_is_named_and_can_be_appended(tmp_path: Path) -> None:
    folder = write_bpe(tmp_path)
    plain = read_pretrained(folder)
    assert plain.mask_id is None and plain.cls_id == plain.sep_id == plain.pad_id
    sizes = {"hidden": 16, "heads": 2, "intermediate": 16, "layers": 1}
    facts = DataFacts(vocab_size=plain.vocab_size, mask_id=None, feature_dim=4, num_classes=4)
    with pytest.raises(ParamsError, match=r"xgpt is trained on masked words.*special_tokens: \{mask: <mask>\}"):
        build_model("xgpt", sizes, facts)
    more = read_pretrained(folder, {"mask": "<mask>", "pad": "<pad>"})
    assert more.vocab_size == plain.vocab_size + 2 and {more.mask_id, more.pad_id} == {400, 401}
    more.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").mask_id == more.mask_id
    build_model("xgpt", sizes, dataclasses.replace(facts, vocab_size=more.vocab_size, mask_id=more.mask_id))


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    folder = write_bpe(tmp_path)
    assert not read_tokenizer(folder, lowercase=True).lowercase  # it has a setting of its own
    with pytest.raises(ParamsError, match=r"`tokenizer\.special_tokens\.bos`: unknown; known: pad, unk"):
        read_tokenizer(folder, lowercase=False, special_tokens={"bos": "<s>"})
    with pytest.raises(ParamsError, match=r"`tokenizer\.trim`"):
        read_pretrained(folder).trimmed(TEXTS)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        DataError, match=r"names no cls and no sep and no pad token.*\{cls: <cls>, sep: <sep>, pad: <pad>"
    ):
        read_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: no such file; .*save_pretrained"):
        read_pretrained(folder)


def test_random_words_come_before_a_mask_token_at_the_end() -> None:
    assert word_range(4, 1000) == (5, 1000) and word_range(103, 30522) == (104, 30522)
    assert word_range(999, 1000) == (0, 999)
    ids_BT = torch.full((20, 50), 7)
    generator = torch.Generator().manual_seed(0)
    masked = mask_tokens(ids_BT, ids_BT > 0, scheme="bert", mask_id=29, vocab_size=30, generator=generator)
    assert {29, 7} < set(masked.unique().tolist()) and len(masked.unique()) > 20


@pytest.mark.parametrize("family", ["unified_vlp", "vlmo", "xgpt"])
@pytest.mark.parametrize("kind", WRITERS)
def test_families_pass_their_checks_with_it(family: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("vlp_models.contrib.plugin_kit.commands")
    from vlp_models.contrib.plugin_kit.conformance.families import try_family
    from vlp_models.contrib.plugin_kit.conformance.scenes import write_sample_scenes
    from vlp_models.contrib.plugin_kit.conformance.trial import small_config

    folder = WRITERS[kind](tmp_path)
    special = {"mask": "<mask>"} if kind == "bpe" else {}
    tokenizer = read_tokenizer(folder, lowercase=False, special_tokens=special)
    (tmp_path / "scenes").mkdir()
    scenes = dataclasses.replace(write_sample_scenes(tmp_path / "scenes"), tokenizer=tokenizer)
    config = {"max_positions": 96} if family == "unified_vlp" else {"mask_scheme": "bert"} if family == "vlmo" else {}
    results = list(try_family(family, small_config(family, config), scenes))
    assert [f"{one.check}: {one.problem}" for one in results if one.problem] == []


def test_the_stage_saves_it_for_the_others(tmp_path: Path) -> None:
    write_unigram(tmp_path / "xlm")
    workspace = Workspace(tmp_path)
    images = [
        {"image_id": f"a/{n}", "source": "a", "split": "train", "path": "", "width": 9, "height": 9, "sha256": ""}
        for n in range(2)
    ]
    for name in SCHEMAS:
        rows: list[dict[str, Any]] = [{**image, "provenance": ""} for image in images] if name == "images" else []
        if name == "captions":
            rows = [
                {"caption_id": f"a/{n}#0", "image_id": f"a/{n}", "text": TEXTS[n], "provenance": ""} for n in (0, 1)
            ]
        workspace.validated.mkdir(parents=True, exist_ok=True)
        write_table(rows, name, workspace.validated)
    params = load_params(Path(__file__).parents[2] / "params.yaml")
    chosen = dataclasses.replace(params.tokenizer, source="vocab", vocab="xlm", lowercase=False)
    run(dataclasses.replace(params, tokenizer=chosen), workspace)
    saved = Tokenizer.load(workspace.tokenizer)
    assert saved.matches(read_pretrained(tmp_path / "xlm"))
    with pytest.raises(ParamsError, match=r"`source: train` they are fixed"):
        dataclasses.replace(params.tokenizer, special_tokens={"mask": "<mask>"})
