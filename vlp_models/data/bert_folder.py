"""A BERT in Hugging Face's layout (config.json, vocab.txt or tokenizer.json, weights), in a folder or a package.

The folder of another model serves as a tokenizer, too (`read_pretrained`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlp_models.common.packages import HUB, PREFIX, check_recorded, package_files
from vlp_models.common.plugins import Table, import_target
from vlp_models.data.tokenizer import CONTINUATION, UNK, Tokenizer, read_pretrained, read_settings, read_vocabulary
from vlp_models.errors import CheckpointError, DataError, MissingToolError

# find, pin -> module:function, for models of the Hub (contrib/hub_models)
HUB_FOLDERS = Table("hub_folders", {})
CONFIG, VOCABULARY, TOKENIZER, SETTINGS = "config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Required values in tokenizer.json for our tokenizer to split texts the same way.
_AS_BERT: dict[tuple[str, str], Any] = {
    ("model", "type"): "WordPiece",
    ("model", "unk_token"): UNK,
    ("model", "continuing_subword_prefix"): CONTINUATION,
    ("normalizer", "type"): "BertNormalizer",
    ("normalizer", "clean_text"): True,
    ("normalizer", "handle_chinese_chars"): True,
    ("pre_tokenizer", "type"): "BertPreTokenizer",
}


def find_folder(source: str, root: Path, where: str) -> Path:
    """Return the folder.

    Args:
        source: its path relative to `root`, `package:NAME` or `hf://OWNER/NAME@COMMIT`.
        where: its key in params.yaml, for messages.

    Raises:
        MissingToolError: the package is not installed.
        DataError: no such folder; the package is not the version that DVC recorded, or contains no BERT.
    """
    if source.startswith(HUB):
        hub_folder: Path = hub_function("find", f"{where}: {source}")(source, root, where)
        return hub_folder
    if not source.startswith(PREFIX):
        folder = root / source
        if not folder.is_dir():
            raise DataError(
                f"{folder}: no such folder; `{where}` must be a folder with a BERT's files, or {PREFIX}NAME"
            )
        return folder
    # refuses another version of the package than DVC recorded
    check_recorded(source, root, where)
    berts = []
    # The package's files are in any folder of it: the one with a config and weights is the BERT.
    for folder in {path.parent for path in package_files(source, where).values()}:
        if (folder / CONFIG).exists() and any((folder / name).exists() for name in WEIGHTS):
            berts.append(folder)
    if len(berts) != 1:
        many = "more than one BERT" if berts else "no BERT (config.json next to its weights)"
        raise DataError(f"`{where}: {source}`: the package contains {many}; give a folder instead")
    return berts[0]


def hub_function(name: str, label: str) -> Any:
    """Return a function of `HUB_FOLDERS`.

    Raises:
        MissingToolError: its folder of contrib is not installed.
    """
    if name not in HUB_FOLDERS:
        raise MissingToolError(f"params.yaml: `{label}` needs vlp_models/contrib/hub_models, which is not installed")
    return import_target(HUB_FOLDERS[name])


def weights_file(folder: Path) -> Path:
    """Return the weights file; safetensors is preferred.

    Raises:
        CheckpointError: no weights file.
    """
    for name in WEIGHTS:
        if (folder / name).exists():
            return folder / name
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; it should hold {' or '.join(WEIGHTS)}")
    raise CheckpointError(f"{folder}: contains neither {' nor '.join(WEIGHTS)}")


def read_tokenizer(folder: Path, *, lowercase: bool, special_tokens: Mapping[str, str] | None = None) -> Tokenizer:
    """Return the tokenizer of the folder's vocab.txt, tokenizer.json, or both.

    Args:
        lowercase: `tokenizer.lowercase`, which must match the setting of a BERT's folder, if it has one. Another
            kind of tokenizer has its own.
        special_tokens: `tokenizer.special_tokens`, for a tokenizer other than BERT's.

    Raises:
        DataError: both files are missing, they disagree, or the tokenizer has unsupported settings.
    """
    tokenizer_json, settings = read_settings(folder / TOKENIZER), read_settings(folder / SETTINGS)
    tokens = read_vocabulary(folder / VOCABULARY) if (folder / VOCABULARY).exists() else None
    if "model" in tokenizer_json:
        # settings that split texts in another way than `Tokenizer`
        differences = []
        for (part, key), value in _AS_BERT.items():
            actual = _part(tokenizer_json, part).get(key)
            if actual != value:
                differences.append(f"{part}.{key} is {actual!r}, not {value!r}")
        # another kind of tokenizer, read as it is
        if differences and _part(tokenizer_json, "model").get("type") != "WordPiece":
            return read_pretrained(folder, special_tokens)
        if differences:
            raise DataError(f"{folder / TOKENIZER}: not a BERT's tokenizer: {'; '.join(differences[:3])}")
        listed = _tokens(tokenizer_json, folder / TOKENIZER)
        if tokens is not None and tokens != listed:
            raise DataError(f"{folder}: {VOCABULARY} and {TOKENIZER} have different vocabularies; remove the wrong one")
        tokens = listed
    if tokens is None:
        raise DataError(f"{folder}: contains neither {VOCABULARY} nor Hugging Face's {TOKENIZER}")
    if settings.get("tokenize_chinese_chars", True) is False:
        raise DataError(f"{folder / SETTINGS}: tokenize_chinese_chars: false is not supported")
    # tokenizer_config.json overrides the normalizer's settings
    declared = dict(_part(tokenizer_json, "normalizer"))
    for key, name in (("do_lower_case", "lowercase"), ("strip_accents", "strip_accents")):
        if settings.get(key) is not None:
            declared[name] = settings[key]
    if (actual := declared.get("lowercase", lowercase)) is not lowercase:
        raise DataError(
            f"{folder}: its tokenizer has lowercase {str(actual).lower()}; set `tokenizer.lowercase` in params.yaml to "
            "the same"
        )
    if special_tokens:
        raise DataError(
            f"{folder}: a BERT's special tokens are fixed; remove `tokenizer.special_tokens` from params.yaml"
        )
    try:
        return Tokenizer(tokens, lowercase=lowercase, strip_accents=declared.get("strip_accents"))
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None


def _tokens(tokenizer_json: Mapping[str, Any], file: Path) -> list[str]:
    """Return the vocabulary in the order of its ids, followed by added tokens."""
    vocabulary = dict(tokenizer_json["model"].get("vocab", {}))
    added = [token for token in tokenizer_json.get("added_tokens", []) if token.get("content") not in vocabulary]
    # added words are matched before a text is split
    if plain := [token["content"] for token in added if not token.get("special")]:
        raise DataError(f"{file}: adds words to the vocabulary ({', '.join(plain[:3])}), which is not supported")
    vocabulary |= {token["content"]: token["id"] for token in added}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    # ids are positions in the vocabulary, so no gaps
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        raise DataError(f"{file}: the ids of its {len(tokens):,} tokens are not 0 to {len(tokens) - 1:,}")
    return tokens


def _part(tokenizer_json: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = tokenizer_json.get(name)
    return part if isinstance(part, Mapping) else {}
