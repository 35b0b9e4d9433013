"""`make audit`: known holes in the locked packages, by pip-audit, which asks a service on the network.

python tests/audit.py [--service osv] requirements.lock ...

Exit codes: 0 none known, 1 there are some in any of the files, else 69 if the service could not be reached. pip-audit
itself exits with 0 if the service has none of the packages (an index that serves files alone): here that is 69.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SECONDS = 300
WAY_OUT = "Nothing is known of its packages: run it again where the network may be used, or with another --service"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=["requirements.lock"])
    parser.add_argument("--service", choices=("pypi", "osv"), default="pypi")
    options = parser.parse_args()
    program = find()
    if program is None:
        print("audit: pip-audit is not installed; `make install` brings it", file=sys.stderr)
        return os.EX_UNAVAILABLE
    codes = set()
    for file in options.files:
        if not Path(file).is_file():
            print(f"audit: {file}: no such file", file=sys.stderr)
            return 2
        codes.add(audit(program, file, options.service))
    return 1 if 1 in codes else max(codes)


def find() -> str | None:
    installed = Path(sys.executable).parent / "pip-audit"
    return str(installed) if installed.exists() else shutil.which("pip-audit")


def audit(program: str, file: str, service: str) -> int:
    """Of one lock file, as it stands: nothing is resolved or installed."""
    command = [program, "--requirement", file, "--require-hashes", "--disable-pip", "--progress-spinner", "off"]
    command += ["--timeout", "15", "--format", "json", "--vulnerability-service", service]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        packages = json.loads(done.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        return _unknown(file, f"no answer within {SECONDS} s")
    except (ValueError, KeyError):
        return _unknown(file, (done.stderr.strip().splitlines() or ["no answer"])[-1][:300])
    asked = [package for package in packages if "vulns" in package]
    if not asked:
        return _unknown(file, f"the service ({service}) has no record of any of its {len(packages)} packages")
    holes = [(package, hole) for package in asked for hole in package["vulns"]]
    for package, hole in holes:
        fixed = ", ".join(hole["fix_versions"]) or "no release yet"
        print(f"{file}: {package['name']} {package['version']}: {hole['id']}; fixed in {fixed}")
    unasked = f"; {len(packages) - len(asked)} that the service does not know" if len(asked) < len(packages) else ""
    print(f"{file}: {len(holes)} known holes in {len(asked)} packages{unasked}")
    return int(bool(holes))


def _unknown(file: str, why: str) -> int:
    print(f"audit: {file}: {why}. {WAY_OUT}", file=sys.stderr)
    return os.EX_UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
