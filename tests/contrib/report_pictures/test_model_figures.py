"""Figures of pretrained models: VLMo's tokens per expert, and the patches per code of SOHO's dictionary."""

from __future__ import annotations

import dataclasses

import torch
from soho_toys import batch_of, build
from tiny_vlmo import build_tiny, random_batch

from vlp_models.contrib.report_pictures import soho_codes, vlmo_experts


def test_figure_counts_tokens_per_expert() -> None:
    """Images and texts alone go through every vision and language expert; pairs through those below `vl_start`, and
    then through the vision-language expert."""
    model, batch = build_tiny(), random_batch(3)
    words, patches = int(batch.text.mask_BT.sum()), 3 * 16
    (figure,) = vlmo_experts.figures(model, [batch])
    notes = {group.name: group.note for group in figure.groups}
    assert list(notes) == [
        *(f"layer {layer}, {expert} expert" for layer in (1, 2) for expert in ("vision", "language")),
        *(f"layer 3, {expert} expert" for expert in ("vision", "language", "vision-language")),
    ]
    assert notes["layer 1, vision expert"].startswith(f"{2 * patches} patches (100%)")
    assert notes["layer 2, language expert"].startswith(f"{2 * words} words (100%)")
    assert notes["layer 3, vision expert"].startswith(f"{patches} patches (100%)")
    both = notes["layer 3, vision-language expert"]
    assert both.startswith(f"{patches} patches") and f"{words} words" in both
    for group in figure.groups:
        ids = [patch.image_id for patch in group.patches]
        assert sorted(ids) == (
            [] if "language expert" in group.name and "vision" not in group.name else ["a", "b", "c"]
        )
    (alone,) = vlmo_experts.figures(model, [dataclasses.replace(batch, image=None)])
    assert {group.name.split(", ")[1] for group in alone.groups} == {"language expert"}
    assert vlmo_experts.figures(build_tiny(feed_forward="shared"), [batch]) == []


def test_figure_shows_the_most_changed_patches() -> None:
    model, batch = build_tiny(vl_start=3), dataclasses.replace(random_batch(2), text=None)
    (figure,) = vlmo_experts.figures(model, [batch])
    block, states = model.blocks[0], []
    with torch.no_grad(), block.experts["vision"].register_forward_hook(lambda _, x, y: states.extend([x[0], y])):
        model.image_states(model.encode_image(batch.image), model.biases(0))
    before, added = states
    made = ((added * block.expert_scale).norm(dim=-1) / before.norm(dim=-1)).view(2, 17)[:, 1:]
    shown = {patch.image_id: patch.box for patch in figure.groups[0].patches}
    assert len(shown) == 2
    for image_id, values in zip(batch.image_ids, made, strict=True):
        row, column = divmod(int(values.argmax()), 4)
        assert shown[image_id] == (column / 4, row / 4, (column + 1) / 4, (row + 1) / 4)


def test_figure_shows_the_patches_that_each_code_gathers() -> None:
    model, batch = build(), batch_of(4)
    (figure,) = soho_codes.figures(model, [batch])
    grid = model.extract_features(batch.image)
    codes = model.map_to_codes(grid, learn=False)[1]
    valid = int((codes >= 0).sum())
    assert f"represent the {valid:,} cells of 4 val images" in figure.about
    assert len(figure.groups) == len(codes[codes >= 0].unique())
    counts = []
    for group in figure.groups:
        code = int(group.name.removeprefix("code "))
        counts.append(int((codes == code).sum()))
        assert group.note.startswith(f"{100 * counts[-1] / valid:.1f}%")
        assert len({patch.image_id for patch in group.patches}) == len(group.patches) > 0
        for patch in group.patches:
            row = batch.image_ids.index(patch.image_id)
            mask = batch.image.mask_BHW[row]
            size = mask.any(0).sum(), mask.any(1).sum()
            column, line = (round(float(patch.box[i] * size[i])) // model.stride for i in (0, 1))
            cell = line * 4 + column
            assert codes[row, cell] == code and not (codes[row, :cell] == code).any()
            assert max(patch.box) <= 1
    assert counts == sorted(counts, reverse=True)
    for other in (build(dictionary_size=0), build(resize="crop")):
        assert soho_codes.figures(other, [batch]) == []
