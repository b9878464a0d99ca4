"""Step that compares kernels with double precision at real shapes, and attention repeated by a CUDA graph."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from benchmarks.gpu_steps.base import Case, Failed, Figures, Machine, Skipped
from benchmarks.support.plane_cases import Stored, arrange_lengths, make_plane
from benchmarks.support.reference_attention import attention, received
from benchmarks.support.tape import Tape
from kvbench.engine.recording.graphs import CudaGraphs
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.attention_paths import PATHS, Path, describe, find_obstacle
from kvbench.kernels.compact import rebuild_both, source_table
from kvbench.kernels.decode_attention import decode_token
from kvbench.kernels.group_norm import group_norm
from kvbench.kernels.layout import Past, list_positions, locate_rows
from kvbench.kernels.modulate import EPSILON, modulate
from kvbench.kernels.past_attention import attend_past
from kvbench.kernels.planes import read_plane
from kvbench.kernels.qk_norm_rope import qk_norm_rope
from kvbench.kernels.quantised_attention import quantised_attention
from kvbench.kernels.ragged_attention import ragged_attention

BOUNDS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}
"""Maximum relative root mean square error of a row's output: half a unit in the last place in 16 bits. In 32 bits it
allows sums of thousands of products; products in TF32 would have an error of about 5e-4."""
LSE_BOUND = 1e-3
"""Maximum error of a log-sum-exp in nats."""
FORMS = (
    Stored(8, "channel", "token"), Stored(4, "channel", "token"), Stored(2, "token", "token"),
    Stored(4, "codebook", "codebook"), Stored(8, "fp8", "fp8"),
)  # fmt: skip


class Shape(NamedTuple):
    """Sequences, queries, cached slots of each row, channels of a head."""

    batch: int
    queries: int
    past: Sequence[int]
    channels: int


class Inputs(NamedTuple):
    """Queries, keys and values [batch, rows, queries, D] and the cached past."""

    q: Tensor
    k: Tensor
    v: Tensor
    past: Past


def list_cases(machine: Machine) -> Iterator[Case]:
    """Yield the cases: each attention kernel at every shape, then the other kernels."""
    queries, slots = (
        machine.choose((1, 64, 1024), (1, 20), (5,)),
        machine.choose((0, 33, 900, 4100), (0, 3, 40)),
    )
    wide = machine.choose((64, 128, 136, 256), (16, 40), (16,))
    kinds = [(channels, machine.half) for channels in wide]
    kinds += [(wide[0], torch.float32)] if machine.interpreted else [(64, torch.float16), (64, torch.float32)]
    for (channels, dtype), count in product(kinds, queries):
        shape, name = Shape(2, count, slots, channels), f"{_name(dtype)} D={channels} queries={count}"
        make = partial(make_inputs, machine, shape, dtype)
        for path in machine.choose(PATHS, ("kernel", "parts", "varlen_cudnn")):
            if path != "products":
                yield Case(f"attention, {path} {name}", partial(check_attention, machine, make, path))
        if count > 1:
            yield Case(f"mass {name}", partial(check_mass, machine, make))
        yield Case(f"attention to the past {name}", partial(check_past, machine, make))
    for (channels, dtype), form in product(kinds[: machine.choose(2, 2, 1)], FORMS):
        shape = Shape(2, queries[-1], slots[-1:] * 2, channels)
        name = f"{form.name} {_name(dtype)} D={channels}"
        yield Case(f"attention to codes {name}", partial(check_codes, machine, shape, dtype, form))
    for channels, dtype in kinds:
        make = partial(make_inputs, machine, Shape(2, 1, slots, channels), dtype, free_slots=4)
        yield Case(f"one token {_name(dtype)} D={channels}", partial(check_step, machine, make))
    make = partial(make_inputs, machine, Shape(2, queries[-1], slots, wide[0]), machine.half)
    yield Case("rebuild of storage", partial(check_rebuild, machine, make))
    yield Case("modulation", partial(check_modulate, machine))
    yield Case("norm and rotation", partial(check_norm_rope, machine))
    yield Case("group norm and SiLU", partial(check_group_norm, machine))
    yield Case("attention repeated by a CUDA graph", partial(check_graph, machine, make))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_inputs(machine: Machine, shape: Shape, dtype: torch.dtype, free_slots: int = 0) -> Inputs:
    """Make random inputs; the variance of scores is about 4, as in a trained model."""
    generator = torch.Generator().manual_seed(sum(shape.past) + shape.queries + shape.channels)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(machine.device, dtype)

    q, k, v = draw(shape.batch, shape.queries, 3, len(shape.past), shape.channels).transpose(1, 3).unbind(2)
    layout = arrange_lengths(shape.past, machine.device, free_slots)
    keys, values = (draw(shape.batch, layout.capacity, shape.channels) for _ in range(2))
    return Inputs(q * (2 * shape.channels**-0.5), k, v, Past(keys, values, layout))


Make = Callable[[], Inputs]


def check_attention(machine: Machine, make: Make, path: Path) -> Figures:
    """Compare attention over past and present by a path; skip the case if the path cannot serve the shape here."""
    x = make()
    if not machine.interpreted and (
        reason := find_obstacle(path, describe(x.q, x.k, x.past.layout), x.q.device)
    ):
        raise Skipped(f"{path}: {reason}")
    with machine.branches():
        state = ragged_attention(x.q, x.k, x.v, x.past, 1.0, path=path)
    return compare_states(state, x, present=True)


def check_past(machine: Machine, make: Make) -> Figures:
    """Compare attention over the past with double precision, row by row."""
    x = make()
    with machine.branches():
        state = attend_past(x.q, x.past, 1.0)
    return compare_states(state, x, present=False)


def check_step(machine: Machine, make: Make) -> Figures:
    """Compare attention of one new token, and its storage, with double precision."""
    x = make()
    filled = torch.zeros(1, dtype=torch.int64, device=machine.device)
    with machine.branches():
        out = decode_token(x.q, x.k, x.v, locate_rows(x.past, filled), 1.0)
    return compare_states((out, None), x, present=True)


def compare_states(state: tuple[Tensor, Tensor | None], x: Inputs, *, present: bool) -> Figures:
    """Compare outputs and log-sum-exps row by row with double precision."""
    out, lse = state
    worst, worst_lse, layout = 0.0, 0.0, x.past.layout
    for row, (start, length) in enumerate(zip(layout.offsets.tolist(), layout.counts, strict=True)):
        past = x.past.keys[:, start : start + length], x.past.values[:, start : start + length]
        now = slice(None) if present else slice(0)
        expected, sums = attention(x.q[:, row], past, (x.k[:, row, now], x.v[:, row, now]), 1.0, False)
        worst = max(worst, measure_error(out[:, row], expected))
        if lse is not None and torch.isfinite(sums).all():
            worst_lse = max(worst_lse, float((lse[:, row] - sums).abs().max()))
        elif lse is not None and not torch.equal(lse[:, row].double(), sums):
            raise Failed(f"row {row} is empty, but its log-sum-exp is not -inf")
    require(worst, BOUNDS[x.q.dtype], "relative error of the output")
    require(worst_lse, LSE_BOUND, "error of the log-sum-exp")
    return {"error": worst} | ({} if lse is None else {"lse_error": worst_lse})


def measure_error(out: Tensor, expected: Tensor) -> float:
    """Return the root mean square error relative to the expected result."""
    difference = (out.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def require(error: float, bound: float, what: str) -> None:
    """Raise `Failed` if an error exceeds its bound or is NaN."""
    if not error <= bound:
        raise Failed(f"{what} {error:.2g}, bound {bound:.2g}")


def compare_results(out: Tensor, expected: Tensor, bound: float) -> Figures:
    """Compare a result with the expected one in double precision."""
    error = measure_error(out, expected)
    require(error, bound, "relative error")
    return {"error": error}


def check_mass(machine: Machine, make: Make) -> Figures:
    """Compare attention mass with double precision."""
    x = make()
    with machine.branches():
        mass = attention_mass(x.q, x.k, x.past, 1.0)
    worst, layout = 0.0, x.past.layout
    for row, (start, length) in enumerate(zip(layout.offsets.tolist(), layout.counts, strict=True)):
        past = x.past.keys[:, start : start + length]
        expected = received(x.q[:, row], past, x.k[:, row], 1.0, 1)
        shown = torch.cat((mass[:, row, :length], mass[:, row, layout.longest :]), 1)
        worst = max(worst, measure_error(shown, expected))
    require(worst, 1e-4, "relative error of the mass")
    return {"error": worst}


def check_codes(machine: Machine, shape: Shape, dtype: torch.dtype, form: Stored) -> Figures:
    """Compare attention over codes with attention over the decoded keys and values."""
    layout = arrange_lengths(shape.past)
    drawn = make_plane(form, layout, shape.batch, shape.channels, block=min(256, shape.past[0]))
    plane = tree_map(lambda x: x.to(machine.device) if isinstance(x, Tensor) else x, drawn)
    generator = torch.Generator().manual_seed(0)
    size = shape.batch, len(shape.past), shape.queries, shape.channels
    q = torch.randn(size, generator=generator).to(machine.device, dtype) * shape.channels**-0.5
    with machine.branches():
        state = quantised_attention(q, plane, 1.0)
    keys, values = (x.to(dtype) for x in read_plane(plane))
    return compare_states(state, Inputs(q, q, q, Past(keys, values, plane.layout)), present=False)


def check_rebuild(machine: Machine, make: Make) -> Figures:
    """Compare moved keys and values with plain indexing, bit for bit."""
    x = make()
    layout, tokens = x.past.layout, x.k.shape[2]
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(len(layout.counts), layout.longest + tokens, generator=generator) < 0.5
    positions = list_positions(layout, layout.longest, tokens)
    after, source = source_table(layout, keep.to(machine.device), positions, tokens)
    out = tuple(old.new_empty(len(old), len(source), old.shape[2]) for old in x.past[:2])
    with machine.branches():
        rebuild_both(x.past[:2], (x.k, x.v), source, (out[0], out[1]))
    indices = torch.where(source < 0, layout.capacity - 1 - source, source)
    for moved, stored, present in zip(out, x.past[:2], (x.k, x.v), strict=True):
        expected = torch.cat((stored, present.flatten(1, 2)), 1).index_select(1, indices)
        if not torch.equal(moved, expected):
            raise Failed("moved keys or values differ from the kept slots")
    return {"slots": after.total}


def check_modulate(machine: Machine) -> Figures:
    """Compare a layer norm, scaled and shifted by a condition, with double precision."""
    tokens, width = machine.choose((4096, 2048), (20, 64))
    x = torch.randn(2, tokens, width, device=machine.device)
    factor, shift = (torch.randn(2, 1, width, device=machine.device) for _ in range(2))
    with torch.inference_mode(), machine.branches():
        out = modulate(x, factor, shift, machine.half)
    normal = F.layer_norm(x.double(), (width,), eps=EPSILON)
    return compare_results(out, normal * factor.double() + shift.double(), BOUNDS[machine.half])


def check_norm_rope(machine: Machine) -> Figures:
    """Compare normalised and rotated queries and keys with double precision."""
    tokens, heads, channels = machine.choose((4096, 16, 128), (20, 2, 16))
    qkv = torch.randn(2, tokens, 3, heads, channels, device=machine.device)
    lengths = torch.rand(2, heads, device=machine.device) + 1
    angles = torch.rand(tokens, channels // 2, device=machine.device)
    rotation = torch.polar(torch.ones_like(angles), angles)
    wide = F.normalize(qkv[:, :, :2].double(), dim=-1) * lengths.double()[..., None]
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
    expected = torch.view_as_real(pairs * rotation[:, None, None]).flatten(-2).permute(2, 0, 3, 1, 4)
    with torch.inference_mode(), machine.branches():
        q, k, _ = qk_norm_rope(qkv.clone(), lengths, rotation)
    return compare_results(torch.stack((q, k)), expected, BOUNDS[torch.float32])


def check_group_norm(machine: Machine) -> Figures:
    """Compare a group norm with SiLU over channels-last images with double precision."""
    channels, groups, side = machine.choose((160, 32, 256), (96, 24, 9))
    x = torch.randn(2, channels, side, side, device=machine.device).to(machine.half)
    x = x.to(memory_format=torch.channels_last)
    weight, bias = (torch.randn(channels, device=machine.device) for _ in range(2))
    with torch.inference_mode(), machine.branches():
        out = group_norm(x, groups, weight, bias, EPSILON, silu=True)
    normal = F.group_norm(x.double(), groups, weight.double(), bias.double(), EPSILON)
    return compare_results(out, F.silu(normal), BOUNDS[machine.half])


def check_graph(machine: Machine, make: Make) -> Figures:
    """Compare a graph that repeats attention on new inputs with a new launch, bit for bit."""
    x = make()
    work = partial(ragged_attention, x.q, x.k, x.v, x.past, 1.0)
    work()
    record = Tape() if machine.interpreted else CudaGraphs()
    out, repeat = record(lambda: work()[0])
    x.q.mul_(-0.5)
    x.past.keys.mul_(0.5)
    repeat()
    if not torch.equal(out, work()[0]):
        raise Failed("a repeated graph and a launch give different results")
    return {}
