"""Captions in many scripts in one listing: a row is in the shards as it was written, or in quarantine with its rule."""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from model_checks import encode
from PIL import Image

from vlp_models.common.workspace import Workspace
from vlp_models.data.inputs import ModelInputs
from vlp_models.data.pixels import PixelInput
from vlp_models.data.shards.dataset import ShardDataset
from vlp_models.data.tables import read_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.params import DatasetParams, load_params
from vlp_models.pipeline.stages import prepare, shards, tokenizer, validate

ROOT = Path(__file__).parents[2]
RTL, LTR = "\u200f", "\u200e"
CAFE = "Un café près de la forêt, l’été"
CAT = "Μια γάτα κοιμάται πάνω στο τραπέζι"
GOOD = {  # image file -> its captions
    "café": [CAFE, "Łódź: ein Mädchen auf der Straße, übers Brückengeländer gelehnt"],
    "собака": ["Рыжая собака бежит по зелёной траве", "Ёжик и йогурт на столе"],
    "γάτα": [CAT],
    "كلب": ["كلب بنيّ يجري على العشب", f"{RTL}قطة تنام على {LTR}Vespa 125{RTL} حمراء{RTL}", "گربه‌ای می‌خوابد"],
    "कुत्ता": ["एक कुत्ता हरी घास पर दौड़ता है", "वह क्‍षेत्र में बैठी है"],
    "犬": ["一只棕色的狗在草地上奔跑", "茶色の犬が草の上を走っている。", "ラーメンを食べる人たち"],
    "🐕": ["a dog 🐕 in the park with a 👨‍👩‍👧 and ❤️", "два 👍🏽 и флаг 🇺🇦"],
}
BAD = [  # image file, caption, rule
    ("🐕", "🐕 🐕 ❤️", "text_letters"),
    ("🐕", f"{RTL}{RTL} 123 {LTR} 456", "text_letters"),
    ("犬", "犬", "caption_words"),
    ("собака", "Собака", "caption_words"),
    ("كلب", "كلب \ufffd على العشب", "text_clean"),
    ("कुत्ता", "एक \x07 कुत्ता है", "text_clean"),
]
REPEATED = [("café", unicodedata.normalize("NFD", CAFE)), ("γάτα", CAT.upper())]
LATIN_1 = "ein Mädchen im Zug".encode("latin-1")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    folder = tmp_path / "data" / "raw" / "pairs"
    folder.mkdir(parents=True)
    for number, name in enumerate(GOOD):
        noise = np.random.default_rng(number).integers(0, 256, (24, 32, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"{name}.png")
    pairs = [(name, text) for name, texts in GOOD.items() for text in texts] + [(name, text) for name, text, _ in BAD]
    pairs += REPEATED
    lines = ["image,caption,split", *(f'{name}.png,"{text}",train' for name, text in pairs)]
    latin_1 = "café.png,".encode() + LATIN_1 + b",train\n"
    (folder / "pairs.csv").write_bytes("".join(f"{line}\n" for line in lines).encode() + latin_1)
    return Workspace(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lowercase", [False, True])
def test_every_row_is_used_or_counted(workspace: Workspace, lowercase: bool) -> None:
    params = load_params(ROOT / "params.yaml")
    own = {"vocab_size": 1000, "min_frequency": 1, "lowercase": lowercase, "strip_accents": False}
    params = dataclasses.replace(
        params,
        data={"pairs": DatasetParams.of(format="pairs", root="data/raw/pairs", pairs="pairs.csv")},
        validate=dataclasses.replace(params.validate, max_bad_fraction=0.5),
        tokenizer=dataclasses.replace(params.tokenizer, **own),
    )
    prepare.run(params, workspace, "pairs")
    validate.run(params, workspace)
    tokenizer.run(params, workspace)
    shards.run(params, workspace, inputs=[ModelInputs(image=PixelInput(height=8, width=8))])

    # Marks without a glyph are removed from captions.
    unseen = str.maketrans("", "", f"{RTL}{LTR}\ufe0f")
    good = [(f"pairs/{name}.png", text.translate(unseen)) for name, texts in GOOD.items() for text in texts]
    dataset = ShardDataset(workspace.shards, "train", "captions", regions=False)
    trained_on = {sample.sample_id: (sample.image_id, sample.text) for sample in dataset}
    quarantine = read_table("quarantine", workspace.validated).to_pylist()
    assert trained_on == {f"pairs/{line}": pair for line, pair in enumerate(good, 2)}
    first = 2 + len(good)
    assert {row["row_id"]: row["rule"] for row in quarantine} == {
        **{f"pairs/{line}": rule for line, (_, _, rule) in enumerate(BAD, first)},
        f"pairs/{first + len(BAD) + len(REPEATED)}": "text_utf8",
    }
    report = json.loads((workspace.reports / "validation.json").read_text())
    assert report["tables"]["captions"]["rows"] == len(trained_on) + len(quarantine) + len(REPEATED)
    assert report["left_out"] == {validate.REPEATED: len(REPEATED)}

    words = Tokenizer.load(workspace.tokenizer)
    for _, text in good:
        ids = encode(words, text, 64)
        assert words.unk_id not in ids
        assert bare(words.decode(ids)) == bare(text.lower() if lowercase else text), text


def bare(text: str) -> str:
    """Letters, marks and symbols: the tokenizer leaves out what is not seen, and puts spaces around each Han sign."""
    return "".join(c for c in unicodedata.normalize("NFC", text) if not c.isspace() and unicodedata.category(c) != "Cf")
