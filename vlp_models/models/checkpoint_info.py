"""config.json of a checkpoint: what a model is and what it was trained on. Imports no torch: commands read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlp_models.common.limits import check_numbers

FORMAT = "vlp-checkpoint/2"
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


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """config.json.

    family        one of `models.FAMILIES`
    name          of the model in params.yaml (`models.<name>`)
    model_config  the config that the model was built with, facts of the data included
    task          None: no task's head
    max_text_len, max_regions  what it was trained with; max_regions is 0 for a model that reads no regions
    detector_id, feature_dim, classes  of the regions it reads; "", 0 and () for a model that reads none
    blank_images  trained as a blind baseline, on blank images
    options       of the task, as plain data
    provenance    params, and hashes of the inputs it was trained from
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
        """Read config.json's content; unknown fields are ignored.

        Raises:
            KeyError: a field without a default is missing. ValueError: another format, or an invalid value.
        """
        if value.get("format") != FORMAT:
            raise ValueError(
                f"format {value.get('format')!r}; this version reads {FORMAT}; train the model again, or import its "
                "weights with `vlp import-checkpoint`"
            )
        fields = {f.name for f in dataclasses.fields(cls)}
        values = {name: item for name, item in value.items() if name in fields}
        for name in ("family", "name", "model_config", "max_text_len"):
            values[name] = value[name]  # a KeyError names the missing field
        for name, item in values.items():
            # bool is a subclass of int, so True would pass as a length.
            if not isinstance(item, _TYPES[name]) or (isinstance(item, bool) and bool not in _TYPES[name]):
                raise ValueError(f"`{name}` is {item!r:.60}")
            if isinstance(item, int) and item < 0:
                raise ValueError(f"`{name}` is negative")
        classes = tuple(values.get("classes", ()))
        if not all(isinstance(word, str) for word in classes):
            raise ValueError("`classes` are names")
        # Provenance may hold any number, because nothing is built by it.
        check_numbers({**values, "provenance": None})
        return cls(**{**values, "classes": classes})

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


def describe_classes(classes: Sequence[str]) -> str:
    """Return the number of a detector's classes and the first ones, for messages; class 0, the background, is not
    counted."""
    return f"{len(classes) - 1} classes ({', '.join(classes[1:3])}, ...)" if classes else "no classes"
