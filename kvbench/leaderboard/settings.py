"""Settings that runs must share to be in one ranking, and sentences on those in which two rankings differ."""

from collections.abc import Mapping

from kvbench.core.files import hash_values
from kvbench.core.storage import CODE_DTYPES
from kvbench.eval.protocol.scores import Metric
from kvbench.leaderboard.datasets import Entry
from kvbench.report.seeds import find_seeds
from kvbench.runs.record.results import Results

DIGITS = 12
"""Digits of hashes."""
HASHED = {
    "texts": "texts of the prompts",
    "reference": "reference",
    "reference's samples": "samples of the reference",
    "weights": "weights",
    "evaluator": "settings, code or files of the metric",
}
"""Settings whose values are hashes, in words."""

INDEPENDENT = ("weights", "evaluator")
"""Hashes that other settings do not explain."""

Fields = Mapping[str, str]
"""Values as text by name."""


def list_fields(entry: Entry, name: str, metric: Metric, reference_samples: str) -> Fields:
    """Return what a run shares with the others of a ranking.

    Args:
        entry: the run.
        name: name of the metric.
        metric: the run's metric.
        reference_samples: digits that tell copies of the reference with other samples.
    """
    run = entry.results
    weights = (run.provenance or {}).get("weights_sha256")
    return {
        "model": run.model_label,
        "metric": name,
        "protocol": f"{metric.evaluator} {metric.protocol}".strip(),
        "better": metric.better,
        "unit": metric.unit or "none",
        "budget": _name_budget(run),
        "sinks": str(run.setting("sinks")),
        **flatten(run.setting("protect"), "protect"),
        "prompts": run.prompts_label,
        "samples": str(run.n),
        "seed": str(find_seeds(run)[0]),
        "noise": run.noise,
        "storage": _name_storage(run),
        "texts": entry.drawn[:DIGITS],
        "weights": str(weights)[:DIGITS],
        "reference": str(run.reference),
        "reference's samples": reference_samples[:DIGITS],
        "evaluator": _hash_evaluator(run, metric),
    }


def _name_budget(run: Results) -> str:
    share, unit = run.memory.allowed
    return f"{100 * share:.6g} % of the full cache's {unit}"


def _name_storage(run: Results) -> str:
    """Return the low-bit storage; a budget in bytes compares storages, so there it is no setting of a ranking."""
    if run.memory.budget_unit == "bytes":
        return "any"
    if run.stored not in CODE_DTYPES:
        return "16 or 32 bits"
    return f"{run.stored} {hash_values(run.setting('storage'))[:DIGITS]}"


def _hash_evaluator(run: Results, metric: Metric) -> str:
    """Return the hash of a metric's settings, and of the code and files that it reads, whatever its evaluator's key."""
    same = {name: entry for name, entry in run.evaluated.items() if entry.protocol == metric.protocol}
    own = [entry for name, entry in same.items() if name.startswith(metric.evaluator)]
    known = [
        hash_values([_leave_out_neutral(flatten(entry.settings, ""), entry.inputs or {}), entry.inputs])
        for entry in own or same.values()
    ]
    return hash_values(sorted(known))[:DIGITS]


def _leave_out_neutral(settings: Fields, inputs: Mapping[str, str]) -> Fields:
    """Return the settings without batches, and without the paths of files whose hashes are recorded."""

    def is_neutral(name: str) -> bool:
        parent, _, last = name.rpartition(".")
        is_hashed = last == "path" and f"{parent}.sha256" in settings
        return last == "batch" or is_hashed or bool(inputs.get(name.removeprefix(".")))

    return {name: value for name, value in settings.items() if not is_neutral(name)}


def list_details(run: Results) -> Fields:
    """Return the settings of the model and of the prompts, which the hashes cover, without paths of files."""
    return {
        name: value
        for group in ("model", "prompts")
        for name, value in flatten(run.setting(group), group).items()
        if not name.startswith("model.sources.")
    }


def flatten(value: object, path: str) -> dict[str, str]:
    """Return the settings of a section as text by dotted path, without unset ones."""
    if not isinstance(value, Mapping):
        return {} if value is None else {path: str(value)}
    parts = [flatten(one, f"{path}.{key}") for key, one in value.items()]
    return {name: text for part in parts for name, text in part.items()}


def explain_difference(ours: Fields, theirs: Fields, our_details: Fields, their_details: Fields) -> list[str]:
    """Return what differs between two rankings, as `sinks 2, not 1`.

    Hashes are named if no setting explains them, which none does for weights and the metric.

    Args:
        ours: fields of the ranking that is described.
        theirs: fields of another ranking.
        our_details: settings of `list_details` behind the first.
        their_details: settings behind the other.
    """
    names = [
        name
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name) and not _is_of_sinks(name, ours, theirs)
    ]
    behind = [
        f"{name} {our_details.get(name, 'not set')}, not {their_details.get(name, 'not set')}"
        for name in {**our_details, **their_details}
        if our_details.get(name) != their_details.get(name)
        and ("texts" if name.startswith("prompts.") else "reference") in names
    ]
    plain = [
        f"{name} {ours.get(name, 'not set')}, not {theirs.get(name, 'not set')}"
        for name in names
        if name not in HASHED
    ]
    known = [*plain, *(text for text in behind if text not in plain)]
    return [*known, *(HASHED[name] for name in names if name in (INDEPENDENT if known else HASHED))]


def _is_of_sinks(name: str, *sides: Fields) -> bool:
    """Return whether a setting of `protect` has the value of `sinks` on every side, as it has by default."""
    return name.startswith("protect.") and all(one.get(name) == one.get("sinks") for one in sides)
