"""A language model as decoder equals transformers' own, is trained whole or in parts, and comes from safe files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hub_server import COMMIT, REPOSITORY, hub_server
from language_model_folders import CONFIGS, ROWS, write_language_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_dataset import FEATURE_DIM, Toy, check_resume, make_toy, write_workspace
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from vlp_models.common.workspace import Workspace
from vlp_models.contrib.hub_models.language_model_decoder import LanguageModelDecoder
from vlp_models.data.batch import Regions, Text
from vlp_models.data.tokenizer import Tokenizer, read_pretrained
from vlp_models.errors import CheckpointError, MissingToolError, ParamsError, VLPError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.checkpoint import read_config, read_weights
from vlp_models.models.decoding.search import EncodedImages, beam_search, greedy
from vlp_models.models.meta_model import meta_model
from vlp_models.params import ModelParams, Params, load_params, to_plain
from vlp_models.pipeline.stages import finetune, initial
from vlp_models.tasks.base import load_task_model

SMALL = {"prefix": 4, "mapper_hidden": 32, "mapper_heads": 2, "mapper_intermediate": 64, "mapper_layers": 1}
FAMILY, TOLERANCE = "language_model_decoder", 1e-5
# A process of its own: the client of the Hub reads its environment once.
USE_AND_BUILD = """
import sys
from vlp_models.cli.main import main
from vlp_models.cli.pipeline import run_stage
sys.argv = ["vlp", "use", "--set", "models.lm.seed=2"]
try:
    main()
except SystemExit as end:
    if end.code:
        raise
run_stage("initial", "lm", "params.yaml")
"""


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("lm"), "gpt2")


def regions(images: int = 3) -> Regions:
    generator = torch.Generator().manual_seed(3)
    mask_BR = torch.arange(5) < torch.tensor([[5], [2], [4]])
    return Regions(
        features_BRF=torch.randn(images, 5, FEATURE_DIM, generator=generator),
        boxes_BR4=torch.rand(images, 5, 4, generator=generator),
        class_probs_BRC=torch.rand(images, 5, 3, generator=generator),
        mask_BR=mask_BR,
    )


def load(folder: Path, root: Path) -> tuple[LanguageModelDecoder, Tokenizer]:
    """Return the model as the stage `initial` builds it in the workspace `root`."""
    tokenizer = read_pretrained(folder)
    tokenizer.save(root / "data" / "tokenizer")
    facts = DataFacts(vocab_size=tokenizer.vocab_size, mask_id=None, feature_dim=FEATURE_DIM, num_classes=3)
    torch.manual_seed(0)
    model = build_model(FAMILY, {**SMALL, "init_std": 0.2}, facts, "models.lm.config", init=str(folder))
    assert isinstance(model, LanguageModelDecoder)
    model.load_folder(str(folder), root, "models.lm.init")
    return model.eval(), tokenizer


@torch.no_grad()
def test_logits_and_greedy_captions_equal_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    image, prefix = regions(), model.mapper(regions())
    text = tokenizer.encode_batch(["two cats", "is there a green cylinder?", "a dog", "a"], 16)
    text = Text(ids_BT=text.ids_BT, mask_BT=text.mask_BT, owner_N=torch.tensor([0, 1, 1, 2]))

    words = reference.get_input_embeddings()
    joined = torch.cat([prefix[text.owner_N], words(text.ids_BT)], 1)
    mask = torch.cat([torch.ones(4, SMALL["prefix"], dtype=torch.bool), text.mask_BT], 1)
    expected = reference(inputs_embeds=joined, attention_mask=mask.long()).logits[:, SMALL["prefix"] :]
    actual = model.generation_logits(image, text)
    assert actual.shape == (*text.ids_BT.shape, tokenizer.vocab_size) and tokenizer.vocab_size < ROWS
    difference = (actual - expected[..., : tokenizer.vocab_size])[text.mask_BT].abs().max()
    assert difference <= TOLERANCE and actual[text.mask_BT].std() > 0.5

    # Every row of the language model may be written here: a small vocabulary has no meaning in `generate`.
    object.__setattr__(model.config, "vocab_size", ROWS)
    start = torch.cat([prefix, words(torch.full((3, 1), tokenizer.cls_id))], 1)
    written = reference.generate(inputs_embeds=start, max_new_tokens=10, do_sample=False, eos_token_id=ROWS + 1)
    search: dict[str, Any] = {"max_len": 10, "bos_id": tokenizer.cls_id}
    encoded = EncodedImages(model=model, state=model.start(image, max_len=10))
    assert [caption.ids for caption in greedy(encoded, image, eos_id=ROWS + 1, **search)] == written.tolist()
    assert len({tuple(ids) for ids in written.tolist()}) == 3, "the images have an effect"
    # A word that the first caption contains ends every caption; beams extend and reorder one cached prefix.
    end = written[0, 4].item()
    cut = [ids[: ids.index(end)] if end in ids else ids for ids in written.tolist()]
    assert [caption.ids for caption in greedy(encoded, image, eos_id=end, **search)] == cut
    assert [c.ids for c in beam_search(encoded, image, eos_id=end, beam_size=1, **search)] == cut
    wide = beam_search(encoded, image, eos_id=end, beam_size=4, **search)
    assert [caption.ids for caption in greedy(encoded, image, eos_id=end, **search)] == cut
    for row, caption in enumerate(wide):
        ids = torch.tensor([[tokenizer.cls_id, *caption.ids, end]])
        logits_TV = reference(inputs_embeds=torch.cat([prefix[row : row + 1], words(ids)], 1)).logits[0]
        scores_TV = logits_TV[SMALL["prefix"] : -1].log_softmax(-1)
        count = min(10, len(caption.ids) + 1)
        assert caption.score == pytest.approx(scores_TV[range(count), ids[0, 1 : count + 1]].sum().item(), abs=1e-4)


def test_a_checkpoint_needs_no_folder_and_old_names_are_read(folder: Path, tmp_path: Path) -> None:
    model, _ = load(folder, tmp_path)
    facts = DataFacts(vocab_size=model.config.vocab_size, mask_id=None, feature_dim=FEATURE_DIM)
    again = build_model(FAMILY, json.loads(json.dumps(to_plain(model.config))), facts)
    again.load_state_dict(model.state_dict())
    assert len(model.state_dict()) == len({t.data_ptr() for t in model.state_dict().values()}), "no weight twice"

    # As some repositories have it: no prefix, buffers of masks, and in half precision
    weights = load_file(folder / "model.safetensors")
    plain = {name.removeprefix("transformer.").removeprefix("model."): t.half() for name, t in weights.items()}
    plain |= {"h.0.attn.bias": torch.ones(1)} if folder.name.startswith("gpt2") else {}
    old = tmp_path / "old"
    old.mkdir()
    for file in folder.glob("*.json"):
        (old / file.name).write_bytes(file.read_bytes())
    save_file(plain, old / "model.safetensors", metadata={"format": "pt"})
    loaded = load(old, tmp_path)[0].state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(loaded[name], weight, atol=2e-3, rtol=1e-3)


def test_other_models_and_unsafe_files_are_refused_before_anything_is_built(gpt2: Path, tmp_path: Path) -> None:
    def copy(name: str, **changes: Any) -> Path:
        (tmp_path / name).mkdir()
        for file in gpt2.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        config = json.loads((gpt2 / "config.json").read_text()) | changes
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    pickled = copy("pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    BertForMaskedLM(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(
        tmp_path / "bert"
    )
    refused = {
        tmp_path
        / "bert": r"config\.json: `model_type` is 'bert'; expected a decoder-only language model \(gpt2, llama",
        pickled: r"pytorch_model\.bin: a pickle, which can run code",
        copy("remote", auto_map={"AutoModelForCausalLM": "code.Model"}): r"`auto_map` names code in the folder",
        copy("quantized", quantization_config={"quant_method": "awq"}): r"config\.json: quantized weights",
        copy("invalid", n_layer="two"): r"config\.json: describes no valid gpt2",
        tmp_path / "nothing": r"`models\.lm\.init: .*nothing`: no such folder",
    }
    for source, message in refused.items():
        with pytest.raises(VLPError, match=message):
            meta_model(ModelParams(family=FAMILY, init=str(source)), "models.lm.config")
    # what a checkpoint from outside describes
    for key, value in (("auto_map", {}), ("_attn_implementation", "someone/kernel"), ("quantization_config", {})):
        with pytest.raises(ParamsError, match=rf"a gpt2 has no key '{key}'"):
            meta_model(ModelParams(family=FAMILY, config={"language_model": {"model_type": "gpt2", key: value}}))
    with pytest.raises(ParamsError, match=r"`model_type` is 'bert'"):
        meta_model(ModelParams(family=FAMILY, config={"language_model": {"model_type": "bert"}}))

    # weights and vocabulary of another model
    (tmp_path / "data").mkdir()
    for change, message in (({"n_layer": 1}, "1[0-9] unexpected"), ({"n_positions": 90}, "1 of another shape")):
        with pytest.raises(CheckpointError, match=message):
            load(copy(f"other-{len(message)}", **change), tmp_path)
    (tmp_path / "data" / "tokenizer" / "tokenizer.json").unlink()
    model, _ = load(gpt2, tmp_path)
    Tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], lowercase=True).save(tmp_path / "data" / "tokenizer")
    with pytest.raises(CheckpointError, match=r"its vocabulary is not that of data/tokenizer; set `tokenizer:"):
        model.load_folder(str(gpt2), tmp_path, "models.lm.init")
    with pytest.raises(ParamsError, match=r"has rows for 420 tokens, but the tokenizer has 500"):
        build_model(FAMILY, {}, DataFacts(vocab_size=500, mask_id=None, feature_dim=4), init=str(gpt2))


def test_without_transformers_one_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingToolError, match=r"needs transformers, which is not installed: `.*install transformers`"):
        build_model(FAMILY, SMALL, DataFacts(vocab_size=9, mask_id=None, feature_dim=4))


def make_workspace(root: Path, folder: Path, init: str = "", **run: Any) -> Params:
    """Write a workspace with the tokenizer of the language model in `folder`, which a model starts from."""
    write_workspace(root)
    raw = yaml.safe_load((root / "params.yaml").read_text())
    raw["models"] = {"lm": {"family": FAMILY, "init": init or str(folder), "config": SMALL}}
    raw["pretrain"] = {}
    raw["finetune"] = {"lm": {"task": "captioning", "start": "initial/lm", "max_epochs": 1, **run}}
    (root / "params.yaml").write_text(yaml.safe_dump(raw))
    (root / "data" / "tokenizer" / "vocab.txt").unlink()
    read_pretrained(folder).save(root / "data" / "tokenizer")
    return load_params(root / "params.yaml")


def changed_parts(workspace: Workspace) -> tuple[dict[str, Tensor], set[str]]:
    """Return the trained weights, and the names of those that differ from the initial ones."""
    before = read_weights(workspace.checkpoint("initial/lm"))
    after = read_weights(workspace.checkpoint("finetune/lm"))
    assert before.keys() == after.keys()
    return after, {name for name, weight in after.items() if not torch.equal(weight, before[name])}


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_language_model_keeps_its_weights_and_a_whole_one_learns(
    folder: Path, tmp_path: Path, frozen: bool
) -> None:
    groups = {"language_model": {"frozen": True} if frozen else {"lr": 1e-3}}
    params = make_workspace(tmp_path, folder, optimizer={"lr": 1e-3, "groups": groups})
    workspace = Workspace(tmp_path)
    initial.run(params, workspace, "lm")
    finetune.run(params, workspace, "lm")
    after, changed = changed_parts(workspace)
    mapper = {name for name in after if name.startswith("model.mapper.")}
    assert mapper and changed == (mapper if frozen else set(after))

    info = read_config(workspace.checkpoint("finetune/lm"))
    assert info.model_config["language_model"]["model_type"] in CONFIGS and str(folder) not in json.dumps(
        dict(info.model_config)
    )
    start = read_config(workspace.checkpoint("initial/lm")).provenance["init"]
    assert start["source"] == str(folder) and set(start["files"]) == {"config.json", "model.safetensors"}
    load_task_model(workspace.checkpoint("finetune/lm"))


def test_adapters_of_the_language_model_are_merged_and_the_mapper_is_trained(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="an extra: requirements-lora.lock")
    lora = {"rank": 2, "alpha": 4.0, "modules_to_save": ["mapper"]}
    params = make_workspace(tmp_path, folder, lora=lora, optimizer={"lr": 1e-2})
    workspace = Workspace(tmp_path)
    initial.run(params, workspace, "lm")
    finetune.run(params, workspace, "lm")
    after, changed = changed_parts(workspace)
    linear = {
        f"model.{name}.weight"
        for name, layer in load_task_model(workspace.checkpoint("finetune/lm")).model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.startswith("language_model.")
    }
    assert linear and changed == linear | {name for name in after if name.startswith("model.mapper.")}


@pytest.mark.slow
def test_a_model_of_the_hub_is_pinned_by_vlp_use_and_read_at_its_commit(gpt2: Path, tmp_path: Path) -> None:
    make_workspace(tmp_path / "project", gpt2, init=f"hf://{REPOSITORY}")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    with hub_server() as hub:
        hub.files = {path.name: path.read_bytes() for path in gpt2.iterdir()} | {"pytorch_model.bin": b"pickle"}
        settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", USE_AND_BUILD],
            cwd=tmp_path / "project",
            env=inherited | settings | {"PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert "model.safetensors" in hub.downloaded and "pytorch_model.bin" not in hub.downloaded
    source = f"hf://{REPOSITORY}@{COMMIT}"
    assert source in (tmp_path / "project" / "params.yaml").read_text()
    checkpoint = Workspace(tmp_path / "project").checkpoint("initial/lm")
    assert read_config(checkpoint).provenance["init"]["source"] == source
    name = "transformer.wte.weight"
    weights = read_weights(checkpoint)
    assert torch.equal(weights[f"model.language_model.{name}"], load_file(gpt2 / "model.safetensors")[name])


def test_a_killed_training_continues_to_the_bit(tmp_path: Path) -> None:
    toy: Toy = make_toy(tmp_path)
    sizes = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": toy.tokenizer.vocab_size}

    def fit(work: Path, tracker: Any = None) -> tuple[Any, Any]:
        torch.manual_seed(1)
        facts = DataFacts(vocab_size=toy.tokenizer.vocab_size, mask_id=4, feature_dim=FEATURE_DIM)
        model = build_model(FAMILY, {**SMALL, "language_model": {**sizes, "resid_pdrop": 0.2}}, facts)
        return toy.fit(work, model, objectives={"ic": 1.0}, max_epochs=1, tracker=tracker)

    _, result = check_resume(fit, tmp_path, 2)
    assert result.rows[-1]["loss"] < result.rows[0]["loss"]
