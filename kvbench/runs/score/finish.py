"""Last step of a run: metrics and results.json, shared by any number of processes."""

import logging
import math
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from kvbench.core.budget import Budget
from kvbench.core.config import ConfigError
from kvbench.eval.protocol.inputs import Inputs, hash_inputs
from kvbench.eval.protocol.records import read_fields
from kvbench.runs.code import identify_code
from kvbench.runs.job import Busy, Job
from kvbench.runs.record.costs import Cost, Trace, average_steps, summarise_latency, summarise_memory
from kvbench.runs.record.folder import RECORDS, RunFolder, SampleRecord
from kvbench.runs.record.results import FILE, Results, read_results
from kvbench.runs.record.sanity import SIGNED_COSTS
from kvbench.runs.score.scoring import find_pending, score

log = logging.getLogger(__name__)


def finish(job: Job, folder: RunFolder, reference: Path | None, budget: Budget) -> Results:
    """Score a complete run against its finished reference, write its results, then set its status to `done`.

    Metrics that exist are kept. Processes with the same evaluators wait for each other, and the metrics of all of them
    are kept.

    Raises:
        ConfigError: a file of the folder is damaged.
        Busy: another process scores, and the job does not wait; or a sample is damaged, and the job does not lead.
    """
    settings, device = job.section("eval"), job.settings.device
    seeds = job.bounded is None or job.bounded.settings.seed == job.settings.seed
    with ExitStack() as claims:
        for name in sorted(job.evaluators):  # sorted, so that no two processes wait for each other
            claims.enter_context(job.hold(folder.place(f"eval-{name}")))
        if not job.is_leader and not folder.is_whole(len(job.prompts)):
            raise Busy(f"{folder.path}: waiting for its leader to redraw damaged samples")
        summary, known = _summarise(job, folder, reference, budget), read_results(folder.path)
        inputs = read_inputs(job, folder)
        pending = find_pending(job.evaluators, settings, inputs, known)
        if known is not None and not pending:  # another process scored the run
            return known
        evaluated, metrics = score(
            folder.path, reference, pending, settings, inputs, job.metadata, device, same_seeds=seeds
        )
        with folder.locked():
            known = read_results(folder.path) or summary  # other processes may have added metrics meanwhile
            results = replace(
                known,
                config=job.config,
                overrides=job.overrides,
                evaluated={**known.evaluated, **evaluated},
                metrics={**known.metrics, **metrics},
                finished=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            folder.write(FILE, results.to_json())
    folder.note("done")
    folder.remove_leftovers()
    return results


def read_inputs(job: Job, folder: RunFolder) -> dict[str, Inputs]:
    """Return the digests of each evaluator's inputs, and of its code if it is not as released, by config name."""
    inputs: dict[str, Inputs] = {}
    for name, one in job.evaluators.items():
        code = identify_code(f"eval.{name}", job.evaluator_classes[name])
        own = {"code": code} if code else {"revision": str(one.revision)}
        inputs[name] = {**hash_inputs(one, job.metadata, folder.path), **own}
    return inputs


def _summarise(job: Job, folder: RunFolder, reference: Path | None, budget: Budget) -> Results:
    """Sort the records of a complete run; return its results before any metric."""
    samples = folder.tidy([prompt.index for prompt in job.prompts], job.metadata)
    try:
        costs = [_read_cost(job, sample) for sample in samples]
        traces = [read_fields(Trace, sample).steps for sample in samples]
    except ValueError as error:
        raise ConfigError(
            f"{folder.path / RECORDS}: damaged ({error}); delete it to generate its samples again"
        ) from None
    memory = summarise_memory(costs, job.model.spec, budget, job.cache_plan.dtype.itemsize)
    if memory.protected_drops is not None:
        count = sum(cost.protected_drops is not None for cost in costs)
        log.warning(
            f"method {job.method_name}: more +inf than slots: in {count} of {len(costs)} samples "
            f"{memory.protected_drops} slots of score +inf were dropped, the latest of a row first; protect fewer "
            "slots or raise the budget"
        )
    return Results(
        run=folder.path.name,
        reference=None if reference is None else reference.name,
        method=job.method_name,
        n=len(samples),
        config=job.config,
        provenance=folder.read_json("provenance.json"),
        memory=memory,
        latency=summarise_latency(costs),
        steps=average_steps(traces),
    )


def _read_cost(job: Job, sample: SampleRecord) -> Cost:
    """Return the costs of a sample, whose record must belong to this run."""
    index = int(str(sample["index"]))
    for name, value in (("prompt", job.prompts[index].text), ("seed", job.settings.seed)):
        if sample.get(name) != value:
            raise ValueError(f"sample {index}: {name} is {sample.get(name)!r}, not {value!r}")
    cost = read_fields(Cost, sample, f"sample {index}")
    known = {name: value for name, value in vars(cost).items() if isinstance(value, int | float)}
    valid = all(
        math.isfinite(value) and (value >= 0 or name in SIGNED_COSTS) for name, value in known.items()
    )
    if not valid or cost.seconds == 0:
        raise ValueError(f"sample {index}: a cost is negative or not finite, or seconds are 0")
    return cost
