"""The flow of the deployment `weekly`: from new data to promoted models. Edit it, or wrap the flow in one of your own.

Run it without a server:      python -m flows.retrain
As a deployment:              `vlp up`, which registers prefect.yaml
"""

import sys

from vlp_models.flows.retrain import main, retrain

__all__ = ["retrain"]

if __name__ == "__main__":
    sys.exit(main())
