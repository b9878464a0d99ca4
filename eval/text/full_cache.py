"""Accuracies beside which the full cache's own score stands."""

from collections.abc import Mapping

RETRIEVED = "retrieved"
RETRIEVED_FULL = "retrieved_full"
"""Metric of the full cache's score of `retrieved`."""
SOLVED = 0.5
"""Share under the full cache below which the model itself fails the task: such runs compare no methods."""
CHANGES: Mapping[str, str] = {"accuracy": "accuracy_change", "exact_answer": "exact_answer_change"}
"""Metrics of an accuracy's difference to the full cache, by the accuracy."""
