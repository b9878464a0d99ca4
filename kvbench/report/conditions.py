"""Conditions of samples: only runs that share them stand in one figure or compete for a best value."""

from collections.abc import Mapping, Sequence

from kvbench.runs.record.results import Results

Conditions = tuple[tuple[str, str], ...]
"""Names and values: those of `LABELS`, then what else the samples depend on."""
LABELS = ("model", "prompts", "n")
UNCONDITIONAL = ("count", "download")
"""Settings of prompt sets that are no conditions: n is the number of prompts, and how files came is all one."""


def find_conditions(run: Results) -> Conditions:
    """Return a run's model, set of prompts, number of samples, weights, and the prompts' settings that have a value."""
    prompts = run.setting("prompts")
    settings = dict(prompts) if isinstance(prompts, Mapping) else {}
    others = {f"prompts.{key}": value for key, value in settings.items() if key not in UNCONDITIONAL}
    others["weights"] = str((run.provenance or {}).get("weights_sha256") or "")[:8]
    labels = zip(LABELS, (run.model_label, run.prompts_label, str(run.n)), strict=True)
    return *labels, *((name, str(value)) for name, value in sorted(others.items()) if value)


def group_conditions(runs: Sequence[Results]) -> dict[str, list[Results]]:
    """Return the runs of each conditions by their name, `infinity_tiny (scenes), n = 96`.

    Further conditions are named where groups differ in nothing else: `llama (passkey), n = 8, prompts.context = 512`.
    """
    groups: dict[Conditions, list[Results]] = {}
    for run in runs:
        groups.setdefault(find_conditions(run), []).append(run)
    named: dict[str, list[Results]] = {}
    for own in sorted(groups):
        alike = [dict(other) for other in groups if other[: len(LABELS)] == own[: len(LABELS)]]
        every = dict.fromkeys(name for one in alike for name in one)
        differ = [name for name in every if len({one.get(name) for one in alike}) > 1]
        values = dict(own)
        more = "".join(f", {name} = {values.get(name, '-')}" for name in differ)
        named[f"{values['model']} ({values['prompts']}), n = {values['n']}{more}"] = groups[own]
    return named
