"""Weights and inputs on which TDEN's public code was run, made again, and what ours computes of them.

tests/golden/authors_tden.json has what that code computed, and the checksums of its checkpoints' names and shapes. A
weight's values follow from its name, an input's from its place: NumPy's `RandomState`, whose streams stay as they are.

Shape suffixes: N pairs, R regions, T text tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from public_tden import PUBLIC, public_layout, public_task_layout
from torch import Tensor, nn

from vlp_models.data.batch import Batch, Regions, Text
from vlp_models.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from vlp_models.decoding.beam import beam_search
from vlp_models.decoding.greedy import greedy
from vlp_models.metrics.cider_d import CiderD, DocumentFrequencies
from vlp_models.metrics.retrieval import rank, score_ranks
from vlp_models.models import DataFacts, build_model
from vlp_models.models.foreign import Asked, Imported
from vlp_models.models.info import CheckpointInfo
from vlp_models.models.layers.masks import causal_mask, padding_mask
from vlp_models.models.layers.packing import Packing
from vlp_models.models.tden.convert_bert import convert_bert
from vlp_models.models.tden.model import GENERATION, TDEN
from vlp_models.models.tden.public.convert import read_xmodaler
from vlp_models.objectives import masking
from vlp_models.objectives.ism import image_sentence_matching
from vlp_models.objectives.msg import sentence_generation
from vlp_models.objectives.self_critical import self_critical
from vlp_models.params import ObjectiveParams, PassesParams, RecipeParams, to_plain
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel
from vlp_models.training.passes import make_loss

HEADS, BOS, EOS, MASK = 3, 2, 3, 4
SIZES: dict[str, int] = {"hidden": 24, "heads": HEADS, "intermediate": 40, "sentence": 3, "object": 2, "encoder": 2}
SIZES |= {"decoder": 2, "similarity": 16, "fusion": 32, "vocab": 41, "positions": 24, "features": 6, "classes": 7}
SIZES |= {"answers": 9}
FACTS = DataFacts(vocab_size=41, mask_id=MASK, feature_dim=6, num_classes=7)
CONFIG: dict[str, Any] = {
    **PUBLIC,
    "hidden": 24,
    "heads": HEADS,
    "intermediate": 40,
    "object_layers": 2,
    "sentence_layers": 3,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "similarity_dim": 16,
    "max_positions": 24,
}
KINDS = ("pretraining", "captioning", "retrieval", "vqa", "vcr")  # of checkpoints
# What pretraining there corrupts and matches as no file tells
CORRUPTING = {"mask_scheme": "bert", "zero_overlapping_regions": True, "ism_negatives": "hardest"}

SCENES = {"a": (640, 427, 5), "b": (300, 500, 7), "c": (480, 480, 1), "d": (500, 333, 4)}  # width, height, regions
PAIRS = ("a", "b", "a", "c", "d")  # one image comes twice
LENGTHS = (10, 6, 8, 5, 4)
# Of each word, and of each region, what chance decides: masked, replaced by `REPLACEMENT`, kept but predicted, left
WORDS = ("mm.r.k..", ".m..", "m..kr.", "..m", "..")
REGIONS = ("m....", "..m..m.", "...m.", "m", "....")
REPLACEMENT = 11
CAPTIONED = ("a", "b")  # three captions each
CAPTIONS = (3, 8, 11, 5, 9, 1)  # words; `MOST` tokens are read, and predicted
MOST, BEAMS = 10, 3
DRAWN = ((7, 20, 3), (9, 8, 30, 12, 5, 6, 39, 15, 16, 17), (3,), (22, 7, 7, 9, 3))  # two of each image
REWARDS = (0.7, -0.4, 0.25, -1.1)
CHOICES = ("b", "d")  # images of questions with four answers each
SEGMENTS = ((4, 6, 3, 5, 5, 4, 8, 4), (4, 2, 7, 3, 1, 6, 2, 5))  # tokens before the last segment, and in it
GALLERY, QUERIES = 12, 120
SMOOTHING, MARGIN = 0.1, 0.2
SMALL = 40  # numbers of an output that are kept as they are
NOTHING = 1e-6  # a gradient this small is none: what a softmax does not see, and rounding

NEGATIVES: tuple[Literal["all", "hardest"], ...] = ("all", "hardest")

Numbers = dict[str, Tensor]


def drawn(name: str, *shape: int) -> Tensor:
    """N(0, 1), float32."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)).float()


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """One tensor of a checkpoint, of a scale that lets every path matter."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    values = drawn("predictor.bias" if name == "predictor.decoder.bias" else name, *shape)  # one there
    last = name.rpartition(".")[2]
    if last == "running_var":
        return (0.2 * values).exp()
    if last in ("bias", "running_mean"):
        values = 0.2 * values
        if name in ("predictor.bias", "predictor.decoder.bias"):
            values[EOS] += 1.5  # so that some captions end
        return values
    if len(shape) == 1:
        return 1 + 0.2 * values
    if name.endswith((".output.dense.weight", "_output.dense.weight")):
        return 0.45 * values / math.sqrt(shape[1])  # so that a state tells its own word from the others
    if name in ("token_embed.embeddings.weight", "bert.embeddings.word_embeddings.weight"):
        return (2.1 if name.startswith("token") else 0.7) * values
    if "position_embeddings" in name or "token_type" in name:
        return 0.7 * values
    return 1.5 * values / math.sqrt(shape[1])


def layout(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint, one of `KINDS`, as documented (public_tden.py)."""
    if kind in ("vqa", "vcr"):
        vcr = {"use_decoder_in_fusion": False, "segment_types": True, "fusion_dim": 32} if kind == "vcr" else {}
        model = build_model("tden", {**CONFIG, **vcr}, FACTS)
        linear = nn.Linear(24, SIZES["answers"]), nn.Linear(24, SIZES["answers"])
        head = nn.Linear(32, 1) if kind == "vcr" else nn.ModuleDict({"fused": linear[0], "decoder": linear[1]})
        assert isinstance(model, TDEN)
        state = public_task_layout(model, head)
    else:
        model = build_model("tden", CONFIG, FACTS)
        assert isinstance(model, TDEN)
        state = public_layout(model)
        common = ("token_embed.", "visual_embed.", "encoder.")
        own = {"captioning": ("decoder.g_layers.", "predictor."), "retrieval": ("similarity_predictor.",)}.get(kind)
        if own:
            state = {name: tensor for name, tensor in state.items() if name.startswith((*common, *own))}
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def checksum(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return zlib.crc32("\n".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())).encode())


def checkpoint(kind: str) -> dict[str, Tensor]:
    return {name: weight(name, shape) for name, shape in layout(kind).items()}


def imported(kind: str, folder: Path) -> Imported:
    """By way of a file, laid out as that code's own checkpointer does."""
    whole = {"model": checkpoint(kind), "optimizer": {"state": {}}, "scheduler": {}, "iteration": 5}
    torch.save(whole, folder / f"{kind}.pth")
    return read_xmodaler(folder / f"{kind}.pth", Asked(facts=FACTS, config={}, heads=HEADS))


def built(found: Imported, dtype: torch.dtype = torch.float32, **config: Any) -> TDEN:
    torch.manual_seed(0)
    own = {name: value for name, value in found.config.items() if name != "vocab_size"}
    config = {**own, "dropout": 0.0, "attention_dropout": 0.0, **config}
    model = build_model("tden", config, FACTS)
    assert isinstance(model, TDEN)
    assert not model.load_state_dict(dict(found.weights), strict=False).unexpected_keys
    return model.eval().to(dtype)


def task_model(found: Imported, task: str, dtype: torch.dtype, options: Any = None, **config: Any) -> TaskModel:
    """The task on these weights, its classifier's included."""
    model = built(found, dtype, **config)
    vocabulary = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(FACTS.vocab_size - len(SPECIAL_TOKENS)))]
    plain = to_plain(model.config)
    info = CheckpointInfo(
        family="tden", name="tden", model_config=plain, task=task, max_text_len=24, options=options or {}
    )
    labels = [f"a{i}" for i in range(SIZES["answers"])] if task == "vqa" else []
    made = task_class(task)(model, Tokenizer(vocabulary, lowercase=True), info, labels=labels)
    if found.head:
        made.head.load_state_dict(dict(found.head))
    return made.eval().to(dtype)


# ---- Inputs ------------------------------------------------------------------------------------------------------


def scene(name: str) -> dict[str, np.ndarray]:
    """As a detector's file has it: boxes in pixels. The second box lies over the first, in part."""
    width, height, regions = SCENES.get(name, (320, 240, 2))
    corners = np.random.RandomState(zlib.crc32(f"boxes {name}".encode())).uniform(0, 1, (regions, 2, 2))
    low, high = corners.min(1), corners.max(1)
    boxes = np.concatenate([0.7 * low, 0.7 * low + 0.1 + 0.2 * (high - low)], 1)
    boxes[1:2] = boxes[:1] + 0.02
    boxes = (boxes * [width, height, width, height]).round(1)
    return {
        "features": drawn(f"features {name}", regions, SIZES["features"]).numpy(),
        "cls_prob": (1.5 * drawn(f"classes {name}", regions, SIZES["classes"])).softmax(-1).numpy(),
        "boxes": boxes.astype(np.float32),
        "image_w": np.array([width]),
        "image_h": np.array([height]),
    }


def words(name: str, length: int) -> list[int]:
    """Ids of words, no special ones."""
    return (5 + (drawn(name, length).abs() * 1e4).long() % 36).tolist()


def regions(names: tuple[str, ...], dtype: torch.dtype) -> Regions:
    scenes = [scene(name) for name in names]

    def padded(key: str) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.from_numpy(one[key]) for one in scenes], True).to(dtype)

    sides = torch.tensor([[int(one["image_w"][0]), int(one["image_h"][0])] * 2 for one in scenes], dtype=dtype)
    counts = torch.tensor([len(one["boxes"]) for one in scenes])
    return Regions(
        features_BRF=padded("features"),
        boxes_BR4=padded("boxes") / sides[:, None],
        class_probs_BRC=padded("cls_prob"),
        mask_BR=torch.arange(int(counts.max())) < counts[:, None],
    )


def as_text(rows: list[list[int]], **more: Any) -> Text:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True)
    return Text(ids_BT=ids, mask_BT=torch.arange(ids.shape[1]) < torch.tensor([[len(r)] for r in rows]), **more)


def captions(kind: str) -> list[list[int]]:
    """[CLS] words [SEP] of each pair."""
    return [[BOS, *words(f"{kind} {i}", length - 2), EOS] for i, length in enumerate(LENGTHS)]


def pairs(dtype: torch.dtype, kind: str = "caption") -> Batch:
    return Batch(
        sample_ids=tuple(f"s/{i}" for i in range(len(PAIRS))),
        image_ids=PAIRS,
        image=regions(PAIRS, dtype),
        text=as_text(captions(kind)),
    )


def scores() -> Tensor:
    """Of the answers to five questions. [N, A]"""
    found = torch.zeros(len(PAIRS), SIZES["answers"])
    found[0, 3], found[0, 7], found[1, 1], found[2, 8], found[3, 0] = 1.0, 0.3, 0.6, 0.9, 0.3
    return found


def choices() -> tuple[list[list[int]], list[list[int]]]:
    """Ids and types of texts in two segments, four a question."""
    rows = [
        [BOS, *words(f"first {i}", first - 2), EOS, *words(f"last {i}", last - 1), EOS]
        for i, (first, last) in enumerate(zip(*SEGMENTS, strict=True))
    ]
    return rows, [[0] * first + [1] * last for first, last in zip(*SEGMENTS, strict=True)]


@contextmanager
def chance(shape: tuple[int, int, int]) -> Iterator[None]:
    """`corrupt` draws what `WORDS` and `REGIONS` say. shape: N, T and R."""
    count, tokens, regions = shape
    selected, action, hidden = torch.ones(count, tokens), torch.zeros(count, tokens), torch.ones(count, regions)
    for row in range(count):
        for place, fate in enumerate(WORDS[row], 1):
            selected[row, place] = float(fate == ".")
            action[row, place] = {"k": 0.85, "r": 0.95}.get(fate, 0.0)
        for place, fate in enumerate(REGIONS[row]):
            hidden[row, place] = float(fate == ".")
    answers = iter([selected, action, hidden])
    before = masking.draw_uniform, masking.own_share_of
    masking.draw_uniform = lambda *_: next(answers)
    masking.own_share_of = lambda size, _: torch.full(size, REPLACEMENT)
    try:
        yield
    finally:
        masking.draw_uniform, masking.own_share_of = before


# ---- What ours computes ------------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> Numbers:
    return {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def pretraining(found: Imported, dtype: torch.dtype) -> Numbers:
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
    loss = make_loss(model, RecipeParams(objectives=everything), PassesParams(scheme="a", sample="argmax"), name="tden")
    learnt = loss(batch, update=0, generator=torch.Generator())
    learnt.mean.backward()  # type: ignore[union-attr]
    del model.corrupt, model.masked_pass
    corruption, read = seen[0], seen[2][4]
    numbers = {f"loss of {name}": one.mean for name, one in learnt.losses.items()}  # type: ignore[union-attr]
    numbers |= {"total": learnt.mean, **gradients(model)}
    numbers |= {f"statistics {n}": b for n, b in model.named_buffers() if "running" in n}
    numbers |= {"ids": corruption.ids_BT, "hidden regions": corruption.hidden_BR}
    numbers |= {"second ids": read["encoder"], "second ids of the decoder": read["decoder"]}

    model = built(found, dtype, **CORRUPTING)
    with torch.no_grad():
        embedded, _ = model.region_embedding(batch.image, corruption.hidden_BR)
        visual, packing = model.encode_corrupted(batch, corruption), Packing.of(batch.text.mask_BT)
        states = [model.encode_text(corruption.ids_BT, packing, stream) for stream in (0, GENERATION)]
        text, crossed = model.cross_encode(states[0], packing, visual)
        memory = model.remember(*model.decoder_reads(visual, None, (crossed[-1], visual.packing)))
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


def retrieval(found: Imported, dtype: torch.dtype) -> Numbers:
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


def vqa(found: Imported, dtype: torch.dtype) -> Numbers:
    task: Any = task_model(found, "vqa", dtype)
    batch = dataclasses.replace(pairs(dtype, "question"), targets=scores().to(dtype))
    loss = task.loss(batch, generator=torch.Generator()).mean
    loss.backward()
    with torch.no_grad():
        fused, decoder = task.logits(batch)
        answers = task.probabilities(batch).argmax(-1)
    return {"fused": fused, "decoder": decoder, "loss": loss, "answers": answers, **gradients(task)}


def vcr(found: Imported, dtype: torch.dtype) -> Numbers:
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


def captioning(found: Imported, dtype: torch.dtype) -> Numbers:
    """Cross-entropy, plain and smoothed; what is drawn, learnt from a reward; greedy and beam search."""
    model, image = built(found, dtype), regions(CAPTIONED, dtype)
    rows = [[BOS, *words(f"told {i}", length), EOS][: MOST + 1] for i, length in enumerate(CAPTIONS)]
    text = as_text(rows, owner_N=torch.arange(6) // 3)
    at = text.followed_BT
    logits, targets = model.generation_logits(image, text, at), text.following(at)
    size = SIZES["vocab"]
    # There the rest of the probability goes to the other words; here to all. And KL has the entropy of the targets.
    smoothed = sentence_generation(logits, targets, label_smoothing=SMOOTHING * size / (size - 1)).mean
    entropy = (1 - SMOOTHING) * math.log(1 - SMOOTHING) + SMOOTHING * math.log(SMOOTHING / (size - 1))
    numbers = {"logits": logits, "loss": sentence_generation(logits, targets).mean, "smoothed": smoothed + entropy}
    smoothed.backward()
    numbers |= gradients(model)

    model.zero_grad()
    told = as_text([[BOS, *row] for row in DRAWN], owner_N=torch.arange(4) // 2)
    at = told.followed_BT
    advantage = torch.tensor(REWARDS, dtype=dtype)[:, None].expand_as(at)[at]
    reward = self_critical(model.generation_logits(image, told, at), told.following(at), advantage).mean
    reward.backward()
    numbers |= {"reward": reward, **{f"gradient of reward {n[9:]}": g for n, g in gradients(model).items()}}

    ends = {"max_len": MOST, "bos_id": BOS, "eos_id": EOS}
    everything = regions(tuple(SCENES), dtype)
    for name, told_of in (
        ("greedy", greedy(model, everything, **ends)),
        ("beams", beam_search(model, everything, beam_size=BEAMS, **ends)),
    ):
        ids = [[*h.ids, *[EOS] * (MOST - len(h.ids))] for h in told_of]
        numbers |= {f"{name}.ids": torch.tensor(ids), f"{name}.score": torch.tensor([h.score for h in told_of])}
    return numbers


def reward_words() -> tuple[list[list[list[str]]], list[list[str]]]:
    """References of images, the last of which is in no corpus, and candidates of three images."""
    images = [[_said(f"reference {i} {k}", 4 + (i + 2 * k) % 7) for k in range(3)] for i in range(6)]
    candidates = [images[0][0][:5], _said("candidate 1", 6), images[5][1] + images[5][0][:3]]
    return images, candidates


def _said(name: str, length: int) -> list[str]:
    return [f"w{(word * word) % 6}" for word in words(name, length)]


def rewards() -> Numbers:
    """CIDEr-D of three candidates, the last of an image outside the corpus."""
    images, candidates = reward_words()
    scorer = CiderD(DocumentFrequencies.of(images[:5]), lambda name: images[int(name)])
    return {"cider_d": torch.tensor([scorer.score(n, [c])[0] for n, c in zip("015", candidates, strict=True)])}


def similarities(dtype: torch.dtype) -> tuple[Tensor, tuple[str, ...]]:
    """Of eight pairs, texts by images, two of which show one image."""
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


def bert_layout() -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = SIZES["hidden"], SIZES["intermediate"], SIZES["vocab"]
    found: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        found.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    def norm(name: str) -> None:
        found.update({f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)})

    found["bert.embeddings.word_embeddings.weight"] = (vocab, hidden)
    found["bert.embeddings.position_embeddings.weight"] = (SIZES["positions"], hidden)
    found["bert.embeddings.token_type_embeddings.weight"] = (2, hidden)
    norm("bert.embeddings.LayerNorm")
    for i in range(BERT_LAYERS):
        layer = f"bert.encoder.layer.{i}"
        for name in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{name}", hidden, hidden)
        linear(f"{layer}.attention.output.dense", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", inner, hidden)
        linear(f"{layer}.output.dense", hidden, inner)
        norm(f"{layer}.output.LayerNorm")
    linear("cls.predictions.transform.dense", hidden, hidden)
    norm("cls.predictions.transform.LayerNorm")
    found["cls.predictions.bias"] = (vocab,)
    return found


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
