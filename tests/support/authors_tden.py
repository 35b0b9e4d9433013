"""The outputs of our model on the weights and inputs that TDEN's authors' code was run on (authors_tden_inputs.py).

tests/golden/authors_tden.json has the outputs of that code.

Shape suffixes: N pairs, R regions, T text tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from authors_tden_inputs import (
    BEAMS,
    BOS,
    CAPTIONED,
    CAPTIONS,
    CHOICES,
    CONFIG,
    CORRUPTING,
    DRAWN,
    EOS,
    FACTS,
    GALLERY,
    HEADS,
    MARGIN,
    MOST,
    NEGATIVES,
    QUERIES,
    REWARDS,
    SCENES,
    SIZES,
    SMALL,
    SMOOTHING,
    Numbers,
    as_text,
    built,
    chance,
    choices,
    drawn,
    pairs,
    regions,
    scores,
    task_model,
    weight,
    words,
)
from bert_shapes import Shapes, bert_shapes
from public_tden import PUBLIC
from torch import Tensor, nn

from vlp_models.contrib.public_weights.tden import convert_bert
from vlp_models.data.batch import Batch
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.retrieval import rank, score_ranks
from vlp_models.models import build_model
from vlp_models.models.convert import ImportedModel
from vlp_models.models.decoding.search import beam_search, greedy
from vlp_models.models.layers.attention import causal_mask, padding_mask
from vlp_models.models.layers.packing import Packing
from vlp_models.models.tden.model import GENERATION, TDEN
from vlp_models.objectives.generation import self_critical, sentence_generation
from vlp_models.objectives.matching import image_sentence_matching
from vlp_models.params import ObjectiveParams, RecipeParams, ScheduledSamplingParams
from vlp_models.training.scheduled_sampling import make_loss


def gradients(model: nn.Module) -> Numbers:
    return {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def pretraining(found: ImportedModel, dtype: torch.dtype) -> Numbers:
    """Corruption, states, logits; losses of two passes over a batch, their gradients, and the poolers' statistics."""
    model, batch = built(found, dtype, **CORRUPTING).train(), pairs(dtype)
    everything = {name: ObjectiveParams() for name in model.objectives}
    seen: list[Any] = []
    corrupt, masked_pass = model.corrupt, model.masked_pass

    def spy_corrupt(*given: Any, **named: Any) -> Any:
        with chance((*batch.text.ids_BT.shape, batch.image.mask_BR.shape[1])):
            seen.append(corrupt(*given, **named))
        return seen[0]

    def spy_pass(*given: Any, **named: Any) -> Any:
        seen.append(given)
        return masked_pass(*given, **named)

    model.corrupt, model.masked_pass = spy_corrupt, spy_pass  # type: ignore[assignment]
    loss = make_loss(
        model, RecipeParams(objectives=everything), ScheduledSamplingParams(scheme="a", sample="argmax"), name="tden"
    )
    total = loss(batch, update=0, generator=torch.Generator())
    total.mean.backward()  # type: ignore[union-attr]
    del model.corrupt, model.masked_pass
    corruption, read = seen[0], seen[2][4]
    numbers = {f"loss of {name}": one.mean for name, one in total.losses.items()}  # type: ignore[union-attr]
    numbers |= {"total": total.mean, **gradients(model)}
    numbers |= {f"statistics {n}": b for n, b in model.named_buffers() if "running" in n}
    numbers |= {"ids": corruption.ids_BT, "hidden regions": corruption.hidden_BR}
    numbers |= {"second ids": read["encoder"], "second ids of the decoder": read["decoder"]}

    model = built(found, dtype, **CORRUPTING)
    with torch.no_grad():
        embedded, _ = model.region_embedding(batch.image, corruption.hidden_BR)
        visual, packing = model.encode_corrupted(batch, corruption), Packing.of(batch.text.mask_BT)
        states = [model.encode_text(corruption.ids_BT, packing, stream) for stream in (0, GENERATION)]
        text, crossed = model.cross_encode(states[0], packing, visual)
        memory = model.project_memory(*model.decoder_input(visual, None, (crossed[-1], visual.packing)))
        decoded = model.decode(states[1], packing, memory)
        ids, positions = packing.pack(corruption.ids_BT), packing.positions_M
        for stream, name in enumerate(("understanding", "generation")):
            types = torch.full_like(ids, stream)
            numbers[f"{name}.embedding"] = model.text_embedding(ids, types, positions)
            numbers[f"{name}.states"] = states[stream]
        numbers["regions.embedding"] = embedded
        numbers |= {f"objects.{i}": x for i, x in enumerate(visual.layers)}
        numbers |= {f"crossed.regions.{i}": x for i, x in enumerate(crossed)}
        numbers |= {"crossed.words": text, "decoded": decoded}
        numbers |= {"mlm.logits": model.predict_words(text), "msg.logits": model.predict_words(decoded)}
        assert model.object_head is not None
        numbers["moc.logits"] = model.object_head(crossed[-1])
        numbers |= {"evaluated.image": model.pool_image(visual), "evaluated.text": model.pool_text(states[0], packing)}
        trained = copy.deepcopy(model).train()
        numbers["similarity"] = trained.pool_text(states[0], packing) @ trained.pool_image(visual).T
    return numbers


def retrieval(found: ImportedModel, dtype: torch.dtype) -> Numbers:
    batch, numbers = pairs(dtype, "query"), dict[str, Tensor]()
    for negatives in NEGATIVES:
        task = task_model(found, "retrieval", dtype, {"negatives": negatives, "margin": MARGIN}).train()
        loss = task.loss(batch, generator=torch.Generator()).mean
        # There, of the hardest ones, the sum of the pairs' losses
        numbers[f"loss of {negatives}"] = loss * len(batch) if negatives == "hardest" else loss
    numbers["loss of hardest"].backward()
    numbers |= gradients(task.model)
    model, names = built(found, dtype), tuple(f"i{i}" for i in range(GALLERY))
    with torch.no_grad():
        numbers |= {"image": model.embed_image(batch.image), "text": model.embed_text(batch.text)}
        gallery = model.embed_image(regions(names, dtype))
        queries = model.embed_text(as_text([[BOS, *words(f"query {i}", 2 + i % 5), EOS] for i in range(QUERIES)]))
    numbers["scores"] = queries @ gallery.T
    owners = [names[i % GALLERY] for i in range(QUERIES)]
    ranked = rank(names, gallery.float().numpy(), owners, queries.float().numpy())
    found_at = score_ranks(ranked.text_ranks_T, owners, GALLERY)[:3]
    return {**numbers, "recall": torch.tensor([score.value for score in found_at])}


def vqa(found: ImportedModel, dtype: torch.dtype) -> Numbers:
    task: Any = task_model(found, "vqa", dtype)
    batch = dataclasses.replace(pairs(dtype, "question"), targets=scores().to(dtype))
    loss = task.loss(batch, generator=torch.Generator()).mean
    loss.backward()
    with torch.no_grad():
        fused, decoder = task.logits(batch)
        answers = task.probabilities(batch).argmax(-1)
    return {"fused": fused, "decoder": decoder, "loss": loss, "answers": answers, **gradients(task)}


def vcr(found: ImportedModel, dtype: torch.dtype) -> Numbers:
    """With a type of its own for the last segment, and without."""
    rows, types = choices()
    text = as_text(rows, last_segment_BT=as_text(types).ids_BT > 0, owner_N=torch.arange(8) // 4)
    batch = Batch(
        sample_ids=CHOICES,
        image_ids=CHOICES,
        image=regions(CHOICES, dtype),
        text=text,
        targets=torch.tensor([[2, -1], [0, -1]]),
    )
    numbers: Numbers = {}
    for typed, name in ((True, "typed"), (False, "untyped")):
        task: Any = task_model(found, "vcr", dtype, {"subtask": "answer"}, segment_types=typed)
        loss = task.loss(batch, generator=torch.Generator()).mean
        numbers |= {f"{name}.logits": task.logits(batch)[0], f"{name}.loss": loss}
        if typed:
            loss.backward()
            numbers |= gradients(task)
    return numbers


def captioning(found: ImportedModel, dtype: torch.dtype) -> Numbers:
    """Return cross-entropy, plain and smoothed; the self-critical loss of samples; greedy and beam search."""
    model, image = built(found, dtype), regions(CAPTIONED, dtype)
    rows = [[BOS, *words(f"told {i}", length), EOS][: MOST + 1] for i, length in enumerate(CAPTIONS)]  # plain-ok
    text = as_text(rows, owner_N=torch.arange(6) // 3)
    at = text.has_next_BT
    logits, targets = model.generation_logits(image, text, at), text.next_tokens(at)
    size = SIZES["vocab"]
    # There the rest of the probability goes to the other words; here to all. And KL has the entropy of the targets.
    smoothed = sentence_generation(logits, targets, label_smoothing=SMOOTHING * size / (size - 1)).mean
    entropy = (1 - SMOOTHING) * math.log(1 - SMOOTHING) + SMOOTHING * math.log(SMOOTHING / (size - 1))
    numbers = {"logits": logits, "loss": sentence_generation(logits, targets).mean, "smoothed": smoothed + entropy}
    smoothed.backward()
    numbers |= gradients(model)

    model.zero_grad()
    sampled = as_text([[BOS, *row] for row in DRAWN], owner_N=torch.arange(4) // 2)
    at = sampled.has_next_BT
    advantage = torch.tensor(REWARDS, dtype=dtype)[:, None].expand_as(at)[at]
    reward = self_critical(model.generation_logits(image, sampled, at), sampled.next_tokens(at), advantage).mean
    reward.backward()
    numbers |= {"reward": reward, **{f"gradient of reward {n[9:]}": g for n, g in gradients(model).items()}}

    ends = {"max_len": MOST, "bos_id": BOS, "eos_id": EOS}
    everything = regions(tuple(SCENES), dtype)
    for name, hypotheses in (
        ("greedy", greedy(model, everything, **ends)),
        ("beams", beam_search(model, everything, beam_size=BEAMS, **ends)),
    ):
        ids = [[*h.ids, *[EOS] * (MOST - len(h.ids))] for h in hypotheses]
        numbers |= {f"{name}.ids": torch.tensor(ids), f"{name}.score": torch.tensor([h.score for h in hypotheses])}
    return numbers


def reward_words() -> tuple[list[list[list[str]]], list[list[str]]]:
    """Return references of images (the last is in no corpus) and candidates of three images."""
    images = [[_make_words(f"reference {i} {k}", 4 + (i + 2 * k) % 7) for k in range(3)] for i in range(6)]
    candidates = [images[0][0][:5], _make_words("candidate 1", 6), images[5][1] + images[5][0][:3]]
    return images, candidates


def _make_words(name: str, length: int) -> list[str]:
    return [f"w{(word * word) % 6}" for word in words(name, length)]


def rewards() -> Numbers:
    """CIDEr-D of three candidates, the last of an image outside the corpus."""
    images, candidates = reward_words()
    scorer = CiderD(DocumentFrequencies.count(images[:5]), lambda name: images[int(name)])
    return {"cider_d": torch.tensor([scorer.score(n, [c])[0] for n, c in zip("015", candidates, strict=True)])}


def similarities(dtype: torch.dtype) -> tuple[Tensor, tuple[str, ...]]:
    """Return the scores of eight pairs, texts by images; two pairs show one image."""
    vectors = F.normalize(drawn("similarities", 2, 8, 5).to(dtype), dim=-1)
    return vectors[0] @ vectors[1].T, ("a", "b", "c", "a", "d", "e", "f", "g")


def matching(dtype: torch.dtype) -> Numbers:
    """The triplet loss by itself, at the margins of both repositories."""
    similarity, names = similarities(dtype)
    same = torch.tensor([[one == other for other in names] for one in names])
    return {
        f"{negatives} {margin}": image_sentence_matching(similarity, same, margin=margin, negatives=negatives).mean
        for margin in (0.2, 0.5)
        for negatives in NEGATIVES
    }


# ---- The release's BERT, its one model file ---------------------------------------------------------------------

BERT_LAYERS = 3


def bert_layout() -> Shapes:
    sizes = {name: SIZES[name] for name in ("vocab", "positions", "hidden", "intermediate")}
    return bert_shapes(**sizes, types=2, layers=BERT_LAYERS)


def bert(dtype: torch.dtype) -> Numbers:
    """Read both ways, and from left to right; the head is tied to the words."""
    config = {**CONFIG, **dict.fromkeys(PUBLIC), "embedding_norm_eps": 1e-12, "dropout": 0.0, "attention_dropout": 0.0}
    model = build_model("tden", {name: value for name, value in config.items() if value is not None}, FACTS)
    assert isinstance(model, TDEN)
    sizes = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 24, "type_vocab_size": 2}
    state = {name: weight(name, shape) for name, shape in bert_layout().items()}
    converted = convert_bert(state, {**sizes, "hidden_act": "gelu", "layer_norm_eps": 1e-12}, model.config)
    model.load_state_dict(dict(converted.weights), strict=False)
    model = model.eval().to(dtype)
    text = pairs(dtype).text
    packing, numbers = Packing.of(text.mask_BT), dict[str, Tensor]()
    with torch.no_grad():
        x = model.text_embedding(packing.pack(text.ids_BT), torch.zeros_like(packing.places_M), packing.positions_M)
        numbers["embedding"] = x
        length = text.ids_BT.shape[1]
        for name, mask in (("both", padding_mask(text.mask_BT)), ("past", causal_mask(length, x.device))):
            states = x
            for block in model.sentence_encoder:
                states = block(states, mask, packing)
            numbers |= {f"{name}.states": states, f"{name}.logits": model.predict_words(states)}
    return numbers


def recorded(name: str, tensor: Tensor) -> Tensor:
    """What is kept of an output: all of a small one; of a larger one each row, and of a gradient the whole, times a
    fixed direction: every number counts, and few need be kept."""
    tensor = tensor.detach().double()
    if name.startswith(("gradient", "statistics")):
        flat = tensor.reshape(-1)
        return flat @ drawn(f"direction {name}", len(flat)).double()
    if tensor.numel() <= SMALL or not tensor.dim() or "ids" in name:
        return tensor
    length = tensor.shape[-1]
    return tensor @ drawn(f"direction {name}", length).double() / math.sqrt(length)
