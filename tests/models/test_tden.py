"""TDEN: its parts, where captions may leak, and its four objectives: each runs alone and hides what it should."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vlp_models.models import DataFacts, build_model
from vlp_models.objectives.masked_modeling import Corruption

STRUCTURES = ["decoupled", "two_stream", "single_stream"]


@pytest.mark.parametrize(("source", "leaks"), [("object_encoder", False), ("cross_encoder", True)])
def test_caption_leaks_through_the_image_only_if_configured(tiny, batch, source, leaks):
    """In one pretraining pass, another sentence in the encoder must not change the decoder's predictions."""
    model = tiny(decoder_visual_source=source)
    ids, other = batch.text.ids_BT, batch.text.ids_BT.clone()
    other[:, 1] = 29
    words = torch.zeros_like(batch.text.mask_BT)
    words[:, 1] = True
    corruption = Corruption(ids_BT=ids, words_BT=words)
    visual = model.encode_corrupted(batch, corruption)

    def predictions(encoder_ids):
        done = model.masked_pass(batch, corruption, visual, {"mlm": None, "msg": None}, {"encoder": encoder_ids})
        return done.word_logits["encoder"], done.output.logits_MV

    (mlm, msg), (other_mlm, other_msg) = predictions(ids), predictions(other)
    assert not torch.allclose(mlm, other_mlm)
    assert torch.equal(msg, other_msg) is not leaks


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structure_has_no_unused_weights(tiny, structure):
    parts = {name.split(".")[0] for name in tiny(structure=structure).state_dict()}
    absent = {"cross_decoder"} if structure != "decoupled" else set()
    absent |= {"object_encoder", "sentence_encoder"} if structure == "single_stream" else set()
    stacks = {"object_encoder", "sentence_encoder", "cross_encoder", "cross_decoder"}
    assert parts & stacks == stacks - absent


def test_sizes_equal_the_authors_model():
    """The authors' code counts 316.13M for pretraining, 233.77M for captioning, 162.67M for retrieval, 294.85M for VQA
    and 233.53M for VCR; it has one more text type (768), and no pooled feature for VQA in the first three."""
    public = {
        "separate_ffn": True,
        "tie_lm_head": False,
        "ism_pooling": "all_layers",
        "similarity_dim": 1024,
        "pooler_batch_norm": True,
    }
    facts = DataFacts(vocab_size=30522, mask_id=103, feature_dim=2048, num_classes=1601)
    with torch.device("meta"):
        model = build_model("tden", public, facts)
    count = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    encoders = ["region_embedding", "text_embedding", "object_encoder", "sentence_encoder"]
    pretraining = sum(count.values()) - count["fusion_poolers"] - count["fusion_norm"]
    assert round((pretraining + 768) / 1e6, 2) == 316.13
    assert round((sum(count[c] for c in [*encoders, "cross_decoder", "word_head"]) + 768) / 1e6, 2) == 233.77
    assert round((sum(count[c] for c in [*encoders, "text_pooler", "image_poolers"]) + 768) / 1e6, 2) == 162.67

    fusion = {"fusion": "product", "fusion_pooling": "all_layers", "fusion_decoder": "apart"}
    for own, parts, head, expected in (
        ({}, [*encoders, "cross_encoder", "cross_decoder"], 2 * (768 + 1) * 3129, 294.85),  # VQA
        ({"fusion_dim": 1024, "use_decoder_in_fusion": False}, [*encoders, "cross_encoder"], 1025, 233.53),  # VCR
    ):
        with torch.device("meta"):
            model = build_model("tden", {**public, **fusion, **own}, dataclasses.replace(facts, num_classes=0))
        count = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
        fused = sum(number for name, number in count.items() if name.startswith("fusion_"))
        assert round((sum(count[c] for c in parts) + fused + head + 768) / 1e6, 2) == expected


# ---- Objectives ----


ALL = ("mlm", "moc", "ism", "msg")


def losses(model, batch, objectives=ALL, seed=0, probability=0.15):
    """objectives: names, or the samples that train each."""
    asked = objectives if isinstance(objectives, dict) else dict.fromkeys(objectives)
    generator = torch.Generator().manual_seed(seed)
    return model.pretraining_losses(batch, objectives=asked, generator=generator, mask_probability=probability)


def one_pass(model, batch, ids, words, regions=None, features=None, after=None):
    """Run a pass that reads `ids` with these words and regions hidden."""
    corruption = Corruption(ids_BT=ids, words_BT=words, regions_BR=regions, hidden_BR=regions)
    objectives = dict.fromkeys(("mlm", "msg") if regions is None else ("mlm", "moc", "msg"))
    return model.masked_pass(batch, corruption, model.encode_corrupted(batch, corruption), objectives, after=after)


def test_single_stack_keeps_understanding_and_generation_apart(tiny, batch):
    """MLM's prediction depends on later words; MSG's, with the same weights, does not, not even through regions."""
    model = tiny(structure="single_stream", ism_source="cross_modal")
    result = losses(model, batch, probability=0.5)
    torch.stack([loss.mean for loss in result.values()]).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} <= {
        n for n, _ in model.named_parameters() if n.startswith(("fusion_", "text_pooler", "image_poolers"))
    }
    ids = batch.text.ids_BT
    words = torch.zeros_like(batch.text.mask_BT)
    words[0, 1] = True
    later = ids.clone()
    later[:, 2:] = (later[:, 2:] + 1) % 30
    before, after = (one_pass(model, batch, i, words).word_logits for i in (ids, later))
    assert not torch.allclose(before["encoder"], after["encoder"])
    assert torch.equal(before["decoder"], after["decoder"])


def test_cross_modal_matching_equals_its_definition(tiny, make_batch):
    """Each sentence with its own image, then with the image before it, unless that is the same image."""
    model = tiny(ism_source="cross_modal")
    batch = dataclasses.replace(make_batch(4), image_ids=("x", "x", "y", "z"))
    ism = losses(model, batch, ["ism"], probability=0.0)["ism"]
    state, own = model.encode_image(batch.image), torch.arange(4)
    logits = model.score(state, batch.text, own)
    others = model.score(state, batch.text, own.roll(1))[[0, 2, 3]]
    expected = [torch.nn.functional.softplus(-s) for s in logits] + [torch.nn.functional.softplus(s) for s in others]
    torch.testing.assert_close(ism.mean, torch.stack(expected).mean())
    one = losses(model, make_batch(1), ["ism"])["ism"]
    assert one.mean.item() == 0.0


@pytest.mark.parametrize("name", ALL)
def test_single_objective_reaches_its_own_modules(tiny, batch, name):
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


@pytest.mark.parametrize("residual", [False, True])
def test_predictions_do_not_depend_on_masked_words_and_regions(tiny, batch, residual):
    """Another masked word or hidden feature changes the targets of MLM, MOC and ISM, not their outputs."""
    model = tiny(ism_residual=residual)
    generator = torch.Generator().manual_seed(0)
    words = torch.zeros_like(batch.text.mask_BT)
    regions = torch.zeros_like(batch.image.mask_BR)
    words[:, 1], regions[:, 0] = True, True

    def outputs(ids, features):
        seen = dataclasses.replace(batch, image=dataclasses.replace(batch.image, features_BRF=features))
        done = one_pass(model, seen, ids.masked_fill(words, model.config.mask_id), words, regions)
        visual = model.encode_image(seen.image, regions)
        return done.word_logits["encoder"], done.output.logits_MV, done.losses["moc"].mean, model.pool_image(visual)

    ids, features = batch.text.ids_BT.clone(), batch.image.features_BRF.clone()
    before = outputs(ids, features)
    ids[:, 1] = 29
    features[:, 0] = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(before, outputs(ids, features), strict=True))


def test_residual_of_matching_adds_the_mean_region_past_the_object_encoder(tiny, batch):
    model = tiny(ism_residual=True)
    visual = model.encode_image(batch.image)
    states_BSD = visual.packing.pad(visual.last_KD)
    scores_BS = model.image_poolers[0].score(states_BSD)[..., 0].masked_fill(~visual.packing.mask_BT, -torch.inf)
    pooled_BP = model.image_poolers[0].project((scores_BS.softmax(1)[..., None] * states_BSD).sum(1))
    mean_BF = torch.stack([f[m].mean(0) for f, m in zip(batch.image.features_BRF, batch.image.mask_BR, strict=True)])
    expected = torch.nn.functional.normalize(pooled_BP + model.residual(mean_BF), dim=-1)
    torch.testing.assert_close(model.embed_image(batch.image), expected)


def test_each_sample_trains_its_objectives(tiny, batch):
    """A loss over some samples equals that of a batch of those alone, and depends on nothing else."""
    model, whole = tiny(), losses(tiny(), batch, probability=0.5)
    only = torch.tensor([True, False, True, False])
    asked = losses(model, batch, dict.fromkeys(ALL, only), probability=0.5)
    corruption = model.corrupt(
        batch, objectives=dict.fromkeys(ALL), generator=torch.Generator().manual_seed(0), mask_probability=0.5
    )
    rows = only.nonzero().squeeze(1)
    part = Corruption(**{name: value[rows] for name, value in vars(corruption).items()})
    alone = batch.select(rows)
    expected = model.masked_pass(alone, part, model.encode_corrupted(alone, part), dict.fromkeys(ALL)).losses
    for name in ALL:
        torch.testing.assert_close(asked[name].mean, expected[name].mean, rtol=0, atol=1e-12, msg=name)
        assert not torch.isclose(asked[name].mean, whole[name].mean), name

    mixed = losses(model, batch, {"mlm": only, "msg": ~only}, probability=0.5)
    assert set(mixed) == {"mlm", "msg"}
    seen = Corruption(ids_BT=part.ids_BT, words_BT=part.words_BT)  # no row trains on regions, so none is masked
    expected = model.masked_pass(alone, seen, model.encode_corrupted(alone, seen), {"mlm": None}).losses
    torch.testing.assert_close(mixed["mlm"].mean, expected["mlm"].mean, rtol=0, atol=1e-12)
    empty = losses(model, batch, dict.fromkeys(ALL, only & False), probability=0.5)
    assert all(loss.mean.item() == 0.0 for loss in empty.values())


def test_cut_sentence_has_no_end_to_predict(tiny, batch):
    """Its [SEP] replaces a word and is no target; the other words are."""
    model, text = tiny(), batch.text
    cut = torch.tensor([True, False, False, False])
    shorter = dataclasses.replace(batch, text=dataclasses.replace(text, cut_B=cut))
    whole, less = (losses(model, b, ["msg"], probability=0.0)["msg"] for b in (batch, shorter))
    assert float(whole.count) - float(less.count) == 1
    logits = model.generation_logits(batch.image, text).log_softmax(-1)
    length = int(text.mask_BT[0].sum())
    end = -logits[0, length - 2, text.ids_BT[0, length - 1]]
    torch.testing.assert_close(whole.sum - less.sum, end)


def test_image_without_regions_is_no_target_of_moc(tiny, batch):
    """`collate_regions` gives it one region of zeros, which has no class."""
    image = batch.image
    hollow = {name: getattr(image, name).clone() for name in ("features_BRF", "boxes_BR4", "class_probs_BRC")}
    for tensor in hollow.values():
        tensor[1] = 0
    mask = image.mask_BR.clone()
    mask[1] = torch.arange(mask.shape[1]) == 0
    with_hollow = dataclasses.replace(batch, image=dataclasses.replace(image, **hollow, mask_BR=mask))
    others = torch.tensor([0, 2, 3])
    model = tiny()
    found = losses(model, with_hollow, ["moc"], probability=1.0)["moc"]
    alone = losses(model, batch.select(others), ["moc"], probability=1.0)["moc"]
    assert float(found.count) == float(alone.count) == float(image.mask_BR[others].sum())
    torch.testing.assert_close(found.mean, alone.mean)


@pytest.mark.parametrize("source", ["unimodal", "cross_modal"])
def test_a_batch_of_one_is_no_error_where_what_reads_words_is_frozen(tiny, make_batch, source):
    model = tiny(ism_source=source)
    for module in (model.text_embedding, model.sentence_encoder):
        module.requires_grad_(False)
    loss = losses(model, make_batch(1), ["ism"])["ism"].mean
    loss.backward()
    assert loss.item() == 0.0


def test_blank_images_train(tiny, batch):
    """The text-only control: gradients stay of ordinary size."""
    model = tiny(init_std=0.02)
    blank = dataclasses.replace(batch, image=batch.image.blanked())
    model.fuse(blank.image, blank.text).pooled_BP.square().sum().backward()
    assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) < 1e3
