"""Tokenizers as transformers saves them, trained on a few sentences: GPT-2's kind and XLM-R's kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "A small dog, two cats.",
    "Ein kleiner Hund läuft über die Straße.",
    "Маленькая собака бежит.",
    "小さな犬が走る。",
    "一只小狗在跑",
    "एक छोटा कुत्ता",
    "كلب صغير يركض",
    "강아지가 달린다",
]
CORPUS = [*TEXTS, "a large red cube to the left of a small blue ball", "is there a green cylinder?"] * 4


def write_bpe(folder: Path) -> Path:
    """Write a byte-level BPE whose only special token starts, ends and pads a text: GPT-2's kind."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    engine.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[end], show_progress=False),
    )
    whole = PreTrainedTokenizerFast(tokenizer_object=engine, bos_token=end, eos_token=end, unk_token=end)
    whole.save_pretrained(folder)
    return folder


def write_unigram(folder: Path) -> Path:
    """Write a Unigram over spaces as pieces, whose [MASK] is the last token: XLM-R's kind."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    engine = Engine(models.Unigram())
    engine.normalizer = normalizers.NFKC()
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    engine.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=engine,
        **dict(zip(("cls_token", "pad_token", "sep_token", "unk_token"), special, strict=True)),
        mask_token="<mask>",
    )
    whole.save_pretrained(folder)
    return folder


WRITERS: dict[str, Callable[[Path], Path]] = {"bpe": write_bpe, "unigram": write_unigram}
