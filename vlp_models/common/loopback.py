"""The loopback interface, over which the processes of one machine meet."""

from __future__ import annotations

import socket

from vlp_models.errors import LaunchError

CONNECT_SECONDS = 10.0


def require_loopback() -> int:
    """Connect to this process over 127.0.0.1, where processes of a training would try for minutes; return a free port.

    Raises:
        LaunchError: this machine, or the sandbox that this process is in, has no loopback interface.
    """
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            address, port = server.getsockname()
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
            return int(port)
    except OSError as error:
        raise LaunchError(
            f"processes of this machine cannot connect to each other: 127.0.0.1 does not answer ({error}); start the "
            "loopback interface (`ip link set lo up`), or train with one process (`trainer.launcher: local`, "
            "`trainer.devices: 1`, and `cpu_processes: 1` of the run)"
        ) from None
