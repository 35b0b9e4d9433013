"""What an input may not do: raise anything but a `VLPError`, leave its folder, reach the network, or take too long."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from vlp_models.errors import VLPError

ROOT = Path(__file__).parents[2]
LONGEST = 2.0  # seconds of CPU time of this process
WAITED = 60.0  # and of a clock on the wall, for what waits and computes nothing
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM = ("/dev", "/proc", "/sys", "/usr", "/lib", "/lib64", "/etc/localtime", "/etc/mime.types", "/etc/os-release")
_MAY_BE_READ = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix, ROOT, *_SYSTEM)]
_CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}
_PROCESSES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn"}
_NETWORK = {"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "urllib.Request"}
_UNPICKLES = {"pickle.find_class", "marshal.loads"}


class Hang(BaseException):
    """It took too long. No `Exception`, so that nothing takes it for a damaged file."""


@dataclass(frozen=True)
class Finding:
    """kind: crash, escape or hang; where: the innermost line of this project, which distinguishes findings."""

    target: str
    kind: str
    what: str
    where: str


class Watch:
    """Run inputs in `folder` and report forbidden actions. One instance per process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._looking = False
        self._others: set[int | None] = set()  # threads that other tests of this process have left
        self._escapes: list[str] = []
        sys.addaudithook(self._audit)  # can't be taken back, hence `_looking`

    def run(self, target: str, attempt: Callable[[bytes], Any], data: bytes) -> list[Finding]:
        """Empty where the input was taken, or refused as it should be."""
        found: list[Finding] = []
        self._escapes = []
        self._others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        began = time.process_time()
        try:
            with self._within_time(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                self._looking = True
                attempt(data)
        except VLPError:
            pass
        except Hang as error:
            found.append(Finding(target, "hang", "stopped while it ran", _place(error)))
        except (Exception, SystemExit) as error:
            found.append(Finding(target, "crash", f"{type(error).__name__}: {error!s:.200}", _place(error)))
        finally:
            self._looking = False
        seconds = time.process_time() - began
        if seconds > LONGEST and not any(finding.kind == "hang" for finding in found):
            found.append(Finding(target, "hang", f"{seconds:.1f} s", "in one call that can't be stopped"))
        return found + [Finding(target, "escape", what, "") for what in dict.fromkeys(self._escapes)]

    @contextmanager
    def _within_time(self) -> Iterator[None]:
        def stop(*_: Any) -> None:
            raise Hang

        timers = ((signal.SIGPROF, signal.ITIMER_PROF, LONGEST), (signal.SIGALRM, signal.ITIMER_REAL, WAITED))
        before = [signal.signal(number, stop) for number, _, _ in timers]
        for _, timer, seconds in timers:
            signal.setitimer(timer, seconds)
        try:
            yield
        finally:
            for (number, timer, _), handler in zip(timers, before, strict=True):
                signal.setitimer(timer, 0)
                signal.signal(number, handler)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._looking or threading.get_ident() in self._others:
            return
        if event == "open":
            self._opened(*arguments)
        elif event in _CHANGES:
            for path in arguments[:2]:
                if isinstance(path, (str, bytes, os.PathLike)) and not self._inside(path):
                    self._escapes.append(f"{event} {path!r:.120}")
        elif event in _PROCESSES or event in _NETWORK or (event in _UNPICKLES and not _imports()):
            self._escapes.append(f"{event} {arguments!r:.120}")

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        writes = bool((flags or 0) & _WRITES) or any(letter in (mode or "") for letter in "wax+")
        if self._inside(path) or os.fsdecode(path) == os.devnull:
            return
        place = _resolved(path)
        if not writes and any(place == Path(folder).resolve() for folder in sys.path):  # where imports look
            return
        if place.parent.name != "__pycache__" and (writes or not any(map(place.is_relative_to, _MAY_BE_READ))):
            self._escapes.append(f"{'write' if writes else 'read'} {place}")

    def _inside(self, path: str | bytes | os.PathLike[Any]) -> bool:
        # a name that is opened below a folder's descriptor (data/images of a drop) is relative
        return _resolved(path).is_relative_to(self.folder)


@contextmanager
def workplace() -> Iterator[Path]:
    """Make a folder to work in, next to files that must not be touched: a secret, and links to it."""
    with tempfile.TemporaryDirectory(prefix="vlp-fuzz-") as name:
        inside = Path(name).resolve() / "inside"
        inside.mkdir()
        (inside.parent / "outside").mkdir()
        (inside.parent / "outside" / "secret.txt").write_text("secret\n")
        before, temporary = Path.cwd(), tempfile.tempdir
        os.chdir(inside)
        tempfile.tempdir = str(inside)
        try:
            yield inside
            left = sorted(path.name for path in (inside.parent / "outside").iterdir())
            assert left == ["secret.txt"], f"something was written next to the folder: {left}"
        finally:
            tempfile.tempdir = temporary
            os.chdir(before)


def _resolved(path: str | bytes | os.PathLike[Any]) -> Path:
    return Path(os.path.realpath(os.fsdecode(path).replace("\0", "")))


def _imports() -> bool:
    """Whether a module is being loaded just now, whose byte code is unmarshalled."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _place(error: BaseException) -> str:
    lines = traceback.extract_tb(error.__traceback__)
    own = [line for line in lines if "/vlp_models/" in line.filename or "/flows/" in line.filename]
    last = (own or lines)[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"
