"""Words of a sweep: what a command is about, the jobs of its lists, and tasks that read them."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.cli.config.command import Command as Words
from kvbench.cli.sweeps.jobs import find_folder, write_entry
from kvbench.cli.sweeps.sweeper import split_product
from kvbench.runs.record.sweeps import JobStatus, name_jobs
from tests.support.command_line import Command

WORDS = ("method=random,swa", "budget=0.1")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("task=report method=random,swa budget=0.1", "sweep"), ("task=report work.folder=x", "sweep"),
        ("task=work", "sweep"), ("task=report sweeps=null", "all"), ("-m task=report", "all"), ("task=status", "all"),
        ("task=export sweeps=budget", "all"), ("task=work --cfg job", "option"), ("sweeps=budget", "jobs"),
        ("-m task=plan budget=1", "jobs"), ("task=plan budget=1", "job"),
    ],
)  # fmt: skip
def test_what_a_command_is_about(words: str, kind: str) -> None:
    command = Words.parse(words.split())
    assert command.kind == kind
    assert command.overrides == tuple(word for word in words.split() if word != "-m")


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("task", ["status", "report"])
def test_reading_tasks_leave_the_ledger_alone(tmp_path: Path, command: Command, task: str) -> None:
    jobs = [(f"method={name}", "budget=0.1", f"runs_dir={tmp_path}") for name in ("random", "swa")]
    folder = find_folder(tmp_path, jobs)
    write_entry(folder, JobStatus(0, jobs[0], outcome="failed", error="why not"))
    before = read_all(tmp_path)
    status, _, err = command("-m", f"task={task}", *reversed(WORDS), f"runs_dir={tmp_path}")
    assert status == (task == "report")
    assert ("holds no finished runs of this sweep" in err) == (task == "report")
    assert read_all(tmp_path) == before


LISTED = """
method=a,b method.x=1 | method=a,b method.x=choice(1)
method=a,b method.x= | method=a,b method.x=choice('')
method=a,b method.base=c | method=a,b method@method.base=choice(c)
method.base=a,b method.base.x=1 | method@method.base=a,b method.base.x=choice(1)
method=a --cfg job beside.method=b | method=a --cfg job beside.method=choice(b)
method=a method.x=1 budget=1,2 | method=a method.x=1 budget=1,2
method=a,b methods=[c] method.x=( | method=a,b methods=[c] method.x=(
"""


@pytest.mark.parametrize("row", LISTED.strip().splitlines())
def test_a_key_of_a_group_with_several_choices_is_a_list_of_one(row: str) -> None:
    words, expected = (tuple(side.split()) for side in row.split(" | "))
    assert Words.parse(words).words == expected
    assert Words.parse(expected).words == expected


def list_sets(*words: str) -> list[set[str]]:
    return [set(job) for job in split_product(OverridesParser.create().parse_overrides(list(words)))]


def test_jobs_are_the_product_of_the_lists() -> None:
    assert list_sets("method=a,b", "budget=1") == [{"method=a", "budget=1"}, {"method=b", "budget=1"}]
    assert list_sets("method=a", "beside.method=b", "beside.budget=1,2", "budget=3") == [
        {"method=a", "budget=3"}, {"method=b", "budget=1"}, {"method=b", "budget=2"}
    ]  # fmt: skip
    assert list_sets("method=a", "method.base=h2o") == [{"method=a", "method@method.base=h2o"}]


def test_methods_of_reference_lack_the_settings_of_others_and_share_the_rest() -> None:
    words = "method=a method.p=1,2 calibrate.count=3 budget=5,6 beside.method=b,c sweeps=s seed=7"
    found = list_sets(*words.split())
    own = [
        {"method=a", f"method.p={p}", "calibrate.count=3", f"budget={b}", "sweeps=s", "seed=7"}
        for p in (1, 2)
        for b in (5, 6)
    ]
    assert found[:4] == own
    assert found[4:] == [
        {f"method={m}", f"budget={b}", "sweeps=s", "seed=7"} for b in (5, 6) for m in ("b", "c")
    ]


@pytest.mark.parametrize("words", [("method=a,b", "beside.method=b"), ("method=b,a", "beside.method=a,b")])
def test_no_job_is_there_twice(words: tuple[str, str]) -> None:
    assert sorted(map(sorted, list_sets(*words))) == [["method=a"], ["method=b"]]


def test_jobs_are_named_by_what_they_do_not_share() -> None:
    jobs = (
        "method=h2o budget=1 method.p=1 seed=2",
        "method=h2o budget=2 seed=2",
        "budget=1 method=swa seed=2",
    )
    entries = [JobStatus(number, tuple(job.split())) for number, job in enumerate(jobs)]
    assert name_jobs(entries) == ["h2o 1 p=1", "h2o 2", "swa 1"]
    assert name_jobs(entries[:2]) == ["budget=1 p=1", "budget=2"]
