"""The section `finetune.NAME.parts` of params.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlp_models.errors import ParamsError
from vlp_models.params.schema import PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from vlp_models.params import Params


@dataclass(frozen=True, kw_only=True)
class PartsParams:
    """Train the run in parts and average their weights (contrib/parts); `parts: 4` stands for `parts: {of: 4}`.

    of     parts; an image's id decides which one it is in. 1: the run is trained as a whole
    scale  the result is start + scale * (average of the parts - start)
    """

    of: PositiveInt = 1
    scale: PositiveFloat = 1.0

    @staticmethod
    def from_shorthand(value: Any) -> dict[str, Any]:
        return {"of": value}


def check_parts(params: Params, file: str) -> None:
    """Check the runs with `parts`: one dataset, nothing that a part cannot have, no run with the name of a part.

    Raises:
        ParamsError: names the key.
    """
    for name, run in params.finetune.items():
        where = f"{file}: `finetune.{name}.parts`"
        if run.parts > 1 and (len(run.sources or params.data) > 1 or run.adapters or run.augment.captions):
            raise ParamsError(f"{where} needs one dataset in `sources`, and neither `lora` nor `augment`")
        if taken := {f"{name}-part-{number}" for number in range(1, run.parts + 1) if run.parts > 1} & {
            *params.finetune
        }:
            raise ParamsError(f"{where}: `finetune.{min(taken)}` has the name of a part; rename it")
