"""VLMo on the weights and inputs that the authors' public code was run on for golden/authors_vlmo.json.

A weight's values follow from its name there, so that nothing but names and sizes need be the same on both sides.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from public_vlmo import random_state
from torch import Tensor

from vlp_models.contrib.public_weights.vlmo import read_vlmo
from vlp_models.contrib.public_weights.vlmo_images import convert_beit
from vlp_models.data.batch import Batch, Pixels, Text
from vlp_models.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from vlp_models.metrics.retrieval import IMAGE_TO_TEXT, TEXT_TO_IMAGE, rank, score_ranks
from vlp_models.models import DataFacts, build_model
from vlp_models.models.checkpoint import CheckpointInfo
from vlp_models.models.convert import ImportedModel, ImportRequest
from vlp_models.models.layers.packing import Packing
from vlp_models.models.partial_load import load_partial
from vlp_models.models.vlmo.model import VLMo
from vlp_models.params import GroupParams, to_plain
from vlp_models.tasks import task_class
from vlp_models.tasks.base import TaskModel
from vlp_models.training.optim import Freezing

HEADS, SIDE, WIDER, TEXT, TEXTS = 3, 64, 96, 12, 20  # TEXT tokens of a pair's text, TEXTS of a text alone
SIZES: dict[str, Any] = {"hidden": 24, "heads": HEADS, "layers": 4, "start": 2, "patch": 16, "vocab": 40}
FACTS = DataFacts(vocab_size=40, mask_id=4)
KINDS = ("pretraining", "text", "retrieval", "vqa", "nlvr2")  # of checkpoints
LENGTHS = (12, 5, 9, 3, 7)
IMAGE_IDS = ("a", "b", "a", "c", "d")  # the first and third pair show one image
MLM_WEIGHT = 0.25
SMALL = 60  # outputs up to this size are stored in full
FROZEN = ("attention", "vision_expert", "image_embedding")  # of the second stage
GALLERY, CAPTIONS = 12, tuple(3 + i % 10 for i in range(18))  # caption i is of image i % GALLERY
ANSWERS = ({0: 1.0, 3: 0.3}, {8: 0.9}, {2: 0.6, 1: 0.3, 5: 0.3}, {4: 1.0}, {6: 0.3})  # each question's, with scores

Numbers = dict[str, Tensor]


def values(name: str, *shape: int, scale: float = 1.0, around: float = 0.0) -> Tensor:
    """Return normal float32 numbers from NumPy's stable generator, seeded by the name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    drawn = np.random.RandomState(seed).standard_normal(shape) * scale + around
    return torch.from_numpy(np.asarray(drawn, dtype=np.float64)).float()


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a weight with an effect of about one, so that every path matters."""
    if name == "logit_scale":
        return torch.tensor(2.5)
    if name == "logit_vl_scale":
        return torch.tensor(4.7)  # beyond ln 100, where CLIP's limit would show
    if name == "relative_position_bias_table":
        return values(name, *shape, scale=0.5)
    if "gamma_" in name:
        return values(name, *shape, scale=0.2, around=0.5)
    if len(shape) == 1:
        norm = name.endswith("weight")
        return values(name, *shape, scale=0.2, around=1.0 if norm else 0.0)
    inputs = 1 if "embed" in name and "proj" not in name else math.prod(shape[1:])
    return values(name, *shape, scale=1 / math.sqrt(inputs))


def checkpoint(kind: str, plus: bool) -> dict[str, Tensor]:
    """Return the state dict of a public checkpoint. kind: one of `KINDS`; plus: absolute positions and no scales, as in
    the size base_plus."""
    length = TEXTS if kind == "text" else TEXT
    state = random_state(**SIZES, side=SIDE, length=length, kind=kind)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if tensor.is_floating_point()}
    if plus:
        shapes = {n: s for n, s in shapes.items() if "gamma_" not in n and "position_bias" not in n}
        shapes["transformer.pos_embed"] = (1, 1 + (SIDE // 16) ** 2, SIZES["hidden"])
    return {name: weight(name, shape) for name, shape in sorted(shapes.items())}


def words(name: str, lengths: tuple[int, ...], width: int) -> tuple[Tensor, Tensor]:
    """Return ids and mask of padded texts [CLS] words [SEP]."""
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = 5 + (values(name, len(lengths), width).abs() * 1e4).long() % 35
    ids[:, 0] = 2
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = 3
    return ids * mask, mask


def pixels(name: str, count: int, side: int = SIDE) -> Tensor:
    return values(name, count, 3, side, side)


def pairs(side: int = SIDE) -> Batch:
    ids, mask = words("words", LENGTHS, TEXT)
    images = pixels("images", len(LENGTHS), side)
    images[2] = images[0]
    return Batch(
        sample_ids=tuple(f"s/{i}" for i in range(len(LENGTHS))),
        image_ids=IMAGE_IDS,
        image=Pixels(pixels_B3HW=images),
        text=Text(ids_BT=ids, mask_BT=mask),
    )


def texts() -> Text:
    ids, mask = words("texts", (20, 7, 13), TEXTS)
    return Text(ids_BT=ids, mask_BT=mask)


def masked(text: Text) -> tuple[Tensor, Tensor]:
    """Return bool [B, T], every third word; and the texts with [MASK] there, except a random and a kept word."""
    chosen = (torch.arange(text.ids_BT.shape[1]) % 3 == 1) & text.mask_BT & (text.ids_BT > 4)
    ids = text.ids_BT.masked_fill(chosen, FACTS.mask_id)
    first, second = chosen.nonzero()[:2].tolist()
    ids[tuple(first)], ids[tuple(second)] = 11, text.ids_BT[tuple(second)]
    return chosen, ids


def imported(state: dict[str, Tensor], folder: Path) -> ImportedModel:
    """Import a checkpoint through a file in the public code's layout."""
    torch.save({"state_dict": state}, folder / "vlmo.pt")
    return read_vlmo(folder / "vlmo.pt", ImportRequest(facts=FACTS, config={}, heads=HEADS))


def built(found: ImportedModel, **config: Any) -> VLMo:
    torch.manual_seed(0)
    config = {**{key: value for key, value in found.config.items() if key != "vocab_size"}, **config}
    model = build_model("vlmo", {**config, "dropout": 0.0, "drop_path": 0.0}, FACTS)
    assert isinstance(model, VLMo)
    _, unexpected = model.load_state_dict(dict(found.weights), strict=False)
    assert not unexpected
    return model.eval()


def task_model(found: ImportedModel, task: str, **options: Any) -> TaskModel:
    """Return the task with these weights, including its classifier's."""
    model = built(found)
    vocabulary = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(FACTS.vocab_size - len(SPECIAL_TOKENS)))]
    info = CheckpointInfo(
        family="vlmo", name="vlmo", model_config=to_plain(model.config), task=task, max_text_len=TEXT, options=options
    )
    labels = [f"a{i}" for i in range(len(found.head["bias"]))] if task == "vqa" else []
    made = task_class(task)(model, Tokenizer(vocabulary, lowercase=True), info, labels=labels)
    if found.head:
        made.head.load_state_dict(dict(found.head))
    return made.eval()


class Drawn:
    """Replaces `draw_categorical`: returns given rows, and keeps the weights it was called with."""

    def __init__(self, *rows: list[int]) -> None:
        self.rows, self.weights = list(rows), list[Tensor]()

    def __call__(self, weights_NK: Tensor, generator: torch.Generator) -> Tensor:
        self.weights.append(weights_NK / weights_NK.sum(1, keepdim=True))
        return torch.tensor(self.rows.pop(0))


def pretraining(found: ImportedModel, drawn: list[int], patch: Any, dtype: torch.dtype = torch.float32) -> Numbers:
    """Return each encoder's output for the pairs, and one step's losses and gradients. drawn: the negatives, images for
    texts first; patch: replaces `draw_categorical` by a function."""
    model, batch = built(found).to(dtype), wide(pairs(), dtype)
    text, image = batch.text, batch.image
    masked_NT, ids_NT = masked(text)
    packing, biases = Packing.of(text.mask_BT), model.biases(TEXT)
    draw = Drawn(drawn[: len(batch)], drawn[len(batch) :])
    patch(draw)
    numbers = alone(model, dtype)
    with torch.no_grad():
        fused, patches = model.fuse(image, text), model.encode_image(image)
        numbers |= {"infer.text": fused.text_BTD[text.mask_BT], "infer.image": fused.image_BRD}
        numbers |= {"infer.cls": fused.pooled_BP, "infer.raw": fused.text_BTD[:, 0]}
        (image_cls, text_cls), (image_vl, text_vl) = model.contrast_vectors(patches, text, biases)
        numbers |= {"text.cls": text_cls, "text.vl": text_vl, "image.cls": image_cls, "image.vl": image_vl}
        numbers["text_mlm.feats"] = model.text_states(ids_NT, packing, model.biases(TEXT, image=False))
        numbers["itc.i2t"] = model.contrast_scale() * image_cls @ text_cls.T
        numbers["itc.vl_i2t"] = model._limited_scale(model.fused_log_scale) * image_vl @ text_vl.T
        _, text_MD = model.pair_states(patches, ids_NT, packing, biases)
        numbers["mlm.logits"] = model.word_head(text_MD)
        others = torch.tensor(drawn[: len(batch)]), torch.tensor(drawn[len(batch) :])
        each = [fused, model.fuse(image.select(others[0]), text), model.fuse(image, text.select(others[1]))]
        numbers["itm.logits"] = model.match_head(torch.cat([one.pooled_BP for one in each]))
    generator = torch.Generator().manual_seed(0)
    losses = model.pair_losses(batch, masked_NT, ids_NT, dict.fromkeys(model.objectives), generator, None)
    itc = losses["itc"].parts
    numbers |= {"itc.first": itc["itc"].mean, "itc.second": itc["itc_fused"].mean, "itc.loss": losses["itc"].mean}
    numbers |= {"itm.loss": losses["itm"].mean, "mlm.loss": MLM_WEIGHT * losses["mlm"].mean}
    numbers["itm.weights"] = torch.cat(draw.weights)
    total = numbers["itc.loss"] + numbers["itm.loss"] + numbers["mlm.loss"]
    total.backward()
    return {**numbers, "total": total, **gradients(model)}


def texts_alone(found: ImportedModel, dtype: torch.dtype = torch.float32) -> Numbers:
    """Return outputs of the second stage: language experts learn, attention and vision experts are frozen."""
    model, text = built(found).to(dtype), texts()
    Freezing(model, {name: GroupParams(frozen=True) for name in FROZEN})
    chosen, ids = masked(text)
    packing, biases = Packing.of(text.mask_BT), model.biases(TEXTS, image=False)
    states = model.text_states(ids, packing, biases)
    loss = model.word_loss(states, packing, chosen, text).mean
    loss.backward()
    with torch.no_grad():
        feats = model.text_states(text.ids_BT, packing, biases)
    logits = model.word_head(states)
    return {"text.feats": feats, "mlm.logits": logits, "mlm.loss": loss, **gradients(model)}


def retrieval(found: ImportedModel, dtype: torch.dtype = torch.float32) -> Numbers:
    task = task_model(found, "retrieval", same_image_negatives=True).to(dtype)
    model, batch = task.model, wide(pairs(), dtype)
    assert isinstance(model, VLMo)
    with torch.no_grad():
        text_cls, image_cls = model.embed_text(batch.text), model.embed_image(batch.image)
        numbers = {**alone(model, dtype), "text.cls": text_cls, "image.cls": image_cls}
        numbers["irtr.i2t"] = model.contrast_scale() * image_cls @ text_cls.T
        numbers["irtr.loss"] = task.loss(batch, generator=torch.Generator()).mean
        ids, mask = words("captions", CAPTIONS, TEXT)
        texts_TD = model.embed_text(Text(ids_BT=ids, mask_BT=mask))
        images_ID = model.embed_image(Pixels(pixels_B3HW=pixels("gallery", GALLERY).to(dtype)))
    numbers["scores"] = images_ID @ texts_TD.T
    names, owners = [f"i{i}" for i in range(GALLERY)], [f"i{i % GALLERY}" for i in range(len(CAPTIONS))]
    ranked = rank(names, images_ID.float().numpy(), owners, texts_TD.float().numpy())
    scores = score_ranks(ranked.text_ranks_T, owners, GALLERY, TEXT_TO_IMAGE)[:3]  # at 1, 5 and 10
    scores += score_ranks(ranked.image_ranks_I, names, len(owners), IMAGE_TO_TEXT)[:3]
    return {**numbers, "recall": torch.tensor([score.value / 100 for score in scores], dtype=dtype)}


def vqa(found: ImportedModel, dtype: torch.dtype = torch.float32) -> Numbers:
    task, batch = task_model(found, "vqa").to(dtype), wide(pairs(), dtype)
    targets = torch.zeros(len(batch), 9, dtype=dtype)
    for row, answers in enumerate(ANSWERS):
        for answer, score in answers.items():
            targets[row, answer] = score
    with torch.no_grad():
        loss = task.loss(dataclasses.replace(batch, targets=targets), generator=torch.Generator()).mean
        return {"vqa.logits": task.logits(batch)[0], "vqa.loss": loss}  # type: ignore[operator]


def nlvr2(found: ImportedModel, dtype: torch.dtype = torch.float32) -> Numbers:
    task, batch = task_model(found, "nlvr2").to(dtype), pairs()
    count = len(batch)
    both = torch.stack([pixels("left", count), pixels("right", count)], 1).flatten(0, 1)
    batch = dataclasses.replace(
        batch,
        image=Pixels(pixels_B3HW=both.to(dtype), place_B=torch.arange(2 * count) % 2),
        image_ids=tuple(f"{i}" for i in range(2 * count)),
        image_owner_M=torch.arange(2 * count) // 2,
        targets=torch.tensor([1, 0, 0, 1, 1]),
    )
    with torch.no_grad():
        loss = task.loss(batch, generator=torch.Generator()).mean
        return {"nlvr2.logits": task.logits(batch), "nlvr2.loss": loss}  # type: ignore[operator]


def third_stage(found: ImportedModel, plus: bool, dtype: torch.dtype = torch.float32) -> Numbers:
    """Return images and texts encoded alone by a pair model initialized from the text stage."""
    before = built(found)
    model = built(dataclasses.replace(found, weights={}), vl_start=2, max_positions=TEXT if plus else 196)
    load_partial(model, before.state_dict(), to_plain(before.config))
    return alone(model, dtype)


def beit(dtype: torch.dtype = torch.float32) -> Numbers:
    """Return images encoded alone by a text-stage model initialized from BEiT, except for the type."""
    model = built(
        convert_beit(beit_checkpoint(), ImportRequest(facts=FACTS, config={"max_positions": 196, "vl_start": 4}))
    )
    with torch.no_grad():
        model.image_embedding.type_1D.copy_(weight("token_type_embeddings.weight", (2, SIZES["hidden"]))[1:])
    return {"image.feats": alone(model, dtype)["image.feats"]}


def beit_checkpoint() -> dict[str, Tensor]:
    """Return the image side of `checkpoint` with BEiT's names and a table of biases per layer."""
    state: dict[str, Tensor] = {}
    for name, tensor in checkpoint("pretraining", False).items():
        if name.startswith("transformer.") and "_text" not in name and "_vl" not in name:
            name = name.removeprefix("transformer.").replace("mlp_imag", "mlp").replace("norm2_imag", "norm2")
            state[name] = tensor
    rows = (2 * SIDE // SIZES["patch"] - 1) ** 2 + 3
    for layer in range(SIZES["layers"]):
        state[f"blocks.{layer}.attn.relative_position_bias_table"] = values(f"beit {layer}", rows, HEADS, scale=0.5)
    return state


def alone(model: VLMo, dtype: torch.dtype) -> Numbers:
    model, batch = model.to(dtype), wide(pairs(), dtype)
    text = batch.text
    with torch.no_grad():
        found = model.text_states(text.ids_BT, Packing.of(text.mask_BT), model.biases(TEXT, image=False))
        return {
            "text.feats": found,
            "image.feats": model.image_states(model.encode_image(batch.image), model.biases(0)),
        }


def resized(found: ImportedModel, side: int, dtype: torch.dtype = torch.float32) -> Numbers:
    """Return outputs at another resolution, as in the public code's fine-tuning of retrieval."""
    before = built(found)
    model = built(dataclasses.replace(found, weights={}), side=side, interpolate_positions=True)
    load_partial(model, before.state_dict(), to_plain(before.config))
    if model.position_bias is None:
        table = model.image_embedding.positions_SD
    else:
        table = torch.cat([model.position_bias.image, model.position_bias.cross, model.position_bias.text], 1).T
    assert table is not None
    table = table.detach().clone().to(dtype)
    model, batch = model.to(dtype), wide(pairs(side), dtype)
    with torch.no_grad():
        fused = model.fuse(batch.image, batch.text)
        numbers = {"infer.text": fused.text_BTD[batch.text.mask_BT], "infer.image": fused.image_BRD}
        return {**numbers, "infer.cls": fused.pooled_BP, "image.cls": model.embed_image(batch.image), "table": table}


def wide(batch: Batch, dtype: torch.dtype) -> Batch:
    return dataclasses.replace(batch, image=Pixels(pixels_B3HW=batch.image.pixels_B3HW.to(dtype)))


def gradients(model: VLMo) -> Numbers:
    """Return the gradients of the weights that have one."""
    return {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def recorded(name: str, tensor: Tensor) -> Tensor:
    """Return what is stored of an output: all of a small one; of a larger one each row, or of a gradient the whole,
    times a fixed direction, so that every number counts and few are stored."""
    tensor = tensor.detach().double()
    if name.startswith("gradient"):
        tensor = tensor.reshape(-1)
    elif tensor.numel() <= SMALL:
        return tensor
    length = tensor.shape[-1]
    direction = values(f"direction {name} {length}", length).double()
    return tensor @ direction if name.startswith("gradient") else tensor @ direction / math.sqrt(length)
