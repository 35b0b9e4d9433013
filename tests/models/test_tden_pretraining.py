"""The four objectives on the model: they can be asked for singly, hide what they should, and are learnt."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vlp_models.errors import ParamsError

ALL = ("mlm", "moc", "ism", "msg")


def losses(model, batch, objectives=ALL, seed=0, probability=0.15):
    generator = torch.Generator().manual_seed(seed)
    return model.pretraining_losses(batch, objectives=objectives, generator=generator, mask_probability=probability)


def test_the_four_losses_fall_on_one_batch(tiny, make_batch):
    model = tiny(hidden=64, heads=4, intermediate=128, init_std=0.05).float().train()
    batch = make_batch(8)
    image = {f.name: getattr(batch.image, f.name) for f in dataclasses.fields(batch.image)}
    image = {name: x.float() if x.is_floating_point() else x for name, x in image.items()}
    image["class_probs_BRC"] = torch.nn.functional.one_hot(image["class_probs_BRC"].argmax(-1), 5).float()
    batch = dataclasses.replace(batch, image=type(batch.image)(**image))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    history = []
    for step in range(160):
        result = losses(model, batch, seed=step, probability=0.3)
        optimizer.zero_grad()
        torch.stack([loss.mean for loss in result.values()]).sum().backward()
        optimizer.step()
        history.append({name: part.mean.item() for loss in result.values() for name, part in loss.parts.items()})

    def mean(name: str, steps: list[dict[str, float]]) -> float:
        return sum(step[name] for step in steps) / len(steps)

    for name in ("mlm", "moc", "msg"):
        assert mean(name, history[-10:]) < 0.5 * mean(name, history[:10]), name
    # ISM is a mean over the pairs that still violate the margin, so its accuracy tells more than its value.
    assert mean("ism", history[-10:]) < mean("ism", history[:10])
    assert mean("ism_accuracy", history[-10:]) > 0.9 > 0.5 > mean("ism_accuracy", history[:10])


def test_one_stack_learns_both_ways_and_keeps_them_apart(tiny, batch):
    """A masked word's MLM prediction sees later words; in the same weights, MSG's sees none, nor through regions."""
    model = tiny(structure="single_stream", ism_source="cross_modal")
    result = losses(model, batch, probability=0.5)
    torch.stack([loss.mean for loss in result.values()]).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} <= {
        n for n, _ in model.named_parameters() if n.startswith(("fusion_", "text_pooler", "image_poolers"))
    }
    visual, mask, ids = model.encode_image(batch.image), batch.text.mask_BT, batch.text.ids_BT
    words = torch.zeros_like(mask)
    words[0, 1] = True
    later = ids.clone()
    later[:, 2:] = (later[:, 2:] + 1) % 30
    before, after = (
        model.run_pass(visual, mask, encoder_ids_BT=i, decoder_ids_BT=i, words_BT=words) for i in (ids, later)
    )
    assert not torch.allclose(before.mlm_logits_MV, after.mlm_logits_MV)
    assert torch.equal(before.msg_logits_at(words, mask), after.msg_logits_at(words, mask))


def test_cross_modal_matching_equals_its_definition(tiny, make_batch):
    """Each sentence with its own image, then with the image before it, unless that is the same image."""
    model = tiny(ism_source="cross_modal")
    batch = dataclasses.replace(make_batch(4), image_ids=("x", "x", "y", "z"))
    ism = losses(model, batch, ["ism"], probability=0.0)["ism"]
    logits = model.score_pairs(batch.image, batch.text)

    def shifted(image):
        return type(image)(**{f.name: getattr(image, f.name).roll(1, 0) for f in dataclasses.fields(image)})

    others = model.score_pairs(shifted(batch.image), batch.text)[[0, 2, 3]]
    expected = [torch.nn.functional.softplus(-s) for s in logits] + [torch.nn.functional.softplus(s) for s in others]
    torch.testing.assert_close(ism.mean, torch.stack(expected).mean())
    one = losses(model, make_batch(1), ["ism"])["ism"]
    assert one.mean.item() == 0.0


@pytest.mark.parametrize("name", ALL)
def test_an_objective_alone_reaches_its_own_modules(tiny, batch, name):
    model = tiny()
    result = losses(model, batch, [name], probability=0.5)
    assert set(result) == {name}
    result[name].mean.backward()
    reached = {n.split(".")[0] for n, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
    both = {"region_embedding", "text_embedding", "object_encoder", "sentence_encoder"}
    assert (
        reached
        == both
        | {
            "mlm": {"cross_encoder", "word_head"},
            "moc": {"cross_encoder", "object_head"},
            "ism": {"text_pooler", "image_poolers"},
            "msg": {"cross_decoder", "word_head"},
        }[name]
    )


def test_masked_words_and_regions_are_out_of_sight(tiny, batch):
    """MLM, MOC and ISM must not change when a masked word or a hidden region's feature does; only targets may."""
    model = tiny()
    generator = torch.Generator().manual_seed(0)
    words = torch.zeros_like(batch.text.mask_BT)
    regions = torch.zeros_like(batch.image.mask_BR)
    words[:, 1], regions[:, 0] = True, True

    def outputs(ids, features):
        image = dataclasses.replace(batch.image, features_BRF=features)
        visual = model.encode_image(image, regions)
        masked = ids.masked_fill(words, model.config.mask_id)
        out = model.run_pass(
            visual,
            batch.text.mask_BT,
            encoder_ids_BT=masked,
            decoder_ids_BT=masked,
            words_BT=words,
            regions_BR=regions,
        )
        return out.mlm_logits_MV, out.moc_logits_KC, out.msg_logits_NV, model.pool_image(visual)

    ids, features = batch.text.ids_BT.clone(), batch.image.features_BRF.clone()
    before = outputs(ids, features)
    ids[:, 1] = 29
    features[:, 0] = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(ids, features), strict=True))


def test_two_passes_share_the_encoded_image(tiny, batch):
    """The seam of scheduled sampling: sample words from the first pass, run a second with them, learn from both."""
    model = tiny()
    mask, ids = batch.text.mask_BT, batch.text.ids_BT
    words = torch.zeros_like(mask)
    words[:, 1], words[0, 4] = True, True
    visual = model.encode_image(batch.image)
    masked = ids.masked_fill(words, model.config.mask_id)
    first = model.run_pass(visual, mask, encoder_ids_BT=masked, decoder_ids_BT=masked, words_BT=words)

    decoder_logits = first.msg_logits_at(words, mask)
    assert decoder_logits.shape == first.mlm_logits_MV.shape == (5, 30)
    full = model.generation_logits(batch.image, dataclasses.replace(batch.text, ids_BT=masked))
    torch.testing.assert_close(decoder_logits, full[:, :-1][words[:, 1:]], rtol=0, atol=1e-10)

    sampled_e, sampled_d = masked.clone(), masked.clone()
    sampled_e[words], sampled_d[words] = first.mlm_logits_MV.argmax(-1), decoder_logits.argmax(-1)
    second = model.run_pass(visual, mask, encoder_ids_BT=sampled_e, decoder_ids_BT=sampled_d, words_BT=words)
    total = sum(
        loss.mean
        for out in (first, second)
        for loss in model.pass_losses(out, batch, words_BT=words, regions_BR=None).values()
    )
    total.backward()
    assert model.object_encoder[0].ffn[0].weight.grad.any()


def test_the_generator_alone_decides_the_corruption(tiny, batch):
    model = tiny(mask_scheme="bert", zero_overlapping_regions=True)
    a, b, c = (losses(model, batch, seed=seed, probability=0.5) for seed in (1, 1, 2))
    assert all(torch.equal(a[name].mean, b[name].mean) for name in ALL)
    assert not torch.equal(a["mlm"].mean, c["mlm"].mean)


def test_nothing_masked_is_no_loss_and_no_nan(tiny, batch):
    model = tiny()
    result = losses(model, batch, probability=0.0)
    assert result["mlm"].mean.item() == result["moc"].mean.item() == 0.0
    torch.stack([loss.mean for loss in result.values()]).sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("switches", [{}, {"pooler_batch_norm": True}, {"ism_source": "cross_modal"}])
def test_a_batch_of_one_is_no_error_and_no_nan(tiny, make_batch, switches):
    """As the last batch of an epoch may be; also in training mode, with batch normalisation in ISM's poolers."""
    model = tiny(**switches).train()
    result = losses(model, make_batch(1), probability=0.5)
    torch.stack([loss.mean for loss in result.values()]).sum().backward()
    assert result["ism"].mean.item() == 0.0
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


def test_unknown_objectives_are_explained(tiny, batch):
    with pytest.raises(ParamsError, match=r"can't learn \['itm'\]"):
        losses(tiny(), batch, ["mlm", "itm"])


def test_blank_images_train(tiny, batch):
    """The text-only control: gradients stay of ordinary size."""
    model = tiny(init_std=0.02)
    blank = dataclasses.replace(batch, image=batch.image.blanked())
    model.fuse(blank.image, blank.text).pooled_BP.square().sum().backward()
    assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) < 1e3
