"""Verdicts on made-up runs, and edits of their files."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.eval.paired.psnr import Psnr
from kvbench.extras.share.verify.folders import Recorded, find_recorded
from kvbench.extras.share.verify.run import MakeJob, verify_run
from kvbench.extras.share.verify.verdict import Choice, Verdict
from kvbench.methods.full import Full
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs.job import Job
from kvbench.runs.record.results import Results
from tests.support.fake_run import job_in

COUNT = 5
"""Samples of the run."""
ALL = Choice(COUNT, 7)
Change = Callable[[Any], None]


def remake(root: Path) -> MakeJob:
    """Make jobs from stored configurations."""

    def make(results: Results) -> tuple[Job, Sequence[str]]:
        given = {key: value for key, value in results.config["method"].items() if key != "_target_"}
        method: object = Full() if results.method == "full" else StreamingLLM(**given)
        job = job_in(root, COUNT, method, evaluators={"psnr": Psnr()})
        return replace(job, config=results.config, method_name=results.method), ()

    return make


def verify(folder: Path, choice: Choice = ALL) -> dict[str, Verdict]:
    """Verdicts on the runs of a folder by name."""
    scratch = folder.parent / "scratch"
    found = find_recorded(folder, scratch / "staged")
    return {one.name.split("/")[1]: verify_run(one, remake(scratch / "again"), choice) for one in found}


def read_verdict(run: Path, make: MakeJob | None = None) -> Verdict:
    """The verdict on a run, all of whose samples are drawn again."""
    scratch = run.parents[1]
    name, make = f"{run.parent.name}/{run.name}", make or remake(scratch / "again")
    return verify_run(Recorded(name, run), make, ALL)


def lower_peaks(run: Path, share: float) -> None:
    """Lower the peaks of records and results alike."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for index, line in enumerate(lines):
        edit_record(
            run, index, **{name: int(line[name] * share) for name in line if name.startswith("peak_")}
        )

    def change(all_: Any) -> None:
        memory = all_["memory"]
        memory |= {name: int(memory[name] * share) for name in ("peak_tokens", "peak_bytes")}
        memory["paper_peak_mib"] *= memory["peak_tokens"] / lines[0]["peak_tokens"]

    edit(run / "results.json", change)


def edit(path: Path, change: Change) -> None:
    """Change the object in a JSON file."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_record(run: Path, index: int, **fields: object) -> None:
    """Change fields of a line of samples.jsonl."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    lines[index] |= fields
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def named(verdict: Verdict) -> set[str]:
    return {finding.what for finding in verdict.findings}
