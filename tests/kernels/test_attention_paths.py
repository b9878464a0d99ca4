"""Choice between attention's paths: what each refuses and says, measured tables, published rates."""

import json
from itertools import product
from pathlib import Path
from typing import get_args
from unittest.mock import MagicMock

import pytest
import torch

from kvbench.kernels import attention_paths as paths
from kvbench.kernels import decode_attention, fused_attention, varlen_attention
from kvbench.kernels.attention_choices import AttentionChoice, note_choice, watch_choices
from kvbench.kernels.batch_invariance import set_batch_invariant
from kvbench.kernels.fused_attention import Request, choose_backend
from kvbench.kernels.ragged_attention import dense_attention, ragged_attention
from kvbench.kernels.varlen_attention import find_varlen_obstacle
from tests.support.fake_device import CUDA, Device, stand_in
from tests.support.ragged_rows import make

CPU = torch.device("cpu")
UNMEASURED = "not measured at a comparable shape (python -m benchmarks kernels --paths)"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    stand_in(monkeypatch, Device())
    return monkeypatch


def shape(
    tokens: int, past: int, *, rows: int = 256, head_dim: int = 128, uniform: bool = False
) -> paths.Shape:
    return paths.Shape(head_dim, "bfloat16", rows, tokens, tokens, past, uniform)


def test_backends_are_chosen_by_published_rates(hopper: pytest.MonkeyPatch) -> None:
    assert choose_backend(Request(128, torch.bfloat16, 4096, CUDA)) == "cudnn"
    assert choose_backend(Request(128, torch.bfloat16, 1, CUDA)) == "cudnn"
    assert choose_backend(Request(256, torch.bfloat16, 4096, CUDA)) == "flash"
    assert choose_backend(Request(264, torch.bfloat16, 4096, CUDA)) == "efficient"
    assert choose_backend(Request(128, torch.float32, 4096, CUDA)) == "efficient"
    assert choose_backend(Request(128, torch.float32, 4096, CPU)) == "cpu"
    stand_in(hopper, Device(), cudnn=92300)
    assert choose_backend(Request(128, torch.bfloat16, 129, CUDA)) == "cudnn"
    assert choose_backend(Request(128, torch.bfloat16, 128, CUDA)) == "flash"
    stand_in(hopper, Device(), flash="FA3")
    assert choose_backend(Request(128, torch.bfloat16, 4096, CUDA)) == "flash"
    assert choose_backend(Request(128, torch.float32, 4096, CUDA)) == "efficient"
    stand_in(hopper, Device(major=7))
    assert choose_backend(Request(128, torch.float16, 4096, CUDA)) == "efficient"
    stand_in(hopper, Device())
    hopper.setattr(fused_attention, "_is_single_query_disabled", lambda: True)
    assert choose_backend(Request(128, torch.bfloat16, 1, CUDA)) == "flash"
    assert choose_backend(Request(128, torch.bfloat16, 2, CUDA)) == "cudnn"


@pytest.mark.parametrize("refused", [None, RuntimeError("no\nkernels")], ids=["activates", "fails"])
def test_flash_attention_3_is_activated_once(hopper: pytest.MonkeyPatch, refused: Exception | None) -> None:
    activate = MagicMock(side_effect=refused)
    fused_attention._activate_fa3.cache_clear()
    assert fused_attention.find_fa3_obstacle(CUDA) == "flash_attn_interface is not installed"
    hopper.setattr(fused_attention, "find_spec", lambda _: object())
    hopper.setattr(fused_attention, "activate_flash_attention_impl", activate)
    hopper.setattr(fused_attention, "current_flash_attention_impl", lambda: None)
    fused_attention._activate_fa3.cache_clear()
    expected = None if refused is None else "cannot be activated: no kernels"
    assert [fused_attention.find_fa3_obstacle(CUDA) for _ in range(2)] == [expected] * 2
    activate.assert_called_once_with("FA3")
    stand_in(hopper, Device(), flash="FA4")
    assert fused_attention.find_fa3_obstacle(CUDA) == "FA4 is active in its place"
    fused_attention._activate_fa3.cache_clear()


@pytest.mark.parametrize(
    ("path", "changes", "device", "reason"),
    [
        ("kernel", {}, Device(), None),
        ("kernel", {"head_dim": 260}, Device(), "needs at most 256 channels, a multiple of 4"),
        ("kernel", {"head_dim": 22}, Device(), "needs at most 256 channels, a multiple of 4"),
        ("kernel", {"head_dim": 100}, Device(), None),
        ("products", {}, Device(), "reads rows by length, for CPUs"),
        ("parts", {}, Device(), None),
        ("parts", {"head_dim": 100}, Device(), "needs a multiple of 8 channels"),
        ("parts", {"tokens": 0}, Device(), "there is no present"),
        ("varlen_cudnn", {}, Device(), None),
        ("varlen_cudnn", {"past": 0}, Device(), "there is no past"),
        ("varlen_cudnn", {"dtype": "float32"}, Device(), "needs 16 bits"),
        ("varlen_cudnn", {"head_dim": 136}, Device(), "needs heads of at most 128 channels, a multiple of 8"),
        ("varlen_cudnn", {}, Device(major=8), "needs a GPU of capability 9.0"),
        ("varlen_cudnn", {}, Device(major=12), "needs a GPU of capability 9.0 or 10.0"),
        ("varlen_flash", {}, Device(major=8), None),
        ("varlen_flash", {"head_dim": 264}, Device(), "needs heads of at most 256 channels"),
        ("varlen_flash", {"head_dim": 20}, Device(), "needs a multiple of 8 channels"),
        ("varlen_flash", {}, Device(major=7), "needs a GPU of capability 8.0"),
        ("varlen_fa3", {}, Device(), "flash_attn_interface is not installed"),
        ("varlen_fa3", {}, Device(major=10), "needs a GPU of capability 9.0"),
    ],
)
def test_a_path_says_why_not(
    path: paths.Path,
    changes: dict[str, object],
    device: Device,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, device)
    assert paths.find_obstacle(path, shape(4096, 400)._replace(**changes), CUDA) == reason


def test_libraries_need_a_release_of_torch(hopper: pytest.MonkeyPatch) -> None:
    for release, found, library, reason in (
        ("2.11.0", None, "flash", "needs torch 2.12, whose varlen_attn takes lengths; this is 2.11.0"),
        ("2.14.1", object, "flash", None),
        ("2.14.1", object, "cudnn", "needs torch 2.15, which lets the caller choose it; this is 2.14.1"),
    ):
        hopper.setattr(varlen_attention, "find_varlen", lambda found=found: found)
        hopper.setattr(torch, "__version__", release)
        assert find_varlen_obstacle(library, Request(128, torch.bfloat16, 4096, CUDA)) == reason


@pytest.mark.parametrize("cudnn", [91700, 92300, 92600])
def test_cudnn_is_asked_where_torch_would_ask_it(cudnn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of at most 128 channels: torch lists more reasons for wider heads, which other libraries read."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "_cudnn_rejection_reasons"):
        pytest.skip("this torch does not choose between libraries")
    monkeypatch.setattr(varlen, "_cudnn_decode_disabled", lambda _: False)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        for major, dtype, head_dim, queries in product(
            (8, 9, 10, 12), (torch.float32, torch.float16, torch.bfloat16), (20, 64, 128, 136), (1, 128, 129)
        ):
            stand_in(monkeypatch, Device(major=major), cudnn)
            varlen._cudnn_version_and_major_capability.cache_clear()
            varlen._should_use_cudnn.cache_clear()
            x = torch.empty(4, 1, head_dim, dtype=dtype, device=CUDA)
            ends = torch.empty(2, dtype=torch.int32, device=CUDA)
            theirs = varlen._cudnn_rejection_reasons(x, x, x, ends, ends, queries, [-1, -1], ends)
            ours = find_varlen_obstacle("cudnn", Request(head_dim, dtype, queries, CUDA))
            assert (ours is None) == (not theirs), (major, dtype, head_dim, queries, ours, theirs)
    varlen._cudnn_version_and_major_capability.cache_clear()
    varlen._should_use_cudnn.cache_clear()


def test_unmeasured_two_parts_must_save_a_launch(hopper: pytest.MonkeyPatch) -> None:
    """Scales of Infinity-2B at batch 8 with guidance, and a GPU without published rates; no library is imported."""
    hopper.setattr(
        varlen_attention, "find_varlen", lambda: pytest.fail("imports torch's compiler, which takes seconds")
    )
    sides = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
    chosen = [paths.choose_path(shape(side**2, 400), CUDA) for side in sides]
    assert chosen == ["kernel"] * 9 + ["parts"] * 4
    assert paths.choose_path(shape(4096, 400, head_dim=64), CUDA) == "kernel"
    assert paths.choose_path(shape(4096, 4000, uniform=True)._replace(tokens=0), CUDA) == "kernel"
    # By hand: 4 x 256 x 1024^2 x 128 operations at 389 and at 609 TFLOP/s, the output read and written once more.
    faster = 4 * 256 * 1024**2 * 128 * (1 / 389e12 - 1 / 609e12)
    assert paths.estimate_saving(shape(1024, 400), "cudnn") == pytest.approx(
        faster - 4 * 256 * 1024 * 128 / 3.35e12
    )
    assert paths.estimate_saving(shape(1024, 0), "cudnn") == pytest.approx(faster)
    stand_in(hopper, Device(major=8))
    # FlashAttention-2 is no faster than the kernel.
    assert paths.choose_path(shape(4096, 400), CUDA) == "kernel"


def write_table(patch: pytest.MonkeyPatch, folder: Path, *lines: dict[str, object]) -> None:
    table = folder / "table.json"
    table.write_text(json.dumps({"a GPU": lines, "another": []}))
    patch.setattr(paths, "TABLE", table)
    paths.read_table.cache_clear()


def test_the_nearest_measurement_decides(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(one: paths.Shape, **milliseconds: float) -> dict[str, object]:
        return one._asdict() | {"milliseconds": milliseconds}

    near, far = shape(256, 100, head_dim=64), shape(16, 100, head_dim=64)
    write_table(
        hopper, tmp_path,
        measured(far, kernel=1.0, parts=2.0),
        measured(near, kernel=3.0, parts=2.0, varlen_fa3=1.0),
        measured(shape(200, 100, head_dim=64, uniform=True), kernel=1.0, parts=2.0, varlen_cudnn=0.5),
    )  # fmt: skip
    try:
        # The fastest of those that can.
        assert paths.choose_path(shape(200, 90, head_dim=64), CUDA) == "parts"
        assert paths.choose_path(shape(20, 90, head_dim=64), CUDA) == "kernel"
        assert paths.choose_path(shape(200, 90, head_dim=64, uniform=True), CUDA) == "varlen_cudnn"
        assert paths.choose_path(near._replace(tokens=0), CUDA) == "kernel"  # no such case was measured
        assert paths.choose_path(shape(4096, 90), CUDA) == "parts"  # 128 channels: by published rates
        reasons = dict(paths.explain_path(near, CUDA).others)
        assert reasons["kernel"] == "3 ms against 2 ms at the nearest measured shape"
        assert reasons["varlen_cudnn"] == UNMEASURED
        assert reasons["varlen_fa3"] == "flash_attn_interface is not installed"
        hopper.setattr(fused_attention, "_activate_fa3", lambda: None)
        assert paths.choose_path(near, CUDA) == "varlen_fa3"
    finally:
        paths.read_table.cache_clear()


def test_the_table_of_this_package_can_be_read() -> None:
    for line in (line for lines in paths.read_table().values() for line in lines):
        assert set(line) == {*paths.Shape._fields, "milliseconds"}
        assert set(line["milliseconds"]) <= set(get_args(paths.Path))


def test_an_explanation_names_every_other_path(hopper: pytest.MonkeyPatch) -> None:
    slower, missing = "saves less than 20 us by published rates", "flash_attn_interface is not installed"
    choice = paths.explain_path(shape(4096, 400), CUDA)
    assert choice.path == paths.choose_path(shape(4096, 400), CUDA) == "parts"
    assert dict(choice.others) == {
        "products": "reads rows by length, for CPUs", "kernel": slower, "varlen_cudnn": UNMEASURED,
        "varlen_flash": UNMEASURED, "varlen_fa3": missing,
    }  # fmt: skip
    assert dict(paths.explain_path(shape(16, 400), CUDA).others)["parts"] == slower
    on_cpu = paths.explain_path(shape(16, 400), CPU)
    assert on_cpu == AttentionChoice("products", tuple((path, "needs a GPU") for path in paths.PATHS[1:]))


def test_invariant_batches_rule_libraries_out(hopper: pytest.MonkeyPatch) -> None:
    set_batch_invariant(True)
    try:
        choice = paths.explain_path(shape(4096, 400), CUDA)
    finally:
        set_batch_invariant(False)
    assert choice.path == "kernel"
    said = "divides keys by the size of the batch (batch_invariant=true)"
    divided = [path for path, reason in choice.others if reason == said]
    assert divided == ["parts", "varlen_cudnn", "varlen_flash"]


def test_a_backend_says_why_not(hopper: pytest.MonkeyPatch) -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        q = torch.empty(1, 2, 400, 64, dtype=torch.bfloat16, device=CUDA)
        choice = fused_attention.explain_backend(q)
    slower = "slower than cudnn by published rates"
    others = (("flash", slower), ("efficient", slower), ("cpu", "reads the CPU's memory"))
    assert choice == AttentionChoice("dense cudnn", others)


def test_choices_are_told_to_who_watches() -> None:
    case, seen = make(1, [3, 0], 1, 4, 16, device="cpu"), []
    with watch_choices(seen.append):
        ragged_attention(*case, 1.0)
        dense_attention(case.q, case.k, case.v, 1.0)
    assert [choice.path for choice in seen] == ["products", "dense products"]
    assert dict(seen[0].others)["kernel"] == "needs a GPU"
    note_choice(lambda: pytest.fail("explained without an observer"))


def test_steps_tell_how_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for held, arrangement, path, other in (
        ([4, 4], "grouped", "decode in place", ("kernel", "needs a GPU")),
        ([9, 4, 4, 4], "grouped", "decode grouped", ("padded", "costs more for rows of these lengths")),
        ([9, 4], "kernel", "decode kernel", ("torch's attention", "reads rows of one length, or copies")),
    ):
        monkeypatch.setattr(decode_attention, "_choose", lambda *_, chosen=arrangement: chosen)
        seen = list[AttentionChoice]()
        with watch_choices(seen.append):
            decode_attention.prepare_rows(make(1, held, 1, 1, 16, device="cpu").stored)
        assert [choice.path for choice in seen] == [path]
        assert other in seen[0].others


def test_provenance_has_the_table_and_what_can_serve(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_table(hopper, tmp_path, shape(256, 100)._asdict() | {"milliseconds": {"kernel": 1.0}})
    told = paths.describe_paths(128, torch.bfloat16, CUDA)
    paths.read_table.cache_clear()
    assert told["measured"] is True
    assert told["fused"] == "cudnn"
    assert told["paths"]["varlen_cudnn"] == "can serve"  # type: ignore[index]
    on_cpu = paths.describe_paths(128, torch.float32, CPU)
    assert (on_cpu["measured"], on_cpu["fused"]) == (False, None)
    assert on_cpu["paths"] == {
        "products": "can serve", "kernel": "needs a GPU", "parts": "needs a GPU",
        **dict.fromkeys(paths.LIBRARIES, "not measured on this device"),
    }  # fmt: skip
