"""Runs that store few bits: what names them, what they are compared with, what is refused."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.config import ConfigError, check_part
from kvbench.core.storage import CHANNEL, CODEBOOKS, StorageConfig
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.shared.precision import Precision
from kvbench.methods.shared.uses import Uses
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.runs import execute, prepare
from kvbench.runs.cache_plan import CachePlan
from kvbench.runs.check import check_job
from kvbench.runs.job import Job
from tests.support import fake_run
from tests.support.fake_run import SPEC, Fake, job_in, open_folder

ROTATED = StorageConfig("rotated", "rotated", before_rotation=False)


@pytest.fixture(autouse=True)
def eight_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes lie in whole bytes: the fake model's two heads of four channels become one of eight."""
    monkeypatch.setattr(fake_run, "HEADS", 1)


def job_of(root: Path, **more: Any) -> Job:
    job = job_in(root, model=Fake(spec=replace(SPEC, heads=1, head_dim=8)), count=4, **more)
    config = {"cache_dtype": job.settings.cache_dtype, **job.config}
    return replace(job, config=config)


def folder_of(job: Job) -> Path:
    job.model.load("cpu")
    return open_folder(job).path


def test_storage_names_a_run_where_it_decides(tmp_path: Path) -> None:
    kivi = StorageConfig(group=2, residual=4, before_rotation=False)
    plain = folder_of(job_of(tmp_path))
    assert folder_of(job_of(tmp_path, storage=kivi)) == plain
    assert folder_of(job_of(tmp_path, cache_dtype="float32", storage=kivi)) == plain
    found = [
        folder_of(job_of(tmp_path, cache_dtype=dtype, storage=storage))
        for dtype in ("int4", "fp8")
        for storage in (CHANNEL, kivi, CODEBOOKS)
    ]
    assert found[3] == found[5]  # float8 has nothing to choose but the window and the rotation
    assert len({plain, *found}) == 6
    assert found[0].name.startswith("streaming_llm-0.5-int4-")


def test_bits_of_keys_and_values_name_a_run_once(tmp_path: Path) -> None:
    def name(dtype: str, **more: Any) -> str:
        return folder_of(job_of(tmp_path, cache_dtype=dtype, storage=StorageConfig(**more))).name

    assert name("int4") == name("int4", key_bits=4) == name("int2", key_bits=4, value_bits=4)
    apart = name("int4", key_bits=3)
    assert apart.startswith("streaming_llm-0.5-k3v4-")
    assert apart == name("int3", value_bits=4) == name("int8", key_bits=3, value_bits=4)
    assert apart != name("int3", key_bits=4)
    settings: list[dict[str, Any]] = [
        {}, {"exempt": 1}, {"group": 2}, {"residual": 4}, {"before_rotation": False}, {"values": "channel"},
    ]  # fmt: skip
    assert len({name("int4", **more) for more in settings}) == len(settings)


def test_the_reference_stores_what_it_always_did(tmp_path: Path) -> None:
    plain = execute.run(job_of(tmp_path)).results
    few = execute.run(job_of(tmp_path, cache_dtype="int8")).results
    full = execute.run(job_of(tmp_path, method=Full(), method_name="full", cache_dtype="int2")).results
    assert few.reference == full.reference == plain.reference
    assert full.run.startswith("full-int2-")
    assert full.metrics["psnr"].n == 4
    assert few.memory.peak_tokens == plain.memory.peak_tokens
    assert few.memory.sequence_bytes < plain.memory.sequence_bytes / 2


def test_codebooks_are_calibrated_once_and_belong_to_the_identity(tmp_path: Path) -> None:
    job = job_of(tmp_path, cache_dtype="int4", storage=CODEBOOKS)
    first = execute.run(job)
    (calibration,) = (tmp_path / "fake").glob("calibration-*.safetensors")
    _, used = prepare.find_used_files(job)
    assert used == calibration
    written = calibration.stat().st_mtime_ns
    again = execute.run(job_of(tmp_path, cache_dtype="int3", storage=CODEBOOKS))
    assert calibration.stat().st_mtime_ns == written
    assert again.folder != first.folder


def test_a_budget_in_bytes_buys_more_tokens_in_fewer_bits(tmp_path: Path) -> None:
    held = []
    for dtype in ("float16", "int4"):
        job = job_of(tmp_path, budget=0.5, budget_unit="bytes", cache_dtype=dtype, storage=CODEBOOKS)
        memory = execute.run(job).results.memory
        assert memory.sequence_bytes <= memory.budget_bytes
        held.append(memory.peak_tokens)
    assert held[0] < held[1]


def test_exempt_layers_allow_what_fits_although_it_is_not_sure_to(tmp_path: Path) -> None:
    """A quarter of the bytes holds 3 tokens a head if all are in the exempt layers, and 6 if heads share evenly."""
    model = Fake(spec=replace(SPEC, layers=6, heads=1, head_dim=8))
    few = {"cache_dtype": "int2", "storage": StorageConfig("token", exempt=1)}
    job = job_in(tmp_path, 2, H2O(leading=4), model=model, budget=0.25, budget_unit="bytes", **few)
    assert job.budget.tokens < 4 * 6
    memory = execute.run(job).results.memory
    assert memory.budget_tokens == 6 * 6
    assert memory.sequence_bytes <= memory.budget_bytes


@pytest.mark.parametrize(
    ("dtype", "storage", "told"),
    [
        ("int4", {"key_bits": 16, "value_bits": 16}, "set cache_dtype=auto"),
        ("int4", {"keys": "rotated"}, "storage.keys=rotated: .*; set storage.before_rotation=false"),
        ("int8", asdict(ROTATED), "storage.keys=rotated: .* 4, 3, 2 bits"),
        ("int4", {"key_bits": 5}, "storage.key_bits=5: .* one of 16, 8, 4, 3, 2"),
        ("int4", {"key_bits": True}, "storage.key_bits=true: must be a whole number or null"),
        ("int4", {"exempt": -1}, "storage.exempt=-1: must be a whole number of at least 0"),
        ("auto", {"key_bits": 4}, "storage.key_bits=4: .*; set cache_dtype=int4"),
    ],
)
def test_settings_that_do_not_fit_together(
    tmp_path: Path, dtype: str, storage: dict[str, Any], told: str
) -> None:
    def plan() -> CachePlan:
        checked = StorageConfig(**check_part(storage, StorageConfig, "storage"))
        return job_of(tmp_path, cache_dtype=dtype, storage=checked).cache_plan

    with pytest.raises(ConfigError, match=told):
        plan()


class Formed(StreamingLLM):
    """Stores everything in four bits of codebooks."""

    uses = Uses(precisions=True)

    def precisions(self, layer: int, at: object) -> list[Precision]:
        return [Precision(4, shared=True)]


def test_a_method_with_forms_gets_codebooks_whatever_the_dtype(tmp_path: Path) -> None:
    job = job_of(tmp_path, method=Formed(sinks=1))
    memory = execute.run(job).results.memory
    lone = job.model.spec.all_heads  # every head's first scale is one token, in 16 bits
    bits = lone * 16 + (memory.peak_tokens - lone) * 4
    assert memory.sequence_bytes == 2 * 8 * bits // 8 // 2  # a pair of branches stores it once
    assert prepare.find_used_files(job_of(tmp_path, method=Formed(sinks=1)))[1] is not None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"method": HardKV(sinks=1, merge="fixed")}, "cache_dtype=int4: .* would be requantised"),
        ({"model": Fake()}, "cache_dtype=int4: .*not a multiple of 8"),
        ({"storage": replace(ROTATED, values="token")}, "is 8, .*; set storage.keys"),
        ({"storage": StorageConfig(exempt=1)}, r"storage.exempt=1: .*; set at most 0"),
    ],
)
def test_what_few_bits_cannot_do_is_refused(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    job = replace(job_of(tmp_path, cache_dtype="int4", storage=more.pop("storage", CHANNEL)), **more)
    with pytest.raises(ConfigError, match=told):
        check_job(job)


def test_storage_without_effect_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dtype, storage, told in (
        ("fp8", StorageConfig(residual=4), False),
        ("int4", StorageConfig(group=2), False),
        ("fp8", ROTATED, True),
    ):
        check_job(job_of(tmp_path, cache_dtype=dtype, storage=storage))
        assert ("some or all settings of storage have no effect" in caplog.text) == told
