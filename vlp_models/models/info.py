"""What a checkpoint says of itself: config.json as a type.

Version 1 of the format (one model, regions only) is read as well: its `model` is the family, and both names of a
design are the family's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlp_models.common.limits import check_numbers

_TYPES: dict[str, tuple[type, ...]] = {
    "family": (str,),
    "name": (str,),
    "model_config": (dict,),
    "task": (str, type(None)),
    "max_text_len": (int,),
    "max_regions": (int,),
    "detector_id": (str,),
    "feature_dim": (int,),
    "classes": (list, tuple),
    "blank_images": (bool,),
    "options": (dict,),
    "provenance": (dict,),
}
FORMAT, FORMAT_1 = "vlp-checkpoint/2", "vlp-checkpoint/1"
UNLIMITED = {"max_text_len": 512, "max_regions": 100}  # of a checkpoint that no task was trained from


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """
    family        which class it is of (`models.FAMILIES`)
    name          of the model in params.yaml (`models.<name>`)
    model_config  the config that the class was built with, data facts included
    task          None: without a task's head
    max_text_len, max_regions  what it was trained with; max_regions is 0 for a model that reads no regions
    detector_id, feature_dim, classes  of the regions it reads; "", 0 and () for a model that reads none
    blank_images  trained as a text-only control
    options       the task's, as plain data
    provenance    params and hashes of the inputs it was made of
    """

    family: str
    name: str
    model_config: Mapping[str, Any]
    task: str | None = None
    max_text_len: int
    max_regions: int = 0
    detector_id: str = ""
    feature_dim: int = 0
    classes: tuple[str, ...] = ()
    blank_images: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CheckpointInfo:
        """
        Raises:
            KeyError: a field that has no default is missing. ValueError: of another format, or a value that can't be.
        """
        found = value.get("format")
        if found not in (FORMAT, FORMAT_1):
            raise ValueError(f"format {found!r}; this program reads {FORMAT} and {FORMAT_1}")
        known = dict(value)
        if found == FORMAT_1:
            known["family"] = known["name"] = known["model"]
            if "label_smoothing" in known and known.get("task") == "captioning":
                known["options"] = {"label_smoothing": known["label_smoothing"], **known.get("options", {})}
        fields = {f.name for f in dataclasses.fields(cls)}
        kept = {name: item for name, item in known.items() if name in fields}
        for name in ("family", "name", "model_config", "max_text_len"):
            kept[name] = known[name]
        _check_types(kept)
        check_numbers({**kept, "provenance": None})
        return cls(**{**kept, "classes": tuple(kept.get("classes", ()))})

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            "format": FORMAT,
            **plain,
            "model_config": dict(self.model_config),
            "options": dict(self.options),
            "provenance": dict(self.provenance),
            "classes": list(self.classes),
        }


def _check_types(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and bool not in _TYPES[name]):
            raise ValueError(f"`{name}` is {value!r:.60}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"`{name}` is negative")
    if not all(isinstance(word, str) for word in values.get("classes", ())):
        raise ValueError("`classes` are names")


def in_words(classes: Sequence[str]) -> str:
    """How many classes of regions there are, and the first ones; the background is none."""
    return f"{len(classes) - 1} classes ({', '.join(classes[1:3])}, ...)" if classes else "no classes"
