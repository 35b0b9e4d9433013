"""Several processes of one training on a CPU, forked when the training starts.

A process computes with one thread where digits must not depend on the machine (`trainer.reproducible: portable`), and
small models gain little from more. So a CPU's cores are used by processes that each compute a part of every batch and
average the gradients (DDP). A forked process shares what is in memory already, so it needs no second of imports.

On GPUs, Lightning or a launcher starts the processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from vlp_models.common.device import use_cuda
from vlp_models.common.log import get_logger
from vlp_models.common.loopback import require_loopback
from vlp_models.errors import ProcessLostError, VLPError
from vlp_models.params import TrainerParams

logger = get_logger(__name__)

END_TIMEOUT = 20.0  # seconds that a forked process may take to end after this one
NOTICE_SECONDS = 20.0  # in which the block itself should notice that a forked process is gone
PR_SET_PDEATHSIG = 1  # of prctl(2)


def count_processes(requested: int, params: TrainerParams, model: nn.Module, batch_size: int = 0) -> int:
    """Return how many processes `fit` forks for a training, itself included.

    Several are for portable digits on one node with a CPU and `devices: 1`; otherwise threads use the cores. A model
    with batch normalization, whose statistics processes can't exchange on a CPU, has one process, and so has a batch
    that can't be divided evenly. So on CPUs the number depends on params.yaml alone, and so do the digits.

    Args:
        requested: `cpu_processes` of the run.
    """
    # A launcher has started this process as one of several, and decides how many there are.
    started = "RANK" in os.environ or "LOCAL_RANK" in os.environ
    several = params.devices > 1 or params.num_nodes > 1 or params.strategy == "fsdp"
    local = params.launcher == "local" and not started and not several
    if not local or params.reproducible != "portable" or use_cuda(params.accelerator):
        return 1
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return 1
    return 1 if batch_size % requested else requested


@contextmanager
def forked_processes(count: int) -> Iterator[None]:
    """Run the block in `count` processes at once; only this one, rank 0, leaves it.

    In the block, the environment has the rank for torch.distributed and Lightning. A forked process ends with the
    block: with 0, or with 1 after an error, which it prints. It never returns, so it neither writes a result nor cleans
    up what belongs to this process. If this process ends in whatever way, they end.
    """
    if count == 1:
        yield
        return
    with _variables(count):
        parent, children, ended = os.getpid(), [], threading.Event()
        # A fork copies what is in these buffers, and both processes would write it.
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(1, count):
            child = os.fork()
            if child:
                children.append(child)
                continue
            # The forked process: it runs the block and ends here, without the cleanup of the code around it.
            code = 1
            try:
                # The kernel kills this process when its parent ends, as after `kill -9` (Linux).
                if sys.platform == "linux":
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() != parent:  # it ended before
                        os._exit(1)
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                yield
                code = 0
            except VLPError as error:
                logger.error("process %d: %s", rank, error)
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                # Not sys.exit, which would run the exit handlers that belong to the first process.
                os._exit(code)
        for child in children:
            threading.Thread(target=_end_without, args=(child, ended), daemon=True).start()
        try:
            yield
            deadline = time.monotonic() + END_TIMEOUT
            while children and time.monotonic() < deadline:
                # (0, 0) means that the child still runs.
                children[:] = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
                time.sleep(0.01)
        finally:
            ended.set()
            # Those that still run write nothing, so nothing is lost.
            for child in children:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def _end_without(child: int, ended: threading.Event) -> None:
    """End this process if a forked one failed and the block does not notice; to be run in a thread.

    The processes notice when they exchange gradients. Before they have met, torch waits half an hour for one that is
    gone, in code that no signal or exception interrupts.
    """
    with suppress(ChildProcessError):  # the block has ended, and has waited for it
        result = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        failed = result is not None and result.si_status != 0
        if failed and not ended.wait(NOTICE_SECONDS):
            logger.error("a process of this training was lost; the same command resumes from the last checkpoint")
            sys.stderr.flush()
            os._exit(ProcessLostError.exit_code)


@contextmanager
def _variables(count: int) -> Iterator[None]:
    """Set the environment variables of rank 0 for a group of `count` processes while the block runs."""
    # The processes meet on a free port; another program may take it before they open it.
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": require_loopback(), "WORLD_SIZE": count}
    group |= {"RANK": 0, "LOCAL_RANK": 0, "NODE_RANK": 0}
    before = {name: os.environ.get(name) for name in group}
    os.environ |= {name: str(value) for name, value in group.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)  # Lightning removes some
            if value is not None:
                os.environ[name] = value
