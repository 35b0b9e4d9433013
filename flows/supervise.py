"""`python -m flows.supervise -- COMMAND`: vlp_models/common/supervise.py, by the name a flow uses."""

from __future__ import annotations

from vlp_models.common.supervise import main, supervise

__all__ = ["main", "supervise"]

if __name__ == "__main__":
    main()
