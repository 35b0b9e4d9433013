"""Two towers equal the libraries' own forward, from the image file and the text to the similarity; random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from photos import photo
from PIL import Image
from transformers import AutoModel, PreTrainedTokenizerFast
from two_tower_folders import CAPTIONS, LENGTH, WRITERS, write_clip, write_mobileclip, write_siglip, write_siglip2

from vlp_models.contrib.hub_models.dual_encoder import DualEncoder
from vlp_models.contrib.hub_models.transformers_towers import _warn_of_squashing, library_class
from vlp_models.data.batch import Pixels
from vlp_models.data.bert_folder import read_tokenizer
from vlp_models.data.pixels import PixelInput, collate_pixels
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import CheckpointError, ParamsError, VLPError
from vlp_models.models import DataFacts, build_model
from vlp_models.models.checkpoint import build_from_config, load_checkpoint_weights
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.objectives.contrastive import image_text_sigmoid
from vlp_models.params import to_plain

TOLERANCE = 1e-5
# Wide, tall, square, and with sides whose ratio rounds in either direction.
SIZES = [(200, 150), (75, 133), (64, 64), (101, 77), (37, 90), (33, 250)]


def load(folder: Path, **config: Any) -> tuple[DualEncoder, Tokenizer]:
    tokenizer = read_tokenizer(folder, lowercase=True)
    ids = {"cls_id": tokenizer.cls_id, "sep_id": tokenizer.sep_id}
    facts = DataFacts(vocab_size=tokenizer.vocab_size, mask_id=None, **ids)
    model = build_model("dual_encoder", config, facts, "models.towers.config", init=str(folder))
    assert isinstance(model, DualEncoder)
    model.load_folder(str(folder), Path(), "models.towers.init")
    return model.eval(), tokenizer


def read_pixels(model: DualEncoder, images: list[Image.Image]) -> torch.Tensor:
    image = model.inputs.image
    assert isinstance(image, PixelInput)
    return collate_pixels(images, image, [None] * len(images)).pixels_B3HW


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


def test_pixels_words_and_similarities_equal_those_of_transformers(folder: Path) -> None:
    model, tokenizer = load(folder)
    kind = model.config.architecture["model_type"]
    # SigLIP 2 keeps the shape of an image, which is squashed here: a square is a square in both.
    images = [photo(seed, size if kind != "siglip2" else (90, 90)) for seed, size in enumerate(SIZES)]
    inputs = library_class(kind, 2).from_pretrained(folder)(images=images, return_tensors="pt")
    texts = PreTrainedTokenizerFast.from_pretrained(folder)(
        CAPTIONS, padding="longest" if kind == "clip" else "max_length", return_tensors="pt"
    )
    if kind != "clip":  # trained without a mask
        texts.pop("attention_mask")
    texts.pop("token_type_ids", None)
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(folder).eval()(**inputs, **texts)
        pixels = read_pixels(model, images)
        images_BE = model.embed_image(Pixels(pixels_B3HW=pixels))
        texts_BE = model.embed_text(tokenizer.encode_batch(CAPTIONS, model.config.max_positions))
        logits_BB = model.contrast_scale() * texts_BE @ images_BE.T
        logits_BB += model.contrast_bias() if model.prefers_sigmoid else 0
    if kind != "siglip2":
        assert (pixels - inputs["pixel_values"]).abs().max() <= 1e-6
    for actual, reference in (
        (images_BE, expected.image_embeds),
        (texts_BE, expected.text_embeds),
        (logits_BB, expected.logits_per_text),
    ):
        assert (actual - reference).abs().max() <= TOLERANCE
    # The comparison could fail: the embeddings differ from each other.
    assert (texts_BE @ texts_BE.T).min() < 0.95
    assert (images_BE @ images_BE.T).min() < 0.9999


@pytest.mark.extras
def test_mobileclip_equals_open_clip(tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    from open_clip.transform import PreprocessCfg, image_transform_v2

    model, tokenizer = load(write_mobileclip(tmp_path))
    settings = json.loads((tmp_path / "open_clip_config.json").read_text())
    reference = open_clip.create_model(f"local-dir:{tmp_path}").eval()
    prepare = image_transform_v2(PreprocessCfg(**settings["preprocess_cfg"], size=64), is_train=False)
    images = [photo(seed, size) for seed, size in enumerate(SIZES)]
    ids = torch.zeros(len(CAPTIONS), LENGTH, dtype=torch.int64)
    encoded = PreTrainedTokenizerFast.from_pretrained(tmp_path)(CAPTIONS)["input_ids"]
    for row, tokens in zip(ids, encoded, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    with torch.inference_mode():
        expected_pixels = torch.stack([prepare(image) for image in images])
        pixels = read_pixels(model, images)
        assert (pixels - expected_pixels).abs().max() <= 1e-6
        images_BE = model.embed_image(Pixels(pixels_B3HW=pixels))
        texts_BE = model.embed_text(tokenizer.encode_batch(CAPTIONS, LENGTH))
        assert (images_BE - reference.encode_image(expected_pixels, normalize=True)).abs().max() <= TOLERANCE
        assert (texts_BE - reference.encode_text(ids, normalize=True)).abs().max() <= TOLERANCE
    assert not model.prefers_sigmoid


def test_squashed_images_are_announced_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a SigLIP of a fixed size is not: it squashes images itself."""
    folders = [tmp_path / "siglip", tmp_path / "siglip2"]
    write_siglip(folders[0])
    write_siglip2(folders[1])
    _warn_of_squashing.cache_clear()
    for folder, notices in zip(folders, (0, 1), strict=True):
        for _ in range(2):
            DualEncoder.read_architecture(str(folder), "models.towers.config")
        assert capsys.readouterr().err.count("every image is squashed to 32 x 32 pixels") == notices


def test_a_checkpoint_needs_nothing_but_itself(folder: Path) -> None:
    model, tokenizer = load(folder)
    config = json.loads(json.dumps(to_plain(model.config)))
    info = CheckpointInfo(family="dual_encoder", name="towers", model_config=config, max_text_len=20)
    rebuilt = build_from_config(info, tokenizer, folder)
    load_checkpoint_weights(rebuilt, model.state_dict(), folder)
    text = tokenizer.encode_batch(CAPTIONS, 20)
    with torch.inference_mode():
        assert torch.equal(rebuilt.eval().embed_text(text), model.embed_text(text))  # type: ignore[operator]


def test_groups_are_the_towers(folder: Path) -> None:
    model, _ = load(folder)
    groups = model.parameter_groups()
    assert sum(len(group) for group in groups.values()) == len(list(model.parameters()))
    assert len(groups["scale"]) == 2
    image_width = {tuple(parameter.shape) for parameter in groups["image"]}
    assert (32, 3, 8, 8) in image_width or (32, 192) in image_width


def faults(folder: Path) -> dict[str, Any]:
    """Return a part of the message -> what makes the folder wrong."""

    def edit(name: str, **changes: Any) -> None:
        settings = json.loads((folder / name).read_text())
        for key, value in changes.items():
            settings[key] = settings[key] | value if isinstance(settings.get(key), dict) else value
        (folder / name).write_text(json.dumps(settings))

    return {
        "`model_type` is 'bert'; expected two towers: clip, siglip, siglip2": lambda: edit(
            "config.json", model_type="bert"
        ),
        "not a valid siglip": lambda: edit("config.json", text_config={"hidden_size": "wide"}),
        "contains no preprocessor_config.json": (folder / "preprocessor_config.json").unlink,
        "resizes by 1; bicubic": lambda: edit("preprocessor_config.json", resample=1),
        "`do_resize` and `do_rescale`": lambda: edit("preprocessor_config.json", do_rescale=False),
        "images of 48 x 48 pixels": lambda: edit("preprocessor_config.json", size={"height": 48, "width": 48}),
        "tokenizer.json: no such file": (folder / "tokenizer.json").unlink,
        "has spiece.model but no tokenizer.json": lambda: (folder / "tokenizer.json").rename(folder / "spiece.model"),
        "pytorch_model.bin: a pickle": lambda: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    }


@pytest.mark.parametrize("words", list(faults(Path())))
def test_a_folder_that_is_no_such_model_is_refused_before_its_weights_are_read(words: str, tmp_path: Path) -> None:
    write_siglip(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    faults(tmp_path)[words]()
    with pytest.raises(VLPError) as error:
        DualEncoder.read_architecture(str(tmp_path), "models.towers.config")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    write_siglip(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"not those that its config describes: \d+ missing"):
        load(tmp_path)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write_clip(tmp_path)
    facts = DataFacts(vocab_size=300, mask_id=None, cls_id=0, sep_id=1)
    with pytest.raises(ParamsError, match="ends a text with the token 1, but the text tower is read at"):
        build_model("dual_encoder", {}, facts, "models.towers.config", init=str(tmp_path))
    with pytest.raises(ParamsError, match="gets its architecture from `init`"):
        build_model("dual_encoder", {}, facts)


def test_sigmoid_loss_is_that_of_transformers(tmp_path: Path) -> None:
    model, tokenizer = load(write_siglip(tmp_path))
    pixels = read_pixels(model, [photo(seed, (64, 64)) for seed in range(len(CAPTIONS))])
    text = tokenizer.encode_batch(CAPTIONS, model.config.max_positions)
    ids = F.pad(text.ids_BT[:, 1:], (0, LENGTH + 1 - text.ids_BT.shape[1]), value=tokenizer.pad_id)
    with torch.inference_mode():
        expected = model.towers(input_ids=ids, pixel_values=pixels, return_loss=True).loss
        embedded = model.embed_text(text), model.embed_image(Pixels(pixels_B3HW=pixels))
        scale, bias = model.contrast_scale(), model.contrast_bias()
        loss = image_text_sigmoid(*embedded, ["a", "b", "c", "d", "e"], scale, bias)
        # The fifth pair is of the first image: neither is a negative of the other.
        twins = image_text_sigmoid(*embedded, ["a", "b", "c", "d", "a"], scale, bias)
    assert loss.mean.item() == pytest.approx(float(expected), rel=1e-6)
    logits = scale * embedded[0] @ embedded[1].T + bias
    left_out = F.softplus(logits[0, 4]) + F.softplus(logits[4, 0])
    assert twins.sum.item() == pytest.approx(float(loss.sum - left_out), rel=1e-5)
