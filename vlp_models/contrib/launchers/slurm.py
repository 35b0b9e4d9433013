"""`trainer.launcher: slurm`: one job of `trainer.num_nodes` nodes, submitted with submitit.

A job that reaches its time limit, or is preempted, saves its state and is requeued; it resumes from there. `scancel`
ends it. The job's own files are in .work/launches/STAGE-RUN/slurm.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import submitit
from submitit.helpers import DelayedSubmission, TorchDistributedEnvironment, clean_env

from vlp_models.common.environment import program_environment
from vlp_models.common.log import get_logger
from vlp_models.contrib.launchers.launch import POLL, STOP, STOPPED, Launch, last_line, read_outcome
from vlp_models.contrib.launchers.node import run_node
from vlp_models.contrib.launchers.params import LaunchersParams
from vlp_models.errors import LaunchError
from vlp_models.params import Params

logger = get_logger(__name__)

# A state in which a job stays. PREEMPTED is not one of them: it is requeued.
ENDED: tuple[str, ...] = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE")  # plain-ok
ENDED += ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
POLL_EVERY = 5.0  # seconds: slurmctld serves many users


class Node:
    """What submitit runs on every node. It is pickled into the job's folder."""

    def __init__(self, folder: str, launch_id: str) -> None:
        self.folder, self.launch_id = folder, launch_id

    def __call__(self) -> int:
        if Launch.read(Path(self.folder)).id != self.launch_id:  # this job was requeued meanwhile
            raise RuntimeError("a newer launch of this training has replaced this job")
        # submitit derives the address of the first node, the same on all of them.
        where, index = TorchDistributedEnvironment(), submitit.JobEnvironment().global_rank
        code = run_node(Path(self.folder), index, f"{where.master_addr}:{where.master_port}")
        if code:
            raise RuntimeError(f"torchrun exited with {code}")
        return code

    def checkpoint(self) -> DelayedSubmission | None:
        """Stop the training, which saves its state; called by submitit's signal handler on the first node.

        Returns:
            None if there is nothing to requeue: the training has ended, or the user stops it.
        """
        folder = Path(self.folder)
        # Read before the file is written: it distinguishes the user's stop from SLURM's.
        stopped_by_user = (folder / STOP).exists()
        (folder / STOP).touch()
        while (outcome := read_outcome(folder)) is None:  # SLURM kills the job after `launchers.slurm.save_seconds`
            time.sleep(POLL)
        if stopped_by_user or outcome["code"] not in STOPPED:
            return None
        # The requeued job would read the file and stop at once.
        (folder / STOP).unlink()
        return DelayedSubmission(self)


class SlurmJob:
    """A submitted job; see `launch.Job`. Its state comes from `squeue`: `sacct` needs a database many clusters lack."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self._polled, self._logged = 0.0, ""

    def end(self) -> str | None:
        # `_follow` calls this twice a second; slurmctld is asked less often.
        if time.monotonic() < self._polled + POLL_EVERY:
            return None
        self._polled = time.monotonic()
        done = subprocess.run(
            ["squeue", "--noheader", "--jobs", self.job_id, "--format", "%T %r"],
            env=program_environment(),
            capture_output=True,
            text=True,
        )
        # slurmctld does not respond: the job goes on
        failed = bool(done.returncode) and "Invalid job id" not in done.stderr
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        state = f"its state is unknown ({reason}); waiting for squeue" if failed else done.stdout.strip()
        if state and state != self._logged:
            logger.info("SLURM job %s: %s", self.job_id, state)
            self._logged = state
        if failed:
            return None
        if not state:
            return f"SLURM job {self.job_id} is gone, last seen as {self._logged or 'submitted'}"
        return f"SLURM job {self.job_id}: {state}" if state.split()[0] in ENDED else None

    def cancel(self) -> None:
        subprocess.run(["scancel", self.job_id], env=program_environment(), check=False)

    def clean_up(self) -> None:
        pass


def start(launch: Launch, params: Params) -> SlurmJob:
    """Submit the job; an error if SLURM is not installed, or refuses it."""
    p = params.section(LaunchersParams).slurm
    settings = dict(p.options)
    try:
        executor = submitit.SlurmExecutor(folder=launch.folder / "slurm", max_num_timeout=p.requeues)
        executor.update_parameters(
            job_name=launch.name,
            nodes=launch.nodes,
            ntasks_per_node=1,
            time=p.minutes,
            signal_delay_s=p.save_seconds,
            stderr_to_stdout=True,
            cpus_per_task=p.cpus_per_node or None,
            gpus_per_node=launch.devices if launch.gpu else None,
            partition=p.partition or None,
            account=p.account or None,
            srun_args=["--kill-on-bad-exit=1"],
            # Options of params.yaml come last and may change `requeue`.
            additional_parameters={"requeue": True, **settings},
        )
        with _outside_of_job() if "SLURM_JOB_ID" in os.environ else nullcontext():
            job = executor.submit(Node(str(launch.folder), launch.id))
    except (RuntimeError, OSError, submitit.core.utils.FailedJobError) as error:
        raise LaunchError(
            f"{launch.name}: SLURM did not accept the job: {last_line(error)}; see "
            "`launchers.slurm` in params.yaml, and `sinfo`"
        ) from None
    logger.info("%s: SLURM job %s", launch.name, job.job_id)
    return SlurmJob(job.job_id)


@contextmanager
def _outside_of_job() -> Iterator[None]:
    """Hide the variables of the job that `vlp run` runs in: sbatch would pass them to the new one."""
    config = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
    with clean_env():
        os.environ.update(config)
        yield
