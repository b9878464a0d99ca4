"""Accuracies beside which the full cache's own score stands."""

from collections.abc import Mapping

RETRIEVED = "retrieved"
RETRIEVED_FULL = "retrieved_full"
"""Name of the metric `retrieved` of the full cache itself."""
SOLVED = 0.5
"""Share under the full cache below which the model itself fails the task: such runs compare no methods."""
STRING_MATCH_ALL, STRING_MATCH_PART = "string_match_all", "string_match_part"
CHANGES: Mapping[str, str] = {
    name: f"{name}_change" for name in ("accuracy", "exact_answer", STRING_MATCH_ALL, STRING_MATCH_PART)
}
"""Metrics of an accuracy's difference to the full cache, by the accuracy."""
TASKS = (RETRIEVED, STRING_MATCH_ALL, STRING_MATCH_PART)
"""Accuracies of tasks that a model can solve in full."""
