"""Remove secrets from a text before it leaves the process: terminal, logs, flow states, webhooks, MLflow, files.

Secrets are: user name and password in a URL, its query parameters with secret-like names, the value of an
`Authorization:` header, a `Bearer` token, the values of params keys such as `webhook` or `password`, and the value of
every environment variable with a secret-like name. A secret that none of these rules identifies is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

HIDDEN = "***"
MIN_LENGTH = 6  # characters of an environment variable's value; shorter ones occur by chance
_NAME = r"pass(?:word|wd|phrase)|pwd|secret|token|api[_-]?key|access[_-]?key|credentials?|signature|sig|auth"
# An environment variable: a secret-like word between separators, as in `HF_TOKEN` or `TOKEN_FILE`, not `TOKENIZER`.
_SECRET_NAME = re.compile(rf"(?:^|[_.-])(?:{_NAME}|webhook)(?:$|[_.-])", re.IGNORECASE)
# A key of params: the word has to be the last one, as in `api_token`, not `token_file`.
_SECRET_KEY = re.compile(rf"(?:^|[_.-])(?:{_NAME}|webhook)$", re.IGNORECASE)
# The user info ends at the last `@` before the path: a password may contain one.
_USERINFO = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#\"'<>]+@")
# `?token=...`, `&access_token=...`: the value of a query parameter whose name ends with a secret-like word.
_PARAMETER = re.compile(rf"(?P<name>[?&;](?:[\w-]*[_-])?(?:{_NAME})=)[^\s&;#\"'<>]+", re.IGNORECASE)
# `Authorization: Bearer ...`, also quoted as in JSON or a dict; the scheme stays, the credentials are replaced.
_HEADER = re.compile(
    r"(?P<name>\b(?:proxy-)?authorization\b[\"']?\s*[:=]\s*[\"']?(?:\w+\s+)?)[^\s\"',]+", re.IGNORECASE
)
# `Bearer ...` outside of a header, followed by six or more characters of a token.
_BEARER = re.compile(r"(?P<name>\bbearer\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)


def redact(text: str) -> str:
    """Return `text` with every secret replaced by `***`."""
    secrets = {v for name, v in os.environ.items() if len(v) >= MIN_LENGTH and _SECRET_NAME.search(name)}
    # PWD has a secret-like name, but hiding these folders would make paths unreadable.
    secrets -= {os.environ.get("HOME", ""), os.environ.get("PWD", "")}
    for value in sorted(secrets, key=len, reverse=True):  # the longest first: it may contain another
        text = text.replace(value, HIDDEN)
    text = _USERINFO.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _PARAMETER.sub(rf"\g<name>{HIDDEN}", text)
    text = _HEADER.sub(rf"\g<name>{HIDDEN}", text)
    return _BEARER.sub(rf"\g<name>{HIDDEN}", text)


def redact_yaml(text: str) -> str:
    """Return a YAML file's text without secrets, also those under secret-like keys; comments and order stay.

    The text remains valid YAML: secrets under such keys become a quoted `"***"`, and a webhook becomes empty, for it
    must be a URL. `env:NAME` is not a secret.
    """
    import yaml

    # The values are replaced in the text itself: loading and dumping it would drop the comments.
    try:
        secrets = {node.start_mark.index: (key, node) for key, node in _secret_nodes(yaml.compose(text), set())}
    except yaml.YAMLError:
        secrets = {}
    for start, (key, node) in sorted(secrets.items(), reverse=True):  # the last one first: places before it stay
        # A block scalar's end mark is after its line end, which has to stay.
        end = node.start_mark.index + len(text[start : node.end_mark.index].rstrip())
        text = text[:start] + ('""' if key.lower().endswith("webhook") else f'"{HIDDEN}"') + text[end:]
    for value in sorted({node.value for _, node in secrets.values()}, key=len, reverse=True):  # in comments
        text = text.replace(value, HIDDEN)
    return redact(text)


def redacted(value: T) -> T:
    """Return plain data (dicts, lists) without secrets, also those under secret-like keys."""
    if isinstance(value, dict):
        return {key: HIDDEN if _is_secret(key, item) else redacted(item) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, (list, tuple)):
        return type(value)(redacted(item) for item in value)  # type: ignore[return-value, call-arg]
    return redact(value) if isinstance(value, str) else value  # type: ignore[return-value]


@contextmanager
def without_secrets() -> Iterator[None]:
    """Remove secrets from the message of an exception that leaves the block, for code that stores or shows it.

    An exception whose type cannot be made from a text alone becomes a RuntimeError that names the type.
    """
    try:
        yield
    except Exception as error:
        message = redact(str(error))
        if message == str(error):
            raise
        # The same type, so that `except` clauses above this block still match.
        try:
            copy = type(error)(message)
        except Exception:  # whatever its constructor requires
            copy = None
        same = copy is not None and str(copy) == message
        raise (copy if same else RuntimeError(f"{type(error).__name__}: {message}")) from None  # type: ignore[misc]


def _is_secret(key: object, value: Any) -> bool:
    """Return whether `value` is a secret by its key: not empty, and not a reference to an environment variable."""
    return isinstance(value, str) and bool(_SECRET_KEY.search(str(key))) and bool(value) and value[:4] != "env:"


def _secret_nodes(node: Any, visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield key and node of each scalar below a YAML node that is a secret by its key."""
    import yaml

    # An alias repeats a node, or refers to one above it, which would never end.
    if id(node) in visited:  # an alias
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            text = item.value if item.tag == "tag:yaml.org,2002:str" else None
            if _is_secret(key.value, text):
                yield str(key.value), item
            yield from _secret_nodes(item, visited)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _secret_nodes(item, visited)
