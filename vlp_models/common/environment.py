"""The environment of this process and of every program that it starts.

Shells, hooks, jobs and desktops leave variables behind that other programs were meant to read. `settle_environment`
repairs `os.environ`: `vlp` calls it before anything else, a flow before it starts anything. `program_environment` is
the environment of every program that is started, `command_environment` that of DVC and its stages.
"""

from __future__ import annotations

import codecs
import locale
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from vlp_models.common.device import container_cpus, cpu_count
from vlp_models.common.log import get_logger
from vlp_models.common.user import current_user

logger = get_logger(__name__)

TELEMETRY_OFF = {
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
}
# A hook, or an alias for dotfiles, names another repository; that of a project is found from its folder.
REPOSITORY = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"),
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_PREFIX"),
)
# A job or notebook that this shell was started in as one of several processes.
GROUP = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("DVC_STAGE", "DVC_ROOT"),
)
SHELLS = ("sh", "bash", "dash", "zsh")
PATTERNS = dict.fromkeys(
    (
        *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"),
        *("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"),
        *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"),
    ),
    r"\d+",
) | {
    "OMP_NUM_THREADS": r"0*[1-9]\d*(\s*,\s*\d+)*",  # a list: of each level of nested threads
    "VLP_GRACE": r"\d+(\.\d*)?",
    "VLP_LOG_LEVEL": "debug|info|warning|error|critical",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# [scheme://][user:password@]host[:port][/], as every client reads it
PROXY = re.compile(
    r"(?:(?:https?|socks5h?)://)?(?:[^/\s?#]*@)?(?:\[[\da-f:]+\]|[^/\s?#:@\[\]]+)(?::\d+)?/?", re.IGNORECASE
)
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def settle_environment() -> None:
    """Repair `os.environ`. What the user has set and is not used is logged, once: started programs inherit the rest."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)
    for name in REPOSITORY:
        os.environ.pop(name, None)
    # DVC and torch fail for a user whom the password database lacks and who has none of these, as getpass reads them.
    if not any(os.environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
        os.environ["USER"] = current_user()
    for line in [*_settle_values(), *_settle_proxies()]:
        logger.warning(line)
    # Threads that wait actively slow each other down tenfold once there are more of them than cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if container_cpus() < (os.cpu_count() or 1):  # torch counts the machine's processors, not the container's limit
        os.environ.setdefault("OMP_NUM_THREADS", str(cpu_count()))


def program_environment(**values: str) -> dict[str, str]:
    """Return the environment of a program: this one, in English and UTF-8, and `values`.

    What programs print is read here, so it must not depend on the user's language; and in the C locale of containers
    and cron, Java opens no path with an umlaut.
    """
    settle_environment()
    env = _plain_python(os.environ)
    # A program runs the code that runs here, also where that is not installed but on the path.
    code, path = str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")
    if code not in (sysconfig.get_path("purelib"), path.partition(os.pathsep)[0]):
        env["PYTHONPATH"] = f"{code}{os.pathsep}{path}".rstrip(os.pathsep)
    # LANGUAGE comes before LC_ALL.
    # PYTHONSAFEPATH: with `python -m`, a queue.py in the project would come before that of Python.
    return env | {"LC_ALL": "C.UTF-8", "LANGUAGE": "", "PYTHONUTF8": "1", "PYTHONSAFEPATH": "1"} | values


def command_environment(*, keep_order: bool = False) -> dict[str, str]:
    """Return the environment of DVC and the stages it runs.

    A stage's command is `vlp ...`: the one next to this interpreter comes first on the PATH, even if the venv is not
    activated. DVC runs it with $SHELL, which is no shell for a service's account. It is one process, never one of a
    group that something else has started.

    Args:
        keep_order: leave the PATH as it is if it has the interpreter's folder: a deployment's own `vlp` wrapper may
            come before it.
    """
    interpreter, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    folders = path.split(os.pathsep)
    is_chosen = folders[0] == interpreter or (keep_order and interpreter in folders)
    shell = os.environ.get("SHELL", "")
    is_shell = Path(shell).name in SHELLS and os.access(shell, os.X_OK)
    env = program_environment(
        PATH=path if is_chosen else f"{interpreter}{os.pathsep}{path}", SHELL=shell if is_shell else "/bin/sh"
    )
    return {name: value for name, value in env.items() if name not in GROUP}


def restart_plainly() -> None:
    """Start this process again if variables of Python make it drop docstrings, fail at warnings or not write UTF-8.

    Great Expectations needs docstrings, every library warns, and the pipeline's files and names are UTF-8.
    """
    is_utf8 = sys.flags.utf8_mode or codecs.lookup(locale.getpreferredencoding(False)).name == "utf-8"
    plain = _plain_python(os.environ)
    # Without the variables, `python -E`, there is nothing to change.
    if (len(plain) < len(os.environ) or not is_utf8) and not sys.flags.ignore_environment:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], plain | {"PYTHONUTF8": "1"})


def _plain_python(env: Mapping[str, str]) -> dict[str, str]:
    harmful = {
        "PYTHONOPTIMIZE": env.get("PYTHONOPTIMIZE") not in ("", "0", "1"),
        "PYTHONWARNINGS": "error" in env.get("PYTHONWARNINGS", ""),
    }
    return {name: value for name, value in env.items() if not harmful.get(name)}


def _settle_values() -> Iterator[str]:
    """Leave out what its reader would fail on."""
    invalid = [name for name in CERTIFICATES if os.environ.get(name) and not Path(os.environ[name]).exists()]
    for name, pattern in PATTERNS.items():
        if name in os.environ and not re.fullmatch(pattern, os.environ[name].strip(), re.IGNORECASE):
            invalid.append(name)
    for name in invalid:
        reason = "not found" if name in CERTIFICATES else "invalid value"
        yield f"{name}={os.environ.pop(name)}: {reason}; ignored"


def _settle_proxies() -> Iterator[str]:
    """Leave out what no client can use, and this machine, which needs no proxy."""
    names = [name for name in os.environ if name.lower() in PROXIES]
    for name in names:
        # GNOME writes socks:// and means version 5. `h`: the proxy resolves host names.
        proxy = re.sub(r"^socks://", "socks5h://", os.environ[name].strip(), flags=re.IGNORECASE)
        os.environ[name] = proxy
        if proxy and not PROXY.fullmatch(proxy):
            del os.environ[name]
            # Without its value, which may hold a password.
            yield f"{name}: not the address of a proxy (http://, https:// or socks5h://HOST:PORT); ignored"
    if not names:
        return
    # Every client reads the lower-case name first.
    exceptions = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    # Some clients fail on brackets and on networks of IPv6, and split at commas only.
    hosts = [re.sub(r"^\[(.*)\](:\d+)?", r"\1", host) for host in re.split(r"[\s,;]+", exceptions)]
    hosts = [host for host in hosts if host and not re.fullmatch(r"[\da-f:]*:[\da-f:.]*/\d+", host, re.IGNORECASE)]
    text = "*" if "*" in hosts else ",".join(dict.fromkeys([*hosts, *LOOPBACK]))
    os.environ |= {"no_proxy": text, "NO_PROXY": text}
