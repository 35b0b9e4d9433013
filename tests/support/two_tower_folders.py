"""Tiny two-tower models with random weights, as transformers and open_clip save them: 2 layers, width 32, 32 pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    PreTrainedTokenizerFast,
    Siglip2Config,
    Siglip2ImageProcessorPil,
    Siglip2Model,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

SIDE, PATCH, LENGTH = 32, 8, 64
CAPTIONS = [
    "A small dog, two cats.",
    "two people on a beach",
    "a large red cube to the left of a small blue ball",
    "is there a green cylinder? yes",
    "a girl in a pink dress climbs the stairs of a wooden playhouse",
]
TRANSFORMER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_clip_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write CLIP's kind: a lower-casing BPE whose words end with </w>, with a start and an end that also pads."""
    engine = Engine(models.BPE(end_of_word_suffix="</w>"))
    engine.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.ByteLevel(False)])
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    engine.train_from_iterator(CAPTIONS * 4, trainer)
    # The end has the highest id, where CLIP's text tower is read.
    engine.add_special_tokens(["<|startoftext|>", "<|endoftext|>"])
    return _save(engine, folder, bos="<|startoftext|>", eos="<|endoftext|>", pad="<|endoftext|>", start=True)


def write_siglip_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write SigLIP's kind: a lower-casing SentencePiece with an end, and no start."""
    special = ["<pad>", "</s>", "<unk>"]
    engine = Engine(models.Unigram())
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        special_tokens=special,
        unk_token="<unk>",
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz"),
        show_progress=False,
    )
    engine.train_from_iterator(CAPTIONS * 4, trainer)
    return _save(engine, folder, bos=None, eos="</s>", pad="<pad>", start=False)


def _save(engine: Engine, folder: Path, *, bos: str | None, eos: str, pad: str, start: bool) -> PreTrainedTokenizerFast:
    from tokenizers.processors import TemplateProcessing

    names = [name for name in (bos if start else None, eos) if name]
    engine.post_processor = TemplateProcessing(
        single=[*([bos] if start and bos else []), "$A", eos],
        special_tokens=[(name, engine.token_to_id(name)) for name in names],
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=engine,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=eos if start else "<unk>",
        model_max_length=LENGTH,
    )
    whole.save_pretrained(folder)
    return whole


def _randomize(model: torch.nn.Module) -> None:
    # The library's initialization is so small that all embeddings of a tiny model would be nearly equal.
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15, generator=generator)


def write_clip(folder: Path) -> Path:
    tokenizer = write_clip_tokenizer(folder)
    text = TRANSFORMER | {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH}
    text |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    vision = TRANSFORMER | {"image_size": SIDE, "patch_size": PATCH}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
    _randomize(model)
    model.save_pretrained(folder)
    size = {"height": SIDE, "width": SIDE}
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size).save_pretrained(folder)
    return folder


def write_siglip(folder: Path) -> Path:
    tokenizer = write_siglip_tokenizer(folder)
    text = TRANSFORMER | {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH}
    vision = TRANSFORMER | {"image_size": SIDE, "patch_size": PATCH}
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
    _randomize(model)
    model.logit_scale.data.fill_(2.3)
    model.logit_bias.data.fill_(-10.0)
    model.save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder


def write_siglip2(folder: Path) -> Path:
    tokenizer = write_siglip_tokenizer(folder)
    text = TRANSFORMER | {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH}
    vision = TRANSFORMER | {"num_patches": (SIDE // PATCH) ** 2, "patch_size": PATCH}
    model = Siglip2Model(Siglip2Config(text_config=text, vision_config=vision))
    _randomize(model)
    model.logit_scale.data.fill_(2.3)
    model.logit_bias.data.fill_(-10.0)
    model.save_pretrained(folder)
    Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=(SIDE // PATCH) ** 2).save_pretrained(folder)
    return folder


def write_mobileclip(folder: Path) -> Path:
    """Write a small MobileCLIP in open_clip's layout: an image tower of timm, a text tower without a causal mask."""
    import open_clip

    tokenizer = write_clip_tokenizer(folder)
    vision = {"timm_model_name": "fastvit_t8", "timm_model_pretrained": False, "timm_pool": "avg", "timm_proj": None}
    text = {"context_length": LENGTH, "vocab_size": len(tokenizer), "width": 32, "heads": 2, "layers": 2}
    architecture = {
        "embed_dim": 24,
        "vision_cfg": vision | {"timm_drop": 0.0, "timm_drop_path": 0.0, "image_size": 64},
        "text_cfg": text | {"no_causal_mask": True},
    }
    preparation = {"mean": [0, 0, 0], "std": [1, 1, 1], "interpolation": "bilinear", "resize_mode": "shortest"}
    settings = {"model_cfg": architecture | {"custom_text": True}, "preprocess_cfg": preparation}
    (folder / "open_clip_config.json").write_text(json.dumps(settings))
    torch.manual_seed(1)
    model = open_clip.CustomTextCLIP(**architecture)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    return folder


WRITERS: dict[str, Callable[[Path], Path]] = {"clip": write_clip, "siglip": write_siglip, "siglip2": write_siglip2}
