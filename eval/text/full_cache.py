"""Names of accuracies that are reported beside the full cache's own accuracy."""

from collections.abc import Mapping

RETRIEVED = "retrieved"
RETRIEVED_FULL = "retrieved_full"
"""Name of the metric `retrieved` of the full cache itself."""
MIN_FULL_ACCURACY = 0.5
"""Full-cache accuracy below which the model itself fails the task, so that methods cannot be compared."""
STRING_MATCH_ALL, STRING_MATCH_PART = "string_match_all", "string_match_part"
CHANGES: Mapping[str, str] = {
    name: f"{name}_change" for name in ("accuracy", "exact_answer", STRING_MATCH_ALL, STRING_MATCH_PART)
}
"""Name of the metric of the change to the full cache, by accuracy."""
TASKS = (RETRIEVED, STRING_MATCH_ALL, STRING_MATCH_PART)
"""Accuracies of tasks whose questions a capable model answers without error."""
