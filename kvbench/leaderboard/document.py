"""The leaderboard as texts for the page."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from kvbench.core.names import clean_name, make_writable
from kvbench.eval.protocol.scores import Metric, Score
from kvbench.leaderboard.datasets import Dataset, Found
from kvbench.leaderboard.rankings import BASELINE, Copy, Ranking, Row, rank_runs
from kvbench.leaderboard.settings import HASHED
from kvbench.leaderboard.verifications import UNKNOWN, Verification, find_verifications
from kvbench.report.dataset import PAGE
from kvbench.report.tables import ARROWS
from kvbench.runs.record.results import Results

SHOWN = ("budget", "sinks", "prompts", "samples", "seed", "reference")
"""Settings in the heading of a ranking, beside its model; the others are below it."""
COMMIT_DIGITS = 8
MAX_REASON = 300
"""Most letters of a metric's reason."""

Texts = Mapping[str, object]


def make_leaderboard(found: Found, output: Path | None) -> dict[str, object]:
    """Return the rankings by metric, the datasets and the folders that were left out, as texts.

    Args:
        found: datasets.
        output: folder of the page, which links the datasets' own pages by relative path; None for no links.
    """
    known = [(dataset, find_verifications(dataset)) for dataset in found.datasets]
    rankings = rank_runs(known)
    texts = {
        "metrics": [
            {
                "name": name,
                "title": _name_metric(name, own),
                "rankings": [
                    _describe_ranking(number, ranking, output) for number, ranking in enumerate(own, 1)
                ],
            }
            for name, own in rankings.items()
        ],
        "datasets": [_describe_dataset(dataset, own, output) for dataset, own in known],
        "left_out": list(found.left_out),
    }
    return {name: _make_writable(value) for name, value in texts.items()}


def _name_metric(name: str, rankings: Sequence[Ranking]) -> str:
    """Return a metric's name with the arrow towards better values, if its rankings agree on it."""
    arrows = {ARROWS[row.metric.better] for ranking in rankings for row in ranking.rows}
    return f"{name} {arrows.pop()}" if len(arrows) == 1 else name


def _make_writable(value: object) -> object:
    """Return nested texts without letters that a file of text cannot hold."""
    if isinstance(value, Mapping):
        return {make_writable(str(key)): _make_writable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_make_writable(one) for one in value]
    return make_writable(value) if isinstance(value, str) else value


def _describe_ranking(number: int, ranking: Ranking, output: Path | None) -> Texts:
    fields = ranking.fields
    unit = ranking.rows[0].metric.unit
    more = {HASHED.get(name, name): value for name, value in fields.items() if name not in SHOWN}
    return {
        "number": number,
        "model": fields["model"],
        "unit": unit,
        "facts": {name: fields[name] for name in SHOWN},
        "more": {name: value for name, value in more.items() if name not in ("model", "metric")},
        "apart": "" if ranking.nearest is None else _join_reasons(ranking),
        "note": "" if ranking.has_baseline else f"The baseline `{BASELINE}` is not in this ranking.",
        "rows": [_describe_row(row, output) for row in ranking.rows],
    }


def _join_reasons(ranking: Ranking) -> str:
    return f"Not in ranking {ranking.nearest}, because these differ: {'; '.join(ranking.reasons)}."


def _describe_row(row: Row, output: Path | None) -> Texts:
    metric = row.metric
    difference = "" if row.difference is None else _write(row.difference, metric.digits, signed=True)
    ends = None if row.difference is None else row.difference.ci95
    return {
        "rank": row.rank,
        "label": row.label,
        "value": _write(metric, metric.digits),
        "counted": _count_samples(row),
        "difference": difference,
        "level": ends is not None and None not in ends and ends[0] <= 0 <= ends[1],  # type: ignore[operator]
        "rows": _name_place(row),
        "several": row.rows > 1,
        "copies": [_describe_copy(copy, output) for copy in row.copies],
    }


def _count_samples(row: Row) -> str:
    """Return the number of samples of a value and the reason, if it is not the number of the run's samples."""
    metric, run = row.metric, row.copies[0].entry.results
    if metric.n == run.n:
        return ""
    reason = clean_name(metric.reason, MAX_REASON)
    return f"of {metric.n}, not {run.n}" + ("" if reason is None else f": {reason}")


def _name_place(row: Row) -> str:
    """Return the place of a row among the rows of its method: `1 row`, `best of 3`, `2 of 3`."""
    if row.rows == 1:
        return "1 row"
    return f"best of {row.rows}" if row.place == 1 else f"{row.place} of {row.rows}"


def _write(one: Metric | Score, digits: int, *, signed: bool = False) -> str:
    """Return a value with its interval."""
    form = f"{'+' if signed else ''}.{digits}f"
    low, high = one.ci95 or (None, None)
    ends = "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"
    return f"{one.value:{form}}{ends}".replace("-", "\N{MINUS SIGN}")


def _describe_copy(copy: Copy, output: Path | None) -> Texts:
    run = copy.entry.results
    return {
        "who": copy.dataset.author or UNKNOWN,
        "dataset": copy.dataset.folder.name,
        "link": _link(copy.dataset, output),
        "when": clean_name(run.finished[:10]) or UNKNOWN,
        "version": name_version(run),
        "card": name_card(run),
        **_describe_checked(copy),
    }


def _describe_checked(copy: Copy) -> Texts:
    if copy.checked is None:
        return {"status": "not verified", "status_text": "", "finding": ""}
    outcome, checked = copy.checked
    number = f"{checked.chosen} of {copy.entry.results.n} samples, " if checked.chosen else ""
    text = f"{number}{_name_verifier(copy.dataset, outcome)}, {outcome.finished[:10] or UNKNOWN}"
    return {"status": checked.status, "status_text": text, "finding": checked.text}


def _name_verifier(dataset: Dataset, outcome: Verification) -> str:
    if outcome.by is None:
        return "verifier not stated"
    return f"by {outcome.by}" + (", the author" if outcome.by == dataset.author else "")


def name_version(run: Results) -> str:
    """Return kvbench's version and commit; `+` marks a checkout with uncommitted changes."""
    known = run.provenance or {}
    versions, code = known.get("versions"), known.get("code")
    version = clean_name(versions.get("kvbench")) if isinstance(versions, Mapping) else None
    if not isinstance(code, Mapping):
        return version or UNKNOWN
    commit = clean_name(str(code.get("commit"))[:COMMIT_DIGITS]) or UNKNOWN
    return f"{version or UNKNOWN}, {commit}{'+' if code.get('diff_sha256') else ''}"


def name_card(run: Results) -> str:
    """Return the GPU or the processor that drew the samples."""
    known = run.provenance or {}
    if known.get("gpu"):
        return f"GPU: {clean_name(known['gpu']) or UNKNOWN}"
    return f"CPU: {clean_name(known.get('machine') or known.get('cpu')) or UNKNOWN}"


def _describe_dataset(dataset: Dataset, outcomes: Sequence[Verification], output: Path | None) -> Texts:
    runs = [entry.results for entry in dataset.entries.values()]
    return {
        "name": dataset.folder.name,
        "link": _link(dataset, output),
        "author": dataset.author or UNKNOWN,
        "runs": len(runs),
        "cards": list(dict.fromkeys(map(name_card, runs))),
        "versions": list(dict.fromkeys(map(name_version, runs))),
        "outcomes": [
            f"{one.good} of {len(one.runs)} runs verified {_name_verifier(dataset, one)}, "
            f"{one.finished[:10] or UNKNOWN}, seed {one.seed}, {one.machine or UNKNOWN}"
            for one in outcomes
        ],
        "good": all(one.good == len(one.runs) for one in outcomes),
    }


def _link(dataset: Dataset, output: Path | None) -> str | None:
    """Return the relative address of a dataset's own page; None if it has none, or for a page without links."""
    page = dataset.folder / PAGE
    return (
        None
        if output is None or not page.is_file()
        else quote(os.fsencode(Path(os.path.relpath(page, output)).as_posix()))
    )
