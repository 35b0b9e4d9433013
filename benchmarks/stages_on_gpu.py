"""Run every stage of a workspace that computes, in one process and without DVC: does all of it work on this GPU?

    vlp use tiny                  # and the presets of the models to try
    vlp use --set trainer.accelerator=gpu --set tracking.uri=
    vlp run validate
    python benchmarks/stages_on_gpu.py

The clock of each stage includes reading its inputs; the first ones also import torch and start CUDA. Writes
benchmarks/results/stages-<device>.json.
"""

from __future__ import annotations

import argparse
import importlib
import time
import traceback
from pathlib import Path

import torch
from common import write_result

from vlp_models.common.log import configure_logging
from vlp_models.common.workspace import Workspace
from vlp_models.params import load_params

KINDS = ("detector", "features", "tokenizer", "shards", "initial", "pretrain", "finetune", "evaluate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="stages to run; default: all")
    kinds = parser.parse_args().kinds
    configure_logging()
    params, workspace = load_params(), Workspace(Path.cwd())
    stages = [(kind, "") for kind in ("detector", "features", "tokenizer", "shards")]
    stages += [("initial", name) for name in params.models]
    stages += [("pretrain", name) for name in params.pretrain]
    stages += [(kind, name) for kind in ("finetune", "evaluate") for name in params.finetune]
    stages = [(kind, key) for kind, key in stages if kind in kinds]
    found: dict[str, float | str] = {}
    for kind, key in stages:
        name, start = f"{kind}@{key}" if key else kind, time.perf_counter()
        try:
            module = importlib.import_module(f"vlp_models.pipeline.stages.{kind}")
            module.run(params, workspace, *([key] if key else []))
            found[name] = round(time.perf_counter() - start, 1)
        except Exception as error:  # the other stages are still worth trying
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {error}"[:500]
        print(f"{name}: {found[name]}", flush=True)
    on_gpu = torch.cuda.is_available()
    record = {
        "claim": "seconds of each stage, or why it failed",
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "stages": found,
    }
    write_result(f"stages-{'cuda' if on_gpu else 'cpu'}", record)


if __name__ == "__main__":
    main()
