"""`vlp classify`: the label whose sentences are nearest to an image, from a checkpoint's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from photos import photo
from test_two_towers import load, read_pixels
from two_tower_folders import write_siglip

from vlp_models.contrib.hub_models.commands import classify
from vlp_models.data.batch import Pixels
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.checkpoint import write_checkpoint
from vlp_models.models.checkpoint_info import CheckpointInfo
from vlp_models.params import to_plain

TEMPLATES = ["a photo of a {}.", "a drawing of a {}."]


def test_labels_are_ranked_by_the_mean_of_their_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load(write_siglip(tmp_path / "siglip"))
    info = CheckpointInfo(
        family="dual_encoder",
        name="towers",
        model_config=to_plain(model.config),
        max_text_len=model.config.max_positions,
    )
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write_checkpoint(checkpoint, torch.nn.ModuleDict({"model": model}), info, tokenizer)
    images = [photo(seed, (80, 60)) for seed in range(4)]
    for number, (image, label) in enumerate(zip(images, ["cat", "dog", "cat", "dog"], strict=True)):
        (tmp_path / "photos" / label).mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "photos" / label / f"{number}.png")
    classify([str(tmp_path / "photos")], template=TEMPLATES, model=str(checkpoint))
    *lines, summary = capsys.readouterr().out.splitlines()
    # the same by hand: (sentences, labels) -> the mean of the sentences of each label
    with torch.inference_mode():
        texts = [template.replace("{}", label) for template in TEMPLATES for label in ("cat", "dog")]
        embedded = model.embed_text(tokenizer.encode_batch(texts, 65)).unflatten(0, (2, 2)).mean(0)
        embedded_BE = model.embed_image(Pixels(pixels_B3HW=read_pixels(model, images)))
        shares_BL = (model.contrast_scale() * embedded_BE @ F.normalize(embedded, dim=-1).T).softmax(-1)
    best = ["cat" if share > 0.5 else "dog" for share in shares_BL[:, 0].tolist()]
    printed = {Path(line.split("\t")[0]).stem: line.split("\t")[1].split()[0] for line in lines}
    assert [printed[str(number)] for number in range(4)] == best
    right = sum(label == truth for label, truth in zip(best, ["cat", "dog", "cat", "dog"], strict=True))
    assert summary.startswith(f"{right} of 4 images right")


def test_what_cannot_be_classified_is_one_sentence(tmp_path: Path) -> None:
    photo(1).save(tmp_path / "a.png")
    with pytest.raises(ParamsError, match=r"write \{\} once"):
        classify([str(tmp_path / "a.png")], labels="cat,dog", template=["a cat"])
    with pytest.raises(ParamsError, match="at least two different --labels"):
        classify([str(tmp_path / "a.png")], labels="cat")
    with pytest.raises(DataError, match="a sub-folder with images for each label"):
        classify([str(tmp_path)])
    with pytest.raises(DataError, match=r"b\.png: file not found"):
        classify([str(tmp_path / "b.png")], labels="cat,dog")
