"""Verdicts on made-up runs, and edits of their files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench.eval.paired.psnr import Psnr
from kvbench.extras.share.verify.folders import find_recorded
from kvbench.extras.share.verify.run import Choice, verify_run
from kvbench.extras.share.verify.verdict import Verdict
from kvbench.methods.full import Full
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs.job import Job
from kvbench.runs.record.results import Results
from tests.support.fake_run import Fake, job_in

COUNT = 5
"""Samples of the run."""
ALL = Choice(COUNT, 7)
Change = Callable[[Any], None]


def remake(root: Path, salt: int = 0) -> Callable[[Results, Mapping[str, object]], Job]:
    """Make jobs from stored configurations, with the weights that are here (`salt`)."""

    def make(results: Results, config: Mapping[str, Any]) -> Job:
        given = {key: value for key, value in config["method"].items() if key != "_target_"}
        method: object = Full() if results.method == "full" else StreamingLLM(**given)
        job = job_in(root, COUNT, method, model=Fake(salt=salt), evaluators={"psnr": Psnr()})
        return Job(**{**vars(job), "config": config, "method_name": results.method})

    return make


def verify(folder: Path, choice: Choice = ALL, salt: int = 0) -> dict[str, Verdict]:
    """Verdicts on the runs of a folder by name."""
    scratch = folder.parent / "scratch"
    found = find_recorded(folder, scratch / "staged")
    return {one.name.split("/")[1]: verify_run(one, remake(scratch / "again", salt), choice) for one in found}


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
