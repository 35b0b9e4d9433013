"""A training over two processes, started as a user would: run by rank_runs.py.

    python rank_fit.py FOLDER SETTINGS        Lightning starts the second process itself, or `fit` forks it

FOLDER: a toy dataset; SETTINGS: JSON, what `Toy.fit` takes, `config`, what `Toy.model` takes (or `tokens`: true for
the model of token_toys.py), and `signal`, what
`SignalAt` does. Each process writes the weights it ends with to FOLDER/WORK/weights-RANK.safetensors, the first
one also its log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from token_toys import WEIGHTS, Tokens
from toy_dataset import CLASSES, FEATURE_DIM, Toy, untimed

from vlp_models.common.log import configure_logging
from vlp_models.data.tokenizer import Tokenizer
from vlp_models.errors import VLPError
from vlp_models.params import SnapshotParams


class SignalAt:
    """A tracker that sends a real signal once update `step` is saved, to some ranks or to the whole process group.

    stopped: ranks that are stopped before, so that they can't end by themselves.
    """

    def __init__(self, work: Path, step: int, number: int, to: list[int] | str, stopped: Sequence[int] = ()) -> None:
        self.work = work
        self.checkpoint = work / f"step-{step:08d}.ckpt"
        self.number = number
        self.to = to
        self.stopped = stopped

    def sync(self, log: Path) -> None:
        if not self.checkpoint.exists():
            return
        forked = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if forked and not (self.work / "pid-1").exists():
            (self.work / "pid-1").write_text(forked[0])
        for rank in self.stopped:
            os.kill(int((self.work / f"pid-{rank}").read_text()), signal.SIGSTOP)
        if self.to == "group":
            os.killpg(os.getpgrp(), self.number)
        for rank in self.to if isinstance(self.to, list) else []:
            os.kill(int((self.work / f"pid-{rank}").read_text()), self.number)


def main(folder: Path, settings: dict[str, Any]) -> None:
    toy = Toy(folder / "shards", Tokenizer.load(folder / "tokenizer"))
    work = folder / settings.pop("work")
    work.mkdir(exist_ok=True)
    (work / f"pid-{os.environ.get('LOCAL_RANK', '0')}").write_text(str(os.getpid()))
    config = settings.pop("config", {})
    if settings.pop("tokens", False):
        model: Any = Tokens(toy.tokenizer.vocab_size, FEATURE_DIM, len(CLASSES))
        settings["objectives"] = WEIGHTS
    else:
        model = toy.model(**config)
    if "snapshots" in settings:
        settings["snapshots"] = SnapshotParams(**settings["snapshots"])
    wanted = settings.pop("signal", None)
    tracker = SignalAt(work, **wanted) if wanted else None
    model, result = toy.fit(work, model, tracker=tracker, **{"devices": 2, **settings})
    save_file(model.state_dict(), work / f"weights-{0 if result.is_main else 1}.safetensors")
    if result.is_main:
        (work / "rows.json").write_text(json.dumps([result.resumed_from, untimed(result.rows)]))


if __name__ == "__main__":
    configure_logging()
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except VLPError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
