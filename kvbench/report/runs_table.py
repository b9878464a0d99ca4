"""Tables of runs with all of their metrics."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console

from kvbench.data import flatten
from kvbench.eval.protocol.scores import Metric
from kvbench.report.code_notes import is_now, list_digests, list_made, list_marks, name_code
from kvbench.report.full_scores import list_columns
from kvbench.report.memory import IN_FLIGHT_COLUMN, READ_COLUMN, TIME_COLUMNS, list_costs, write_in_use
from kvbench.report.seeds import count_seeds, find_seeds, is_calibrated, list_members, name_seeds
from kvbench.report.tables import Cell, Row, drop_columns, format_cell, list_shown, print_line, print_rows
from kvbench.runs.record.results import NEUTRAL, Memory, Results

INTERVAL_WIDTH = 120
"""Minimum width of a terminal, in characters, at which intervals are shown."""
IN_WORDS = {"last / B": "at the end", "least / B": "in use"}
"""Names that the terminal shows for columns of budget shares."""
VERBOSE_COLUMNS = ("peak tokens", IN_WORDS["last / B"], IN_FLIGHT_COLUMN, "GPU MiB", READ_COLUMN, "state MiB")
"""Columns of memory that only `verbose` shows."""
SEED_COLUMNS = ("noise seed", "calibration seed")
"""Columns of seeds in which runs of equal settings differ."""
SHARED_COLUMNS = ("shuffle", "batch_invariant")
"""Settings that belong to no group, in which runs of any method may differ."""
WEIGHTS_DIGITS = 8
"""Digits of the SHA-256 of weights in which runs of one model differ."""
NAMED_ELSEWHERE = ("prompts.count", "prompts.path", "calibrate.seed", "calibrate.orders", "model.weights")
"""Settings that other columns name: samples, prompts, seeds and model; an order file is a copy of a calibration."""
CHOSEN = 3
"""Number of metrics in a paper's tables and in figures without `report.metrics`."""
CODE_COLUMN = "code"
"""Column of the code in which runs of equal settings differ."""


def list_metrics(runs: Sequence[Results], *, details: bool = False) -> list[str]:
    """Return the metrics that have a value in some run, grouped by evaluator; `details` adds parts and variants."""
    evaluators = {name: metric.evaluator for run in runs for name, metric in run.metrics.items()}
    order = list(dict.fromkeys(evaluators.values()))
    shown = {
        name
        for run in runs
        for name, metric in run.metrics.items()
        if metric.value is not None and (details or not metric.detail)
    }
    return sorted(filter(shown.__contains__, evaluators), key=lambda name: order.index(evaluators[name]))


def choose_metrics(runs: Sequence[Results], names: Sequence[str] | None = None) -> list[str]:
    """Return the metrics of a paper's tables and figures: `names`, all if these are empty, else three.

    The three are the first metrics of evaluators, and if there are fewer evaluators, their next ones.
    """
    known = list_metrics(runs)
    if names is not None:
        return [*names] or known
    evaluators = {name: metric.evaluator for run in runs for name, metric in run.metrics.items()}
    owners = [evaluators[name] for name in known]
    ranks = {name: owners[:index].count(owners[index]) for index, name in enumerate(known)}
    chosen = sorted(known, key=ranks.__getitem__)[:CHOSEN]
    return [name for name in known if name in chosen]


def find_metric(run: Results, name: str) -> Metric | None:
    """Return a metric of a run; None if it was not requested, or needs a reference and the run is the reference."""
    metric = run.metrics.get(name)
    return None if metric is None or (metric.needs_reference and run.reference is None) else metric


def list_settings(known: Sequence[tuple[Results, Mapping[str, object]]]) -> list[str]:
    """Return the names of the settings that a table needs to tell runs apart.

    Settings of a method are compared within one model, prompt set, method and budget, settings of a model or of prompts
    within one of these, settings of storage among all runs with low-bit storage. `known` has runs and `read_settings`.
    """
    names = dict.fromkeys(name for _, settings in known for name in settings)
    alike: dict[tuple[str, object], set[str]] = {}
    for run, settings in known:
        identity = run.model_label, run.prompts_label, run.method, run.memory.allowed, run.stored, run.noise
        # What runs must share for a setting of a group to be compared.
        scopes = {"model": identity[0], "prompts": identity[1], **dict.fromkeys(("storage", *SHARED_COLUMNS))}
        for name in names:
            if name in settings or "." not in name:  # a setting of a group is one of some classes only
                scope = scopes.get(name.partition(".")[0], identity)
                alike.setdefault((name, scope), set()).add(str(settings.get(name)))
    differing = {name for (name, _), values in alike.items() if len(values) > 1}
    return [name for name in names if name in differing]


def read_settings(run: Results) -> dict[str, object]:
    """Return the settings that identify runs in tables, and the run's weights, seeds and code.

    Settings of the method have no prefix; an inner method is named by its class, with its settings by dotted path.
    Settings without effect, and those of `NAMED_ELSEWHERE`, are left out.
    """
    settings: dict[str, object] = {
        name.removeprefix("method."): value
        for name, value in flatten.list_settings(run).items()
        if name.removeprefix("model.") not in NEUTRAL
        and name not in NAMED_ELSEWHERE
        and (is_calibrated(run) or not name.startswith("calibrate."))
    }
    settings |= {name: run.setting(name) for name in SHARED_COLUMNS}
    if (weights := (run.provenance or {}).get("weights_sha256")) is not None:
        settings["model.weights_sha256"] = str(weights)[:WEIGHTS_DIGITS]
    return settings | dict(zip(SEED_COLUMNS, name_seeds(run), strict=True)) | {CODE_COLUMN: name_code(run)}


def name_methods(runs: Sequence[Results], *, left_out: Collection[str] = ()) -> list[str]:
    """Return each run's method with the settings in which runs of the method differ: `snapkv kernel=3`.

    If runs differ in cache_dtype or noise, these follow the method: `full int4 noise=counter`. The settings `left_out`,
    and settings that a run lacks, are omitted.
    """
    stored, noises = {run.stored for run in runs}, {run.noise for run in runs}
    kinds = {run.method for run in runs} | {(run.method, run.model_label) for run in runs}
    known = [(run, read_settings(run)) for run in runs]
    differ = {
        kind: list_settings(
            [entry for entry in known if kind in (entry[0].method, (entry[0].method, entry[0].model_label))]
        )
        for kind in kinds
    }
    return [
        " ".join(
            (
                run.method,
                *((run.stored,) if len(stored) > 1 and run.stored != "auto" else ()),
                *((f"noise={run.noise}",) if len(noises) > 1 and run.noise != "stream" else ()),
                *(
                    f"{name}={settings[name]}"
                    for name in differ[run.method]
                    if name in settings and name not in left_out
                    # Models have settings of their own.
                    if not name.startswith("model.") or name in differ[run.method, run.model_label]
                ),
            )
        )
        for run, settings in known
    ]


def identifying_columns(runs: Sequence[Results]) -> list[Row]:
    """Return the identifying cells of runs: model, method, budget; dtype, noise, settings, prompts if they differ."""
    known = [read_settings(run) for run in runs]
    settings = list_settings([*zip(runs, known, strict=True)])
    several = len({run.prompts_label for run in runs}) > 1
    mixed, noisy = (len(values) > 1 for values in ({run.stored for run in runs}, {run.noise for run in runs}))
    rows: list[Row] = []
    for run, own, digests in zip(runs, known, list_digests(runs), strict=True):
        row: dict[str, Cell] = {"model": run.model_label}
        row |= {"prompts": run.prompts_label} if several else {}
        row |= {"method": run.method, "budget": run.budget_text}
        row |= {"cache": run.stored} if mixed else {}
        row |= {"noise": run.noise} if noisy else {}
        values = {name: own.get(name) for name in settings}
        if CODE_COLUMN in values and is_now(run):
            values[CODE_COLUMN] = f"{values[CODE_COLUMN]} (now)"
        rows.append(
            row | digests | {name: "-" if value is None else str(value) for name, value in values.items()}
        )
    return rows


def order_runs(runs: Sequence[Results], *, as_given: bool = False) -> list[Results]:
    """Return runs sorted by model, budget, method, dtype, noise and seeds.

    With `as_given` models, budgets and methods come in the order of their first runs, which in a sweep is the user's.
    """
    ranks: dict[object, int] = {}

    def find_key(run: Results) -> tuple[object, ...]:
        kinds: tuple[Any, ...] = run.model_label, run.memory.allowed, run.method
        if as_given:
            kinds = tuple(ranks.setdefault(kind, len(ranks)) for kind in kinds)
        return *kinds, run.stored, run.noise, *find_seeds(list_members(run)[0])

    return sorted(runs, key=find_key)


def make_rows(runs: Sequence[Results], *, details: bool = False, as_given: bool = False) -> list[Row]:
    """Return a row per run, in the order of `order_runs`: identity, memory, time and the metrics of `list_metrics`.

    `details` adds parts and variants of metrics; without it the full cache's score stands beside every accuracy.
    """
    ordered = order_runs(runs, as_given=as_given)
    metrics = find_metrics(ordered, details=details)
    return [
        {**which, **costs, **scores}
        for which, costs, scores in zip(
            identifying_columns(ordered), list_costs(ordered), metrics, strict=True
        )
    ]


def find_metrics(runs: Sequence[Results], *, details: bool = False) -> list[dict[str, Cell]]:
    """Return the metric cells of each run, see `make_rows`."""
    names = list_metrics(runs, details=details)
    cells: list[dict[str, Cell]] = [{name: find_metric(run, name) for name in names} for run in runs]
    return cells if details else list_columns(runs, cells)


def make_csv_rows(runs: Sequence[Results]) -> list[Row]:
    """Return the rows of `make_rows` with parts and variants of metrics, and with counts in columns of their own."""
    rows: list[Row] = []
    for row, run in zip(make_rows(runs, details=True), order_runs(runs), strict=True):
        seeds, calibrations = map(str, count_seeds(run))
        counts = {"n": str(run.n), "seeds": seeds, "calibrations": calibrations}
        cells: dict[str, Cell] = {}
        for name, cell in row.items():
            cells |= counts if name == "n" else {name: cell}
        rows.append(cells)
    return rows


def show_runs(
    console: Console,
    runs: Sequence[Results],
    failures: Sequence[tuple[str, str]] = (),
    *,
    verbose: bool = False,
    as_given: bool = False,
) -> None:
    """Print one row per run in the order of `order_runs`, and the (name, reason) of unfinished ones.

    Models with the same metrics share a table, whose title has the values that all rows share. A terminal narrower than
    `INTERVAL_WIDTH` shows no times. `verbose` adds `VERBOSE_COLUMNS`.
    """
    tables: dict[frozenset[str], list[Results]] = {}
    for model in dict.fromkeys(run.model_label for run in order_runs(runs, as_given=as_given)):
        members = [run for run in runs if run.model_label == model]
        tables.setdefault(frozenset(name for run in members for name in run.metrics), []).extend(members)
    for members in tables.values():
        _show_table(console, members, verbose=verbose, as_given=as_given)
    for name, reason in failures:
        print_line(console, f"{name}: {reason}", "red")


def _show_table(console: Console, runs: Sequence[Results], *, verbose: bool, as_given: bool) -> None:
    """Print the table of runs and its notes."""
    rows = make_rows(runs, as_given=as_given)
    models = list(dict.fromkeys(run.model_label for run in runs))
    wide = console.width >= INTERVAL_WIDTH
    equal = _find_equal(rows)
    left_out = [*(() if verbose else VERBOSE_COLUMNS), *(() if wide else TIME_COLUMNS), *equal]
    left_out += [name for name in ("model", "n") if len({row[name] for row in rows}) == 1]
    ordered = order_runs(runs, as_given=as_given)
    shown = [_put_in_words(row, run.memory) for row, run in zip(rows, ordered, strict=True)]
    shown = drop_columns(shown, left_out)
    title = ", ".join(models) + f", n = {rows[0]['n']}" * ("n" in left_out)
    same = ", ".join(f"{name} {text}" for name, text in equal.items())
    title += f"; every row that has it: {same}" * bool(same) + " (95 % intervals, or ± half of them)" * wide
    lead = len(shown[0].keys() & identifying_columns(runs)[0].keys())
    print_rows(console, title, shown, lead, "half" if wide else "value")
    for note in (*list_marks(runs, list_shown(shown), times=wide), *list_made(runs)):
        print_line(console, note)


def _put_in_words(row: Row, memory: Memory) -> Row:
    """Return a row whose budget shares are named and formatted for the terminal."""
    shares = {"last / B": memory.last_share, "least / B": memory.least_share}
    cells = {**row, **{name: write_in_use(memory, share) for name, share in shares.items()}}
    return {IN_WORDS.get(name, name): cell for name, cell in cells.items()}


def _find_equal(rows: Sequence[Row]) -> dict[str, str]:
    """Return the text of each metric that more than two rows have and that reads the same in all of them."""
    equal = {}
    for name in rows[0]:
        cells = [cell for row in rows if isinstance(cell := row[name], Metric)]
        texts = {format_cell(cell, "range") for cell in cells}
        if len(cells) > 2 and len(texts) == 1:
            equal[name] = texts.pop()
    return equal
