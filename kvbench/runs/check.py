"""Checks of a job before its weights are loaded."""

import json
import logging
from collections.abc import Sequence

from kvbench.core.budget import InfeasibleBudget
from kvbench.core.config import ConfigError, quote_prompt
from kvbench.core.storage import CHANNEL
from kvbench.methods.shared.calibration import Observer
from kvbench.prompts.base import Prompt
from kvbench.runs.calibrate import check_calibration
from kvbench.runs.job import Job

log = logging.getLogger(__name__)


def check_job(job: Job) -> None:
    """Check budget, method and prompts before weights are loaded.

    Raises:
        ValueError: a setting or a prompt does not fit; the message names it.
    """
    obstacle = job.cache_plan.graph_obstacle
    if job.settings.cuda_graph is True and obstacle is not None:
        raise ConfigError(f"cuda_graph=true: {obstacle}; set cuda_graph=auto")
    if job.model.processes.count > 1 and not job.method.heads_independent:
        raise ConfigError(
            f"model.tensor_parallel={job.model.processes.count}: method={job.method_name} compares all heads, and each "
            "process holds some of them; set model.tensor_parallel=1"
        )
    if (packing := job.cache_plan.packing) is not None:
        _check_packed(job)
        packing.check(job.model.spec)
    _check_method(job)
    is_calibrated = isinstance(job.method.needs(), Observer) or job.cache_plan.codebooks is not None
    if is_calibrated:
        check_calibration(job.calibration_prompts)
    if not job.method.budgeted and job.settings.budget != 1 and not job.is_reference:
        log.warning(
            "method=%s has no budget: budget=%s changes nothing", job.method_name, job.settings.budget
        )
    compresses = job.is_reference or packing is not None or job.method.uses.sparse_reads
    if job.method.budgeted and job.settings.budget == 1 and not compresses:
        log.warning(
            "method=%s: budget=1 keeps everything; give a smaller one, such as budget=0.1", job.method_name
        )
    if job.settings.storage not in (CHANNEL, packing.storage if packing is not None else CHANNEL):
        names = job.settings.cache_dtype, job.method_name
        log.warning("cache_dtype=%s, method=%s: some or all settings of storage have no effect", *names)
    job.model.check_files()
    _check_prompts(job, [*job.prompts, *(job.calibration_prompts if is_calibrated else ())])
    _check_metadata(job)
    if found := ", ".join(f"{key}={value!r:.60}" for key, value in job.model.ignored_settings.items()):
        log.warning(
            "model=%s: its files say %s, which is not followed; model.sampling sets temperature, top_k and top_p",
            *(job.model.name, found),
        )


def _check_packed(job: Job) -> None:
    """Refuse what low-bit storage does not support."""
    storage = f"cache_dtype={job.settings.cache_dtype}"
    if job.method.uses.precisions:
        storage = f"method={job.method_name} sets the precision of each token"
    if job.method.uses.replaces:
        raise ConfigError(
            f"{storage}: method={job.method_name} merges tokens, so low-bit values would be requantised at each step; "
            "set cache_dtype=auto, or choose a method or setting without merging"
        )
    if job.model.processes.count > 1:
        raise ConfigError(f"{storage}: low-bit storage is for one process; set model.tensor_parallel=1")
    if job.model.spec.head_dim % 8:
        raise ConfigError(
            f"{storage}: codes fill whole bytes, and {job.model.spec.head_dim} channels per head of {job.model.name} "
            "are not a multiple of 8; set cache_dtype=auto"
        )


def _check_method(job: Job) -> None:
    """Refuse settings and budgets that do not fit, with the longest prompt if the budget depends on it."""
    spec = job.model.spec
    try:
        if job.longest is not None:
            spec = spec.with_prompt(job.longest.tokens)
        job.method.check(spec, job.upper_budget)
    except ValueError as error:  # methods do not know which of two keys `sinks` came from
        line, sinks = str(error), job.section("method").get("sinks", job.settings.sinks)
        own = sinks != job.settings.sinks
        if own and line.startswith("sinks="):
            raise ConfigError(f"method.{line}") from None
        if isinstance(error, InfeasibleBudget) and job.longest is not None:
            line += ", or set sinks=0" if sinks and "sinks=" not in line else ""
            line = line.replace("sinks=", "method.sinks=") if own else line
            prompt, tokens = job.longest
            name = f"{_name(prompt)}: {quote_prompt(prompt.text)}"
            raise InfeasibleBudget(f"{name} has {tokens} tokens; {line}") from None
        raise


def _check_prompts(job: Job, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for a prompt that the model rejects; it names the file's line and cuts long prompts."""
    try:
        job.model.check_prompts([prompt.text for prompt in prompts])
    except ValueError:
        for prompt in prompts:
            try:
                job.model.check_prompts([prompt.text])
            except ValueError as error:
                line = str(error).replace(repr(prompt.text), quote_prompt(prompt.text))
                raise ConfigError(f"{prompt.origin}: {line}" if prompt.origin else line) from None
        raise


def _check_metadata(job: Job) -> None:
    """Refuse metadata that samples.jsonl cannot hold, and prompts if only some of them have what an evaluator reads."""
    for prompt in job.prompts:
        try:
            json.dumps(prompt.meta, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{_name(prompt)}: its metadata is not strict JSON ({error})") from None
    for name, evaluator in job.evaluators.items():
        key = evaluator.required_meta
        if key is None or all(prompt.meta.get(key) is None for prompt in job.prompts):
            continue
        for prompt in job.prompts:
            try:
                evaluator.check_meta(prompt.meta)
            except ValueError as error:
                raise ConfigError(f"{_name(prompt)}: eval={name}: {error}") from None


def _name(prompt: Prompt) -> str:
    return prompt.origin or f"prompt {prompt.index}"
