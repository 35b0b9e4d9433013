"""Atomic writes, file locks, log lines, and progress without a terminal."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from vlp_models.common import io, progress
from vlp_models.common.io import atomic_write, link_or_copy, output_directory, scratch_directory, write_json
from vlp_models.common.lock import file_lock
from vlp_models.common.log import get_logger
from vlp_models.errors import BusyError, DataError, path_of


def test_atomic_write_replaces_a_file_only_if_the_block_succeeds(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file.json"
    write_json(file, {"b": 1, "a": "ü"})
    assert file.read_text(encoding="utf-8") == '{\n  "a": "ü",\n  "b": 1\n}\n'
    with pytest.raises(KeyboardInterrupt), atomic_write(file, sync=True) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert "ü" in file.read_text(encoding="utf-8")
    assert [path.name for path in file.parent.iterdir()] == ["file.json"]


def test_output_directory_replaces_a_folder_only_if_the_block_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "stale").touch()  # a killed process left it
    with output_directory(folder) as temporary:
        (temporary / "one").touch()
    with pytest.raises(ValueError, match="no"), output_directory(folder) as temporary:
        (temporary / "two").touch()
        raise ValueError("no")
    assert [path.name for path in folder.iterdir()] == ["one"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_scratch_directory_is_removed_with_those_that_killed_processes_left(tmp_path: Path) -> None:
    leftover = tmp_path / ".work" / ".copy.partial" / "left"
    leftover.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), scratch_directory(tmp_path / ".work" / "copy") as folder:
        with scratch_directory(tmp_path / ".work" / "copy") as other:
            (other / "file").touch()
        assert folder.is_dir() and not other.exists() and not leftover.exists()
        raise KeyboardInterrupt
    assert not list((tmp_path / ".work").iterdir())


def write_half(path: Path, text: str) -> None:
    (path / "one" if path.is_dir() else path).write_text(text)


def read_whole(path: Path) -> str:
    return (path / "one" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("begin", [atomic_write, output_directory])
def test_two_writers_of_one_output_do_not_disturb_each_other(
    tmp_path: Path, begin: Callable[[Path], AbstractContextManager[Path]]
) -> None:
    output = tmp_path / "out"
    for round_ in range(2):  # the second replaces an output
        slow, fast = begin(output), begin(output)
        with slow as first:
            write_half(first, "slow, ")
            with fast as second:
                write_half(second, f"fast {round_}")
                assert read_whole(first) == "slow, "
            assert read_whole(output) == f"fast {round_}"
            write_half(first, f"slow {round_}")
        assert read_whole(output) == f"slow {round_}"
        assert list(tmp_path.iterdir()) == [output]


def test_a_directory_that_is_kept_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with output_directory(output, keep=True) as first:
        write_half(first, "slow")
        with output_directory(output, keep=True) as second:
            write_half(second, "fast")
    assert read_whole(output) == "fast"
    assert list(tmp_path.iterdir()) == [output]


WRITE = """
import sys
from pathlib import Path
from vlp_models.common.io import atomic_write, output_directory
with output_directory(Path(sys.argv[1])) as folder, atomic_write(Path(sys.argv[2])) as file:
    (folder / "one").touch()
    print("started", flush=True)
    input()
"""


def test_only_partial_outputs_of_ended_writers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"

    def write() -> list[str]:
        with output_directory(folder), atomic_write(file):
            pass
        return sorted(path.name for path in tmp_path.iterdir())

    command = [sys.executable, "-c", WRITE, str(folder), str(file)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "started\n"
    both = [".file.partial", ".folder.partial", "file", "folder"]
    assert write() == both
    other.kill()
    other.wait()
    monkeypatch.setattr(io, "_machine", lambda: "0" * 8)  # as if the other one ran on a lost machine
    assert write() == both
    monkeypatch.setattr(io, "LOST_SECONDS", -1.0)
    assert write() == ["file", "folder"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "started\n"
    other.kill()
    other.wait()
    monkeypatch.undo()
    assert write() == ["file", "folder"]


def test_an_error_of_a_partial_output_names_the_output(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, output_directory(tmp_path / "out") as folder:
        (folder / "absent" / "one").write_text("")
    assert path_of(caught.value) == str(tmp_path / "out" / "absent" / "one")
    with pytest.raises(IsADirectoryError) as caught, atomic_write(tmp_path / "file") as file:
        file.unlink()
        file.mkdir()
        file.read_text()
    assert path_of(caught.value) == str(tmp_path / "file")


def test_a_file_is_copied_where_links_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").write_text("1")
    link_or_copy(tmp_path / "one", tmp_path / "linked")
    monkeypatch.setattr(io, "_file_system", lambda device: "fuse.seaweedfs")
    link_or_copy(tmp_path / "one", tmp_path / "copied")
    assert [(tmp_path / name).stat().st_nlink for name in ("linked", "copied")] == [2, 1]
    assert (tmp_path / "copied").read_text() == "1"


def test_file_lock_names_its_holder_and_outlives_it_in_a_child(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    holder = rf"another `vlp run` \(pid {os.getpid()}\) is using this workspace"
    with file_lock(path, "`vlp run`") as descriptor:
        with pytest.raises(BusyError, match=holder), file_lock(path, "`vlp forget`"):
            pass
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor], text=True
        )
    messages: list[str] = []
    with pytest.raises(BusyError), file_lock(path, "`vlp forget`", wait=0.1, on_wait=messages.append):
        pass
    assert "waiting up to 0 s for another `vlp run`" in messages[0]
    child.communicate("\n")
    with file_lock(path, "`vlp forget`"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(DataError, match=rf"{tmp_path}/run\.lock: the file system has no file locks .*local disk"),
        file_lock(tmp_path / "run.lock", "`vlp run`"),
    ):
        pass


def test_log_lines_go_to_stderr_and_warnings_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_logger("flows.x")
    assert logger.name == "vlp_models.flows.x"
    logger.info("one")
    logger.warning("two")
    assert capsys.readouterr() == ("", "one\nwarning: two\n")


TRAINING = """
import subprocess, sys, time
from pathlib import Path
from vlp_models.common import progress
from vlp_models.common.log import configure_logging, get_logger, steady_output
configure_logging()
steady_output()
progress.FIRST_LINE = 0
while not Path("reader is gone").exists():
    time.sleep(0.01)
with progress.progress_bar("training", 3, "updates") as bar:
    for step in range(3):
        print("step", step, "\N{SNOWMAN}", flush=True)
        get_logger("test").warning("a warning")
        bar.advance()
print("buffered")
subprocess.run(["sh", "-c", "echo from a child; echo from a child >&2"], check=True)
Path("ended").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize("log", ["pipe", "terminal", "/dev/full"])
def test_nobody_needs_to_read_the_log_of_a_training(log: str, tmp_path: Path) -> None:
    if log == "/dev/full":
        reader, writer = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY)
    else:
        reader, writer = os.pipe() if log == "pipe" else os.openpty()
    env = {**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parents[2])}
    training = [sys.executable, "-c", TRAINING]
    with subprocess.Popen(
        training, cwd=tmp_path, env=env, stdout=writer, stderr=writer, start_new_session=True
    ) as process:
        os.close(writer)
        os.close(reader)
        (tmp_path / "reader is gone").touch()
    assert process.returncode == 0 and (tmp_path / "ended").exists()


def test_progress_is_a_line_now_and_then_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE", 0.0)
    with progress.progress_bar("detector", 6, "steps") as bar:
        for _ in range(6):
            bar.advance("loss 0.5")
    assert "detector  3/6 steps  loss 0.5" in capsys.readouterr().err
