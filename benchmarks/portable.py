"""Digits of `trainer.reproducible: portable` on several processors: `python benchmarks/portable.py`.

Trains the tiny preset's detector, pretraining and captioning on this processor, on this processor with settings that
ask for other instructions and threads, and on processors of both makers that QEMU emulates (`apt install qemu-user`);
prints the SHA-256 of each one's weights. With `--machine` it does the same with `reproducible: machine`, to show what
the mode prevents. An emulated processor takes minutes. Results are added to benchmarks/results/portable.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from common import vlp

from vlp_models.common.io import hash_file

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "portable.json"
EMULATED = ("Haswell", "Skylake-Client", "EPYC-Rome")
OTHER = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "AUTO", "OMP_NUM_THREADS": "2"}
PREPARE = ("plan", "generate scenes", "prepare scenes", "validate", "detector", "features", "tokenizer", "shards")
TRAIN = {
    "detector": "data/detector/detector.safetensors",
    "initial tden": "checkpoints/initial/tden",
    "pretrain tden": "checkpoints/pretrain/tden",
    "finetune tden-captioning": "checkpoints/finetune/tden-captioning",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", action="store_true", help="with `trainer.reproducible: machine`")
    parser.add_argument("--processors", nargs="*", default=EMULATED, help="QEMU's names; default: %(default)s")
    arguments = parser.parse_args()
    mode = "machine" if arguments.machine else "portable"
    record = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    this_processor = processor_name()
    with tempfile.TemporaryDirectory() as name:
        project = Path(name) / "project"
        prepare(project, mode)
        runs: dict[str, dict[str, str]] = {this_processor: {}, f"{this_processor}, other settings": OTHER}
        runs |= {processor: {} for processor in arguments.processors}
        for processor, environment in runs.items():
            emulator = [find_emulator(), "-cpu", processor] if processor in arguments.processors else []
            weights = train(project, Path(name) / "copy", emulator, environment)
            label = f"{processor}, emulated" if emulator else processor
            record.setdefault(mode, {})[label] = {"torch": version("torch"), **weights}
            print(mode, label, *(f"{stage} {sha256[:12]}" for stage, sha256 in weights.items()), sep="  ", flush=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def processor_name() -> str:
    """Return the processor's name, and which of the wide instructions it has."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    lines = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields["flags"].split()]
    return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']}; {', '.join(wide)})"


def find_emulator() -> str:
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        sys.exit("qemu-x86_64 not found; install it (`apt install qemu-user`), or pass `--processors` without a name")
    return emulator


def prepare(project: Path, mode: str) -> None:
    """Make a project of the tiny preset with everything before its trainings."""
    vlp(["init", str(project)], project.parent)
    changes = (f"trainer.reproducible={mode}", "trainer.devices=1", "tracking.uri=")
    vlp(["use", "tiny", *(word for change in changes for word in ("--set", change))], project)
    for stage in PREPARE:
        vlp(["stage", *stage.split()], project)


def train(project: Path, copy: Path, emulator: list[str], environment: dict[str, str]) -> dict[str, str]:
    """Return stage -> SHA-256 of its weights."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(project, copy, symlinks=True)
    weights = {}
    for stage, output in TRAIN.items():
        vlp(["stage", *stage.split()], copy, emulator, environment)
        path = copy / output
        weights[stage] = hash_file(path if path.is_file() else next(path.glob("*.safetensors")))
    return weights


if __name__ == "__main__":
    main()
