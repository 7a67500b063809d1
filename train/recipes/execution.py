"""Where a recipe's products run, and how many multiply-adds it leaves in the model's dtype."""

from collections.abc import Sequence
from typing import NamedTuple

import adahop_jax as ah


class Execution(NamedTuple):
    """How a recipe's products run.

    Attributes:
      runs_on: the backend with its path, "emulated", or "dtype" where nothing is quantised.
      share_in_dtype: of the blocks' multiply-adds, how many stay in the model's `dtype`: all of a
        product in full, k / n of one that extracts k of n rows or columns.
    """

    runs_on: str
    share_in_dtype: float

    def __str__(self) -> str:
        return f"runs on: {self.runs_on}\nmultiply-adds left in dtype: {self.share_in_dtype:.1%}"


def execution(plan: ah.Plan | None, layers: Sequence[ah.LayerInfo]) -> Execution:
    """Returns where a plan's products run, and their share in `dtype`.

    Args:
      plan: in force; None for an emulated recipe, which quantises all three products of a layer.
      layers: of the model.
    """
    if plan is None:
        return Execution("emulated", 0.0)
    explanation = ah.explain(plan, layers)
    backends = dict.fromkeys(row.backend for row in explanation.rows if row.backend)
    return Execution(", ".join(backends) or "dtype", explanation.share_in_dtype)
