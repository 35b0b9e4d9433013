"""The code of a registered version, compared with the commit that its lineage names."""

from __future__ import annotations

import subprocess
from pathlib import Path

from vlp_models.common.source_hash import hash_source
from vlp_models.contrib.verify.version import check_code
from vlp_models.pipeline.lineage import git_commit


def test_code_of_a_version_is_compared_with_its_commit(tmp_path: Path) -> None:
    file = tmp_path / "vlp_models" / "serving" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("served = 1\n")
    for command in ("init", "add .", "-c user.name=a -c user.email=a@b commit -m 1"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    commit, code = git_commit(tmp_path), {"serving/x.py": hash_source(file)}
    other = {"serving/x.py": "0" * 64}
    assert check_code(tmp_path, commit, code)[0] == "holds"
    assert check_code(tmp_path, commit, other)[0] == "differs"
    assert check_code(tmp_path, f"{commit}+changes", other)[0] == "unknown"
    assert check_code(tmp_path, "1" * 40, code) == ("unknown", f"commit {'1' * 12} is not in this checkout")
