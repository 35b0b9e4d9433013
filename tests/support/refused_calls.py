"""Run a command whose system calls the kernel refuses, as on a file system without them (seccomp of Linux).

`python refused_calls.py link=1,flock=38 COMMAND ...`: `link` returns errno 1, `flock` 38, to the command and all that
it starts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Sequence

# The numbers of what the C library may use for a call: x86_64, then aarch64.
NUMBERS = {
    "link": ((86, 265), (37,)),
    "symlink": ((88, 266), (36,)),
    "chmod": ((90, 91, 268, 452), (52, 53, 452)),
    "rename": ((82, 264, 316), (38, 276)),
    "fsync": ((74,), (82,)),
    "flock": ((73,), (32,)),
}
LOAD_NUMBER, IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # instructions of the filter
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NO_NEW_PRIVILEGES, SET_FILTER = 38, 22  # of prctl


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def refuse(calls: str) -> None:
    """Refuse calls, such as `link=1,flock=38`, to this process and its children."""
    machine = ("x86_64", "aarch64").index(platform.machine())
    instructions = [(LOAD_NUMBER, 0, 0, 0)]
    for name, error in (call.split("=") for call in calls.split(",")):
        for number in NUMBERS[name][machine]:
            instructions += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | int(error))]
    instructions.append((RETURN, 0, 0, ALLOW))
    content = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in instructions))
    program = _Program(len(instructions), ctypes.addressof(content))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or library.prctl(SET_FILTER, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def run_refused(calls: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with refused calls; it has failed with 86 if this machine cannot refuse them."""
    return subprocess.run([sys.executable, __file__, calls, *command], capture_output=True, text=True)


if __name__ == "__main__":
    try:
        refuse(sys.argv[1])
    except (OSError, ValueError, AttributeError):
        sys.exit(86)
    os.execvp(sys.argv[2], sys.argv[2:])
