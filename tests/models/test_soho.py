"""SOHO: images, pairs and losses against slow references; cells, positions and padding; invariances."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from soho_expanded import expanded_losses
from soho_toys import ALL, CODES, PUBLIC, batch_of, build, losses

from vlp_models.data.batch import Pixels
from vlp_models.errors import DataError, ParamsError
from vlp_models.models.layers.embeddings import sine_positions
from vlp_models.models.partial_load import load_partial
from vlp_models.models.soho.pairs import first_with_code, hide_codes, make_pairs
from vlp_models.models.soho.variants import Gate


def total(model, batch, **options):
    return sum(loss.mean for loss in losses(model, batch, **options).values())


# ---- Images ----------------------------------------------------------------------------------------------------


def test_anything_but_pixels_is_refused() -> None:
    with pytest.raises(DataError, match="reads pixels"):
        build().extract_features(None)  # type: ignore[arg-type]


def test_other_timm_backbones_work() -> None:
    for name, options in (("convnext_atto", {}), ("vit_tiny_patch16_224", {"img_size": 64, "depth": 1})):
        model = build(backbone=name, backbone_options=options, backbone_stage=0, pool=1)
        assert math.isfinite(total(model, batch_of(2)).item())


# ---- Pairs -----------------------------------------------------------------------------------------------------


def test_matched_and_mismatched_pairs() -> None:
    """Two matched and two mismatched per image, never with the same image id, whole texts with their masks."""
    batch = replace(batch_of(5, 2, seed=3), image_ids=("a", "b", "a", "c", "d"))
    ids, words = batch.text.ids_BT + 100, batch.text.ids_BT % 2 == 0
    seen = set()
    for seed in range(40):
        pairs = make_pairs(batch, ids, words, torch.Generator().manual_seed(seed), mismatched=True)
        assert pairs.matched_P.tolist() == [True] * 10 + [False] * 10
        assert pairs.owner_P.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] * 2
        assert torch.equal(pairs.original_PT[:10], batch.text.ids_BT)
        for row in range(10, 20):
            same = (batch.text.ids_BT == pairs.original_PT[row]).all(1).nonzero()
            text = int(same[0])
            assert torch.equal(pairs.ids_PT[row], ids[text]) and torch.equal(pairs.words_PT[row], words[text])
            assert torch.equal(pairs.mask_PT[row], batch.text.mask_BT[text])
            own, other = batch.image_ids[int(pairs.owner_P[row])], batch.image_ids[text // 2]
            assert own != other
            seen.add((row, text))
    assert len(seen) == 4 * 6 + 6 * 8  # every text of another image comes up


def test_batch_of_one_image_has_no_mismatched_pairs() -> None:
    batch = batch_of(1, 2)
    found = losses(build(), batch)
    assert found["itm"].count == 2 and total(build(), batch).isfinite()


def test_only_matched_pairs_learn_mlm_and_mvm() -> None:
    model, batch = build(mvm_probability=1.0), batch_of(4, 2)
    found = losses(model, batch, probability=1.0)
    words = (batch.text.mask_BT.sum(1) - 2).sum()
    assert found["mlm"].count == words and found["itm"].count == 16
    everyone = losses(build(mvm_probability=1.0, masked_pairs="all"), batch, probability=1.0)
    assert everyone["mlm"].count > words and everyone["mvm"].count > found["mvm"].count


def test_all_cells_of_a_uniformly_drawn_code_are_hidden() -> None:
    codes = torch.tensor([[0, 0, 0, 1, 2, -1], [3, 3, 3, 3, 3, 3]])
    mask = codes >= 0
    assert first_with_code(codes, mask).int().tolist() == [[1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]]
    batch = batch_of(2)
    pairs = make_pairs(batch, batch.text.ids_BT, batch.text.mask_BT, torch.Generator().manual_seed(0), mismatched=True)
    count = {0: 0, 1: 0, 2: 0}
    nothing = 0
    for seed in range(300):
        hidden = hide_codes(pairs, codes, mask, 0.5, torch.Generator().manual_seed(seed), 2)
        for row, owner in zip(hidden, pairs.owner_P.tolist(), strict=True):
            if not row.any():
                nothing += 1
                continue
            (code,) = codes[owner][row].unique().tolist()
            assert torch.equal(row, (codes[owner] == code) & mask[owner])
            if owner == 0:
                count[code] += 1
    assert 500 < nothing < 700  # of 1200
    assert min(count.values()) > 70  # of about 300


# ---- Losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("train", [False, True])
def test_losses_and_gradients_equal_the_expanded_reference(texts: int, train: bool) -> None:
    batch = batch_of(4, texts)
    short, long = (build(mvm_probability=0.7).train(train) for _ in range(2))
    found = losses(short, batch)
    wanted = expanded_losses(long, batch, torch.Generator().manual_seed(0), 0.4)
    for name in ALL:
        torch.testing.assert_close(found[name].mean, wanted[name], rtol=1e-9, atol=1e-9)
        assert found[name].count > 0
    sum(loss.mean for loss in found.values()).backward()
    sum(wanted.values()).backward()
    for (name, one), other in zip(short.named_parameters(), long.parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None or not other.grad.any(), name
            continue
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-9, msg=name)


def test_cnn_gets_gradients_through_the_dictionary_and_codes_get_none() -> None:
    model = build().train()
    total(model, batch_of()).backward()
    first = next(model.backbone.parameters())
    assert first.grad is not None and bool(first.grad.any())
    before = model.dictionary.codes.clone()
    model.dictionary.update()
    assert not torch.equal(before, model.dictionary.codes)


@pytest.mark.parametrize("config", [{}, PUBLIC], ids=["paper", "public"])
def test_objective_does_not_depend_on_the_others(config) -> None:
    model, batch = build(**config, mvm_probability=1.0), batch_of(3, 2)
    for names in (("mlm",), ("itm",), ("mvm",), ("mlm", "mvm")):
        found = losses(model, batch, objectives=names)
        assert set(found) == set(names)
        assert all(loss.mean.isfinite() and loss.count > 0 for loss in found.values())
    with pytest.raises(ParamsError, match="can't learn"):
        losses(model, batch, objectives=("moc",))
    with pytest.raises(ParamsError, match="dictionary_size"):
        losses(build(dictionary_size=0), batch)


def test_only_selected_samples_learn_an_objective() -> None:
    model, batch = build(mvm_probability=1.0), batch_of(4, 2)
    mask = torch.tensor([True, False, False, True])
    found = losses(model, batch, objectives={"mlm": mask, "itm": ~mask, "mvm": mask}, probability=1.0)
    lengths = (batch.text.mask_BT.sum(1) - 2).view(4, 2).sum(1)
    assert found["mlm"].count == lengths[mask].sum() and found["itm"].count == 8
    assert found["mvm"].count > 0


def test_hidden_cells_do_not_leak() -> None:
    """No predicted word or code, nor [CLS], changes when hidden cells change."""
    model, batch = build(task_features="dictionary"), batch_of(2)
    visual = model.encode_image(batch.image)
    visual = replace(visual, hidden_BRD=torch.zeros_like(visual.tokens_BRD))
    hidden = torch.zeros_like(visual.mask_BR)
    hidden[:, 2] = True
    other = replace(visual, tokens_BRD=visual.tokens_BRD + 9 * hidden[..., None])
    rows = torch.tensor([0, 1])
    one, two = (v.for_texts(rows, hidden).tokens_BRD for v in (visual, other))
    assert torch.equal(one, two) and not torch.equal(visual.tokens_BRD, other.tokens_BRD)


# ---- What must not matter ----------------------------------------------------------------------------------------


def test_image_with_several_texts_is_encoded_once(monkeypatch) -> None:
    model, batch = build(), batch_of(3, 2)
    seen = []
    model.backbone.register_forward_hook(lambda module, given, found: seen.append(len(given[0])))
    losses(model, batch)
    fused = model.fuse(batch.image, batch.text).pooled_BP
    state = model.encode_image(batch.image)
    scores = model.score(state, batch.text, batch.text.owner_N)
    assert seen == [3, 3, 3]
    copied = replace(batch.text, owner_N=None)
    torch.testing.assert_close(model.fuse(batch.image.select(batch.text.owner_N), copied).pooled_BP, fused)
    odds = model.match_head(fused)
    torch.testing.assert_close(scores, odds[:, 1] - odds[:, 0])


def test_process_without_rows_participates() -> None:
    model = build().train()
    batch = batch_of(2)
    found = losses(model, batch.empty())
    assert {name: loss.count for name, loss in found.items()} == {"mlm": 0, "mvm": 0, "itm": 0}
    sum(loss.sum for loss in found.values()).backward()
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    assert {part for loss in found.values() for part in loss.parts} == {
        part for loss in losses(model, batch).values() for part in loss.parts
    }


def test_process_without_images_joins_synchronized_batch_norm(monkeypatch) -> None:
    """The other processes would hang otherwise. `nn.SyncBatchNorm` itself runs only on GPUs, so it is replaced here."""
    monkeypatch.setattr(torch.nn.SyncBatchNorm, "forward", lambda self, input: input)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(build())
    seen = []
    model.backbone.register_forward_hook(lambda module, given, found: seen.append(len(given[0])))
    found = losses(model.train(), batch_of(2).empty())
    sum(loss.sum for loss in found.values()).backward()
    assert seen == [0]
    kernels = [module.weight for module in model.backbone.modules() if isinstance(module, torch.nn.Conv2d)]
    assert kernels and all(not kernel.grad.any() for kernel in kernels)  # there, so the others' backward passes go on
    model.eval().extract_features(batch_of(2).empty().image)
    assert seen == [0]


def test_gate_without_cells_joins_synchronized_batch_norm(monkeypatch) -> None:
    monkeypatch.setattr(torch.nn.SyncBatchNorm, "forward", lambda self, input: input)
    gate, seen = torch.nn.SyncBatchNorm.convert_sync_batchnorm(Gate(4)), []
    gate.norm.register_forward_hook(lambda module, given, found: seen.append(len(given[0])))
    nothing = torch.zeros(0, 3, 4)
    assert gate.train()(nothing, nothing).shape == (0, 3, 4) and seen == [0]
    gate.eval()(nothing, nothing)
    Gate(4).train()(nothing, nothing)
    assert seen == [0]


def test_tasks_read_the_dictionarys_input_or_output() -> None:
    batch = batch_of(2)
    inner, outer = build(), build(task_features="dictionary")
    assert not torch.allclose(
        inner.fuse(batch.image, batch.text).pooled_BP, outer.fuse(batch.image, batch.text).pooled_BP
    )
    outer.dictionary.codes.normal_(std=3.0)
    inner.dictionary.codes.normal_(std=3.0)
    again = inner.fuse(batch.image, batch.text).pooled_BP
    torch.testing.assert_close(again, build().fuse(batch.image, batch.text).pooled_BP)
    assert not torch.allclose(outer.fuse(batch.image, batch.text).pooled_BP, again)
    outer.train()
    before = outer.dictionary.codes.clone()
    outer.fuse(batch.image, batch.text).pooled_BP.sum().backward()
    outer.dictionary.update()
    assert torch.equal(before, outer.dictionary.codes)


def test_partial_load_with_another_dictionary_or_head() -> None:
    from vlp_models.errors import CheckpointError

    source = build(seed=1)
    target = build(seed=2, dictionary_size=CODES + 1, fusion_hidden=24)
    assert target.fused_dim == 24
    done = load_partial(target, source.state_dict(), vars(source.config))
    assert set(done.missing) == {
        "code_head.bias",
        "code_head.weight",
        "dictionary.codes",
        "dictionary.idle",
        "fusion.0.bias",
        "fusion.0.weight",
    }
    assert torch.equal(target.backbone.net.conv1.weight, source.backbone.net.conv1.weight)
    with pytest.raises(CheckpointError, match="hidden"):
        load_partial(build(hidden=32), source.state_dict(), vars(source.config))


# ---- Cells: positions and padding ----


def test_positions_match_their_definition() -> None:
    mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    mask[0], mask[1, :2, :3] = True, True
    found = sine_positions(mask, 8)
    for b, (rows, columns) in enumerate(((3, 4), (2, 3))):
        for y in range(rows):
            for x in range(columns):
                wanted = []
                for place, count in ((y + 1, rows), (x + 1, columns)):
                    angle = place / (count + 1e-6) * 2 * math.pi
                    for i in range(4):
                        wave = angle / 10000 ** (2 * (i // 2) / 4)
                        wanted.append(math.sin(wave) if i % 2 == 0 else math.cos(wave))
                torch.testing.assert_close(found[b, y, x], torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("height", "width", "rows", "columns"), [(1000, 600, 16, 10), (600, 1000, 10, 16)])
def test_portrait_and_landscape_images_have_all_cells_and_no_padding(height, width, rows, columns) -> None:
    """600 by 1000 pixels are 160 tokens of 64 pixels, either way (section 4.5)."""
    model = build(height=1024, width=1024, backbone_stage=-1)
    mask = torch.zeros(1, 1024, 1024, dtype=torch.bool)
    mask[0, :height, :width] = True
    grid = model.extract_features(Pixels(pixels_B3HW=torch.zeros(1, 3, 1024, 1024, dtype=torch.float64), mask_BHW=mask))
    assert model.stride == 64 and grid.mask_BRR.shape == (1, 16, 16)
    seen = grid.mask_BRR[0]
    assert seen.sum() == rows * columns == 160 and seen[:rows, :columns].all()


def test_square_mask_reproduces_the_public_bug() -> None:
    """As measured on the public code: 6 of 9 columns of a portrait image; padding as well for landscape ones."""
    fixed, buggy = (build(height=64, width=64, pool_first=True, square_mask=on, pool=1) for on in (False, True))
    standing = torch.ones(1, 1024, 608, dtype=torch.bool)
    standing[:, 1000:], standing[:, :, 600:] = False, False
    lying = torch.ones(2, 608, 1024, dtype=torch.bool)
    lying[:, 600:], lying[0, :, 800:], lying[1, :, 1000:] = False, False, False

    def columns(model, mask, shape):
        return model.grid_mask(mask, torch.zeros(len(mask), 1, *shape)).any(1).sum(1).tolist()

    assert columns(buggy, standing, (16, 9)) == [6] and columns(fixed, standing, (16, 9)) == [9]
    assert columns(buggy, lying, (9, 16)) == [16, 16] and columns(fixed, lying, (9, 16)) == [13, 16]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "grid", "seen"),
    [
        ([(600, 1000)], (9, 16), [144]),
        ([(1000, 600)], (16, 9), [144]),
        ([(600, 800), (600, 1000)], (9, 16), [117, 144]),
        ([(600, 1000), (1000, 600)], (16, 16), [160, 160]),
        ([(20, 1000)], (1, 16), [16]),
    ],
)
def test_tight_canvas_fits_the_largest_images(sizes, grid, seen) -> None:
    """The public code has 144 tokens for 600 by 1000 pixels; never less than one cell."""
    config = {"height": 1024, "width": 1024, "backbone_stage": -1, "pool_first": True}
    mask = torch.zeros(len(sizes), 1024, 1024, dtype=torch.bool)
    for row, (height, width) in zip(mask, sizes, strict=True):
        row[:height, :width] = True
    image = Pixels(pixels_B3HW=torch.zeros(len(sizes), 3, 1024, 1024, dtype=torch.float64), mask_BHW=mask)
    found = build(**config, tight_canvas=True).extract_features(image)
    assert found.mask_BRR.shape[1:] == grid and found.features_BRD.shape[1] == math.prod(grid)
    assert found.mask_BRR.sum((1, 2)).tolist() == seen
    assert build(**config).extract_features(image).mask_BRR.shape[1:] == (16, 16)
