"""From new data to promoted models, as a Prefect flow. Prefect decides when to run, DVC decides what is stale.

A project's flows/retrain.py imports it: `python -m flows.retrain` runs it without a server, prefect.yaml names it for
deployments (docs/get-started/unattended.md).
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State

from vlp_models.common.log import configure_logging, steady_output
from vlp_models.errors import VLPError, explain_system_error
from vlp_models.flows.parts import retrain_parts
from vlp_models.flows.pipeline import log_to_terminal, run_without_server
from vlp_models.flows.process import StageFailed, WorkspaceInUse
from vlp_models.flows.tasks import HOOKS, run_parts


@flow(name="retrain", flow_run_name="retrain", persist_result=False, **HOOKS)
def retrain(root: str = ".", reason: str = "") -> State[Any]:
    """Run every part of the pipeline in order, if it is stale; then the gate decides on promotion.

    Args:
        root: the project's folder. A deployment runs in it; leave the default.
        reason: what triggered the run; only logged.
    """
    if reason:
        get_run_logger().info("triggered by %s", reason)
    return run_parts(root, retrain_parts)


def main() -> int:
    """Run the same parts in this process, without a server: `dvc repro` with ingestion and promotion."""
    if sys.argv[1:]:
        sys.exit("usage: python -m flows.retrain    (in the project's root; no server is needed)")
    configure_logging()
    steady_output()
    # As Ctrl+C: the trainer below saves its state, and the webhook gets a notification.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_without_server(Path.cwd(), retrain_parts, name="retrain", log=log_to_terminal)
    except VLPError as error:
        log_to_terminal(f"vlp: {error}")
        return error.exit_code
    except (StageFailed, WorkspaceInUse) as error:
        log_to_terminal(str(error))
        return 1
    except OSError as error:
        # An OSError without a number does not come from the system, so it is a bug and keeps its traceback.
        if error.errno is None:
            raise
        log_to_terminal(f"{explain_system_error(error)}. Finished stages are kept; run again")
        return 1
    except KeyboardInterrupt:
        # 128 + SIGINT, as shells report it.
        return 130
    return 0
