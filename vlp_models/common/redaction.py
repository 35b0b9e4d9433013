"""What is secret is taken out of a text before it leaves the process: terminal, logs, states, webhooks, MLflow, files.

Secret are: name and password in an address, its parameters that are called like a secret, what stands after
`Authorization:`, what a params key like `webhook` or `password` holds, and the value of every variable of the
environment that is called like a secret. What can't be told from other words by any of these is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

HIDDEN = "***"
SHORTEST = 6  # characters of an environment variable's value; shorter ones occur by chance
_NAME = r"pass(?:word|wd|phrase)|pwd|secret|token|api[_-]?key|access[_-]?key|credentials?|signature|sig|auth"
_SECRET_NAME = re.compile(rf"(?:^|[_.-])(?:{_NAME}|webhook)(?:$|[_.-])", re.IGNORECASE)
_SECRET_KEY = re.compile(rf"(?:^|[_.-])(?:{_NAME}|webhook)$", re.IGNORECASE)
# The last `@` before the path ends it: a password may hold one.
_USERINFO = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#\"'<>]+@")
_PARAMETER = re.compile(rf"(?P<name>[?&;](?:[\w-]*[_-])?(?:{_NAME})=)[^\s&;#\"'<>]+", re.IGNORECASE)
_HEADER = re.compile(
    r"(?P<name>\b(?:proxy-)?authorization\b[\"']?\s*[:=]\s*[\"']?(?:\w+\s+)?)[^\s\"',]+", re.IGNORECASE
)
_BEARER = re.compile(r"(?P<name>\bbearer\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)


def redact(text: str) -> str:
    """`text` without secrets; the same function for every way out."""
    for value in _values():
        text = text.replace(value, HIDDEN)
    text = _USERINFO.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _PARAMETER.sub(rf"\g<name>{HIDDEN}", text)
    text = _HEADER.sub(rf"\g<name>{HIDDEN}", text)
    return _BEARER.sub(rf"\g<name>{HIDDEN}", text)


def redact_yaml(text: str) -> str:
    """The same of a YAML file, whose keys tell of secrets as well (`env:NAME` is none); comments and order stay."""
    import yaml

    try:
        secrets = set(_under_secret_keys(yaml.safe_load(text)))
    except yaml.YAMLError:
        secrets = set()
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return redact(text)


def redacted(value: T) -> T:
    """The same of every text in plain data (dicts, lists), by its keys, too."""
    if isinstance(value, dict):
        return {key: _of_key(str(key), item) for key, item in value.items()}  # type: ignore[return-value]
    if isinstance(value, (list, tuple)):
        return type(value)(redacted(item) for item in value)  # type: ignore[return-value, call-arg]
    return redact(value) if isinstance(value, str) else value  # type: ignore[return-value]


@contextmanager
def without_secrets() -> Iterator[None]:
    """An exception that leaves the block tells no secret: whoever keeps or shows its text need not know. One whose kind
    can't be made of a text alone becomes a RuntimeError that names it."""
    try:
        yield
    except Exception as error:
        told = redact(str(error))
        if told == str(error):
            raise
        raise _like(error, told) from None


def _like(error: Exception, told: str) -> Exception:
    try:
        again = type(error)(told)
    except Exception:  # whatever its constructor wants
        again = None
    return again if again is not None and str(again) == told else RuntimeError(f"{type(error).__name__}: {told}")


def _of_key(key: str, value: Any) -> Any:
    if isinstance(value, str) and _SECRET_KEY.search(key) and not _harmless(value):
        return HIDDEN
    return redacted(value)


def _under_secret_keys(value: Any) -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(item, str) and _SECRET_KEY.search(str(key)) and not _harmless(item):
            yield item
        yield from _under_secret_keys(item)


def _harmless(value: str) -> bool:
    return not value or value.startswith("env:")


def _values() -> list[str]:
    """Of secret environment variables, the longest first: one may hold another."""
    found = {v for name, v in os.environ.items() if len(v) >= SHORTEST and _SECRET_NAME.search(name)}
    return sorted(found - {os.environ.get("HOME", ""), os.environ.get("PWD", "")}, key=len, reverse=True)
