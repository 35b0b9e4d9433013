"""Compare models by the scores of their test items, from any program's result files: `vlp compare`.

Needs neither a project nor torch. `compare` is the function behind the command.
"""

from vlp_models.comparison.compare import compare
from vlp_models.comparison.scored import Columns

__all__ = ["Columns", "compare"]
