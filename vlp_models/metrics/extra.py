"""An additional metric: a plugin that scores predictions in addition to the metrics that their task computes.

def score(predictions, samples):
    values = [float("red" in p["caption"].split()) for p in predictions]
    return mean_score("mentions_red", values, [s.image_id for s in samples], items=[s.sample_id for s in samples])

METRIC = Metric(name="mentions_red", score=score)
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlp_models.common.log import get_logger
from vlp_models.common.plugins import import_target
from vlp_models.data.sample import Sample
from vlp_models.errors import ParamsError, first_line
from vlp_models.metrics import METRICS
from vlp_models.metrics.score import Score, Statistic, not_computed

logger = get_logger(__name__)
Predictions = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric that evaluations compute if `evaluate.metrics` names it.

    name        as in `plugins.metrics`, and of the score
    score       (predictions, samples with their references) of one dataset and split -> its value in percent, with the
                evidence per item that intervals and the promotion gate need (metrics/score.py: `mean_score`)
    statistics  name -> function of per-item sums, if `mean` and the others of `STATISTICS` do not fit
    """

    name: str
    score: Callable[[Predictions, Sequence[Sample]], Score]
    statistics: Mapping[str, Statistic] = field(default_factory=dict)


def load_metric(name: str) -> Metric:
    """Import and return a metric of `plugins.metrics`.

    Raises:
        ParamsError: it cannot be imported, or is not a `Metric` of this name.
    """
    plugin = import_target(METRICS[name])
    if not isinstance(plugin, Metric) or plugin.name != name:
        other = f"a Metric named `{plugin.name}`" if isinstance(plugin, Metric) else f"a {type(plugin).__name__}"
        where = f"plugin {METRICS[name]}: `plugins.metrics.{name}`"
        raise ParamsError(f"{where} must be a Metric named `{name}`, but is {other}")
    return plugin


def score_by(metric: Metric, predictions: Predictions, samples: Sequence[Sample]) -> Score:
    """Return the metric's score; without a value, and with the reason as its note, if the metric fails."""
    try:
        result = metric.score(predictions, samples)
        if not isinstance(result, Score) or result.metric != metric.name:
            raise ValueError(f"it must return a Score named {metric.name!r}, not {getattr(result, 'metric', result)!r}")
        # Python's float, because JSON cannot write some of numpy's numbers.
        return replace(result, value=None if result.value is None else float(result.value))
    except Exception as error:  # a plugin's code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        # A single frame is the call in this function, so the error is not at a line of the plugin.
        location = f"{frames[-1].filename}:{frames[-1].lineno}: " if len(frames) > 1 else ""
        reason = f"{location}{type(error).__name__}: {first_line(error)}"
        logger.warning("metric %s: not computed: %s", metric.name, reason)
        return not_computed(metric.name, len(predictions), reason)
