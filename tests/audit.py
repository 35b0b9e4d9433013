"""`make audit`: known holes in the locked packages, by pip-audit, which asks a service on the network.

python tests/audit.py requirements.lock ...     Exit codes: 0 none known, 1 there are some, 69 nobody could be asked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SECONDS = 300
UNREACHED = (
    *("ConnectionError", "ServiceError", "Max retries exceeded", "NameResolutionError", "Failed to resolve"),
    *("ConnectTimeout", "ReadTimeout", "ProxyError", "HTTPError", "SSLError", "Connection refused"),
)


def main(files: list[str]) -> int:
    program = Path(sys.executable).parent / "pip-audit"
    found = str(program) if program.exists() else shutil.which("pip-audit")
    if found is None:
        print("audit: pip-audit is not installed; `make install` brings it", file=sys.stderr)
        return os.EX_UNAVAILABLE
    worst = 0
    for file in files:
        if not Path(file).is_file():
            print(f"audit: {file}: no such file", file=sys.stderr)
            return 2
        print(f"== {file}", flush=True)
        worst = max(worst, audit(found, file))
        if worst == os.EX_UNAVAILABLE:
            break
    return worst


def audit(program: str, file: str) -> int:
    """Of one lock file, as it stands: nothing is resolved or installed."""
    command = [program, "--requirement", file, "--require-hashes", "--disable-pip", "--progress-spinner", "off"]
    command += ["--timeout", "15"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"audit: {file}: no answer within {SECONDS} s. {_WAY_OUT}", file=sys.stderr)
        return os.EX_UNAVAILABLE
    said = done.stdout + done.stderr
    if done.returncode and any(word in said for word in UNREACHED):
        last = said.strip().splitlines()[-1]
        print(
            f"audit: {file}: the service that knows the holes can't be reached ({last:.300}). {_WAY_OUT}",
            file=sys.stderr,
        )
        return os.EX_UNAVAILABLE
    print(said.strip())
    return min(done.returncode, 1)


_WAY_OUT = "Nothing was audited: run it again where the network may be used"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["requirements.lock"]))
