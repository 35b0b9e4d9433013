"""How many processors a process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from vlp_models.common import device
from vlp_models.common.device import container_cpus, cpu_count

V1 = "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n1:name=systemd:/docker/a\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2.0),
        ("0::/host/path\n", {"cpu.max": "400000 100000\n"}, 4.0),
        (V1, {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        (V1, {"cpu/docker/a/cpu.cfs_quota_us": "-1\n", "cpu/docker/a/cpu.cfs_period_us": "100000\n"}, math.inf),
        ("", {}, math.inf),
    ],
    ids=["limit", "no limit", "of a parent", "path of the host", "version 1", "version 1, no limit", "no cgroups"],
)
def test_limit_of_the_container(tmp_path: Path, cgroup: str, files: dict[str, str], expected: float) -> None:
    paths = {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in paths.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_cpus(tmp_path) == expected


def test_processors_are_limited_by_affinity_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    counts = {}
    for limit in (math.inf, 2.5, 0.5):
        monkeypatch.setattr(device, "container_cpus", lambda limit=limit: limit)
        counts[limit] = cpu_count(), cpu_count(2)
    assert counts == {math.inf: (8, 2), 2.5: (3, 2), 0.5: (1, 1)}
