"""Conditions of samples: only runs that share them appear in one figure or compete for a best value."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from kvbench.core.config import ConfigError, show
from kvbench.report.seeds import name_seeds
from kvbench.runs.record.results import Results

Conditions = tuple[tuple[str, str], ...]
"""Names and values: those of `LABELS`, then what else the samples depend on."""
LABELS = ("model", "prompts", "n")
"""Conditions that every name of conditions has."""
PROTECTED = {"sinks": "Leading scales", "condensed": "Leading scales", "leading": "First tokens"}
"""Settings of methods that protect tokens from eviction, and what they protect."""
UNCONDITIONAL = ("count", "download")
"""Settings of prompt sets that are not conditions: n is the number of prompts, and how files arrived is irrelevant."""


def find_conditions(run: Results) -> Conditions:
    """Return a run's model, set of prompts, number of samples, weights, and the prompts' settings that have a value."""
    prompts = run.setting("prompts")
    settings = dict(prompts) if isinstance(prompts, Mapping) else {}
    others = {f"prompts.{key}": value for key, value in settings.items() if key not in UNCONDITIONAL}
    others["weights"] = str((run.provenance or {}).get("weights_sha256") or "")[:8]
    labels = zip(LABELS, (run.model_label, run.prompts_label, str(run.n)), strict=True)
    return *labels, *((name, str(value)) for name, value in sorted(others.items()) if value)


def is_full(run: Results) -> bool:
    """Return whether a run compresses nothing: a reference or one of its bounds."""
    return run.method.split(",")[0] == "full"


def find_group(run: Results) -> Hashable:
    """Return what competing runs share: conditions, budget, noise and seeds; None for a full cache."""
    if is_full(run):
        return None
    return find_conditions(run), run.memory.allowed, run.noise, name_seeds(run)[0]


def group_conditions(runs: Sequence[Results]) -> dict[str, list[Results]]:
    """Return the runs that share conditions, by a name of these such as `infinity_tiny (scenes), n = 96`.

    Further conditions are named where groups differ in nothing else: `llama (passkey), n = 8, prompts.context = 512`.
    """
    groups: dict[Conditions, list[Results]] = {}
    for run in runs:
        groups.setdefault(find_conditions(run), []).append(run)
    named: dict[str, list[Results]] = {}
    for conditions in sorted(groups):
        alike = [dict(other) for other in groups if other[: len(LABELS)] == conditions[: len(LABELS)]]
        every = dict.fromkeys(name for member in alike for name in member)
        differ = [name for name in every if len({member.get(name) for member in alike}) > 1]
        values = dict(conditions)
        more = "".join(f", {name} = {values.get(name, '-')}" for name in differ)
        named[f"{values['model']} ({values['prompts']}), n = {values['n']}{more}"] = groups[conditions]
    return named


def keep_one_count(runs: Sequence[Results], count: object = None) -> list[Results]:
    """Return the runs of each model and prompt set with `count` samples; None for the most common count.

    Of several equally common counts, it is the largest.

    Raises:
        ConfigError: no run has `count` samples.
    """
    counts = Counter((run.model_label, run.prompts_label, run.n) for run in runs)
    known = sorted({n for *_, n in counts})
    if count is not None and known and count not in known:
        there = ", ".join(map(str, known))
        raise ConfigError(
            f"prompts.count={show(count)}: no finished run has so many samples; there are {there}"
        )
    ranked = sorted(counts, key=lambda key: (counts[key], key[2]))
    chosen = {(model, prompts): n for model, prompts, n in ranked}  # the most common, the larger on ties
    return [run for run in runs if run.n == (count or chosen[run.model_label, run.prompts_label])]


def describe_sinks(runs: Sequence[Results]) -> str:
    """Return a sentence on the tokens that a model's methods protect from eviction; empty if all protect the same."""
    kept: dict[tuple[str, str], dict[object, dict[str, None]]] = {}
    for run in runs:
        for key, what in PROTECTED.items():
            if (count := run.setting(f"method.{key}")) is not None:
                kept.setdefault((what, run.model_label), {}).setdefault(count, {})[run.method] = None
    sentences, several = ["Sinks differ."], len({run.model_label for run in runs}) > 1
    for (what, model), counts in kept.items():
        if len(set(map(tuple, counts.values()))) > 1:  # differences within one method have a column
            each = (f"{count} ({', '.join(counts[count])})" for count in sorted(counts, key=str))
            sentences.append(f"{what}{f' of {model}' * several}: {', '.join(each)}.")
    return " ".join(sentences) if sentences[1:] else ""
