"""`trainer.reproducible: portable`: kernels, and digits under other settings and on emulated processors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vlp_models.common import portable
from vlp_models.common.portable import cpu_flags

ROOT = Path(__file__).parents[2]
needs_avx2 = pytest.mark.skipif(bool(portable.NEEDED - cpu_flags()), reason="needs a processor with AVX2")
# Settings that ask every library for other instructions and threads.
HOSTILE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "AUTO",
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "",
    **dict.fromkeys(portable.THREADS, "2"),
}

CHOOSE = 'choose_instructions("portable")\nassert is_portable()\n'
START = f"""
import hashlib, json, sys
from vlp_models.common.portable import choose_instructions, is_portable, use_portable_kernels
{CHOOSE}
import numpy as np, torch
use_portable_kernels()
"""

# Whole numbers fill the weights: no generator's digits matter.
TRAINING = (
    START
    + """
from torch import nn
from torch.nn import functional as F

def filled(*shape):
    return torch.randint(-1000, 1001, shape, generator=generator).float() / 8000

generator = torch.Generator().manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, activation="gelu", batch_first=True)
cnn = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 64, 1))
model = nn.ModuleDict({"layer": layer, "cnn": cnn})
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(filled(*parameter.shape))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for _ in range(3):
    cells = cnn(filled(4, 3, 24, 24)).flatten(2).transpose(1, 2)
    output = layer(torch.cat([cells, filled(4, 20, 64)], 1))
    loss = F.cross_entropy(output.flatten(0, 1), torch.randint(0, 64, (output.numel() // 64,), generator=generator))
    loss = loss + torch.cdist(output[0], output[1]).mean() + output.std(-1).log().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
digest = hashlib.sha256()
for name, value in sorted(model.state_dict().items()):
    digest.update(value.numpy().tobytes())
print(json.dumps(digest.hexdigest()))
"""
)

KERNELS = (
    START
    + """
def random(*shape):
    return torch.randn(*shape, generator=generator)

def difference(found, expected):
    assert found.shape == expected.shape and torch.isfinite(found).all(), (found.shape, expected.shape)
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1)) if found.numel() else 0.0

generator = torch.Generator().manual_seed(0)
worst = {}
for rows in (0, 1, 3, 40):
    a, b, c = random(rows, 7).requires_grad_(), random(5, 7).T.requires_grad_(), random(5).requires_grad_()
    A, B, C = (x.detach().double().requires_grad_() for x in (a, b, c))
    pairs = {
        "mm": (a @ b, A @ B),
        "addmm": (torch.addmm(c, a, b, beta=0.5, alpha=2), torch.addmm(C, A, B, beta=0.5, alpha=2)),
        "beta 0": (torch.addmm(c / 0, a, b, beta=0), A @ B),
        "bmm": (torch.bmm(a[None].expand(3, -1, -1), b[None].expand(3, -1, -1)), (A @ B).expand(3, -1, -1)),
        "baddbmm": (torch.baddbmm(c, a[None], b[None], alpha=3), (C + 3 * (A @ B))[None]),
        "linear": (torch.nn.functional.linear(a, b.T, c), torch.nn.functional.linear(A, B.T, C)),
        "sqrt": ((a * a).sqrt(), (A * A).sqrt()),
        "sqrt_": ((a * a + 1).sqrt_(), (A * A + 1).sqrt()),
        "sqrt of a scalar": ((a * a).sum().add(1).sqrt(), (A * A).sum().add(1).sqrt()),
    }
    for name, (found, expected) in pairs.items():
        gradients = torch.autograd.grad(found.square().sum(), (a, b, c), retain_graph=True, allow_unused=True)
        true = torch.autograd.grad(expected.square().sum(), (A, B, C), retain_graph=True, allow_unused=True)
        errors = [difference(found, expected)]
        if rows and name not in ("sqrt", "beta 0"):  # at 0, the gradient of a square root is not defined
            errors += [difference(g, t) for g, t in zip(gradients, true) if g is not None]
        worst[name] = max(worst.get(name, 0), *errors)
half = random(4, 4).bfloat16()
other = [str((half @ half).dtype), str((half.double() @ half.double()).dtype), str((half.long() @ half.long()).dtype)]
nan = bool(torch.tensor([-1.0]).sqrt().isnan())
print(json.dumps({"worst": worst, "other": other, "nan": nan, "threads": torch.get_num_threads()}))
"""
)


def run(script: str, *, python: tuple[str, ...] = (), **environment: str) -> object:
    own = {name: value for name, value in os.environ.items() if name not in portable.VARIABLES}
    done = subprocess.run(
        [*(python or (sys.executable,)), "-c", script],
        env=own | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_avx2
def test_kernels_agree_with_double_precision() -> None:
    found = run(KERNELS)
    assert isinstance(found, dict)
    assert len(found["worst"]) == 9 and max(found["worst"].values()) < 2e-6
    assert found["other"] == ["torch.bfloat16", "torch.float64", "torch.int64"]  # PyTorch's own kernels
    assert found["nan"] and found["threads"] == 1


@pytest.mark.slow
@needs_avx2
def test_digits_do_not_depend_on_the_environment() -> None:
    assert run(TRAINING) == run(TRAINING, **HOSTILE)


@pytest.mark.slow
@needs_avx2
def test_other_settings_would_change_digits() -> None:
    """Else the tests above and below show nothing."""
    machine = TRAINING.replace(CHOOSE, "")
    assert len({str(run(TRAINING)), str(run(machine)), str(run(machine, **HOSTILE))}) == 3


@needs_avx2
@pytest.mark.long
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
@pytest.mark.parametrize("processor", ["Haswell", "EPYC-Rome"])  # of Intel and of AMD
def test_digits_are_those_of_other_processors(processor: str) -> None:
    emulated = ("qemu-x86_64", "-cpu", processor, "-0", sys.executable, os.path.realpath(sys.executable))
    assert run(TRAINING, python=emulated) == run(TRAINING)


@pytest.mark.parametrize(
    ("code", "warning"),
    [
        ("import numpy", "not in this process, which imported NumPy before"),
        ("from vlp_models.common import portable; portable.cpu_flags = lambda: {'sse2', 'avx'}", "lacks AVX2"),
    ],
    ids=["after NumPy", "a processor without AVX2"],
)
def test_instructions_that_cannot_be_chosen_are_left_alone_with_a_warning(code: str, warning: str) -> None:
    with pytest.raises(AssertionError, match=warning):
        run(code + START.partition("import numpy")[0])


STAGE = """
import json
from vlp_models.cli.pipeline import run_stage
from vlp_models.common.portable import is_portable
from vlp_models.errors import DataError
try:
    run_stage("tokenizer", "", "params.yaml")
except DataError:  # there is nothing to read
    pass
import torch
print(json.dumps([is_portable(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()]))
"""


@pytest.mark.slow
@needs_avx2
@pytest.mark.parametrize("mode", ["portable", "machine"])
def test_stages_follow_params(tmp_path: Path, mode: str) -> None:
    text = (ROOT / "params.yaml").read_text()
    assert "reproducible: portable " in text
    (tmp_path / "params.yaml").write_text(text.replace("reproducible: portable ", f"reproducible: {mode} "))
    found = run(f"import os\nos.chdir({str(tmp_path)!r})\n{STAGE}", OMP_NUM_THREADS="2", ATEN_CPU_CAPABILITY="default")
    assert found == ([True, 1, "AVX2"] if mode == "portable" else [False, 2, "DEFAULT"])
