"""Check the section `augment` of params.yaml, and the runs that use its captions."""

from __future__ import annotations

from vlp_models.errors import ParamsError
from vlp_models.params import Params, split_start
from vlp_models.params.schema import suggestion


def check_augment(params: Params, file: str) -> None:
    """Check the captioners of `augment`, and that no fine-tuning waits for captions it writes itself.

    Raises:
        ParamsError: names the key.
    """
    for name, entry in params.augment.items():
        kind, run = split_start(entry.start)
        if kind != "finetune" or run not in params.finetune or params.finetune[run].task != "captioning":
            captioners = [f"finetune/{run}" for run, p in params.finetune.items() if p.task == "captioning"]
            raise ParamsError(
                f"{file}: `augment.{name}.start: {entry.start}` must be a fine-tuning of the task captioning"
                f"{suggestion(entry.start, captioners)}"
            )
        for source in entry.sources:
            if source not in params.data:
                raise ParamsError(
                    f"{file}: `augment.{name}.sources: {source}`: no such dataset{suggestion(source, params.data)}"
                )
    for run, finetune in params.finetune.items():
        captions = finetune.augment.captions
        if captions and captions not in params.augment:
            raise ParamsError(
                f"{file}: `finetune.{run}.augment: {captions}`: no such entry of `augment`"
                f"{suggestion(captions, params.augment)}"
            )
        if finetune.augment.control and not captions:
            raise ParamsError(
                f"{file}: `finetune.{run}.augment.control` requires `augment.captions`, to have as many samples"
            )
        # Follow starts and captioners: none of them may be this run.
        pending, visited = [run], set[str]()
        while pending:
            for checkpoint in params.chain(f"finetune/{pending.pop()}"):
                kind, name = split_start(checkpoint)
                # A pretraining or initial checkpoint uses no written captions.
                used = params.finetune[name].augment.captions if kind == "finetune" else ""
                # An unknown entry is reported when the loop reaches its own run.
                captioner = split_start(params.augment[used].start)[1] if used in params.augment else ""
                if captioner == run:
                    raise ParamsError(
                        f"{file}: `finetune.{run}` trains on `augment.{used}`, whose captions {run} writes itself; "
                        "choose a captioner that does not depend on them"
                    )
                # Its own chain may use written captions, too.
                if captioner and captioner not in visited:
                    visited.add(captioner)
                    pending.append(captioner)
