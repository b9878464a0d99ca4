"""What the compiler makes of the kernels, without a GPU: pipelined loops, no spills, few variants per generation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = """
import json, sys, torch
sys.path.insert(0, ".")
from benchmarks.compiled import compile_variant
from benchmarks.support.kernel_variants import attention, decode, past, quantised
from benchmarks.support.plane_cases import Stored
sizes = [(head_dim, queries) for head_dim in (64, 128) for queries in (64, 4096)]
whole = [attention(torch.bfloat16, d, n, 64) for d, n in sizes]
whole += [past(torch.bfloat16, d, n, 64) for d, n in sizes]
steps = [decode(torch.bfloat16, d, n) for d in (64, 128) for n in (1, 8)]
channel, static = Stored(4, "channel", "token"), Stored(3, "codebook", "codebook")
planes = [quantised(torch.bfloat16, d, n, form) for d, n, form in ((128, 1, channel), (64, 4096, static))]
print(json.dumps([[vars(compile_variant(variant, 90)) for variant in variants] for variants in (whole, steps, planes)]))
"""

# The launches of whole generations on a driver that only names its device: Triton works out which compiled variant each
# launch needs, then is told that it need not compile it.
COUNT = """
import json, sys, torch, triton
sys.path.insert(0, ".")
from benchmarks.support.plane_cases import Stored, arrange_lengths, make_plane
from triton import knobs
from triton.backends.compiler import GPUTarget
from kvbench.kernels.triton.attention_mass import attention_mass_triton
from kvbench.kernels.triton.compact import rebuild_triton
from kvbench.kernels.layout import locate_rows
from kvbench.kernels.triton.decode_attention import decode_attention_triton
from kvbench.kernels.triton.modulate import modulate_triton
from kvbench.kernels.triton.past_attention import past_attention_triton
from kvbench.kernels.qk_norm_rope import HeadNorms
from kvbench.kernels.triton.qk_norm_rope import grouped_norm_rope_triton, qk_norm_rope_triton
from kvbench.kernels.triton.quantised_attention import quantised_attention_triton
from kvbench.kernels.triton.ragged_attention import ragged_attention_triton
from kvbench.kernels.triton.rms_norm import rms_norm_triton
from kvbench.kernels.triton.softmax import merge_pair_triton
from kvbench.kernels.triton.swiglu import silu_mul_triton
from kvbench.kernels.compact import source_table
from kvbench.kernels.layout import Past, arrange_rows, empty_layout, list_positions

from benchmarks.support.kernel_variants import sized_for
sizes = sized_for(int(sys.argv[1]))
sizes.__enter__()

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
needed, launches = {}, 0
def note(*, fn, compile, **_):
    global launches
    launches += 1
    needed.setdefault(fn.name, set()).add(str(compile["key"]))
    return True
knobs.runtime.jit_cache_hook = note

for batch in (1, 2, 16):
    rows, channels, start = 3, 128, 0
    layout = empty_layout(rows, "cpu")
    storage = torch.empty(batch, 0, channels, dtype=torch.bfloat16)
    for length in (1, 4, 16, 36, 64, 144, 256, 400, 576, 1024, 1600, 2304, 4096):
        qkv = torch.empty(batch, length, 3, rows, channels, dtype=torch.bfloat16)
        stream, condition = torch.empty(batch, length, rows * channels), torch.empty(batch, 6, 1, rows * channels)
        modulate_triton(stream, condition[:, 2] + 1, condition[:, 4], torch.bfloat16, 1e-6)
        rotation = torch.empty(length, channels // 2, dtype=torch.complex64)
        q, k, v = qk_norm_rope_triton(qkv, torch.ones(2, rows), rotation, 1e-12)
        state = ragged_attention_triton(q, k, v, Past(storage, storage, layout), 1.0)
        merge_pair_triton(*state, *state)
        if layout.total:
            past_attention_triton(q, Past(storage, storage, layout), 1.0, state=state)
        attention_mass_triton(q, k, Past(storage, storage, layout), 1.0)
        attention_mass_triton(q[:, :, -1:], k, Past(storage, storage, layout), 1.0)
        keep = torch.rand(rows, layout.longest + length) < 0.3 + 0.2 * torch.arange(rows)[:, None]
        layout, source = source_table(layout, keep, list_positions(layout, start, length), length)
        moved = storage.new_empty(batch, len(source), channels)
        rebuild_triton((storage, storage), (k, v), source, (moved, moved))
        storage = moved
        form, held = Stored(4, "channel", "token"), arrange_lengths([start] * rows)
        plane = make_plane(form, held, batch, channels, block=64)
        quantised_attention_triton(q, plane, 1.0)
        start += length
    filled = torch.zeros(5, dtype=torch.int64)
    for longest in (0, 1, 48, 500, 1000):
        layout = arrange_rows(torch.empty(rows, longest, dtype=torch.int64), [longest, longest // 2, longest // 3], 5)
        storage = torch.empty(batch, layout.capacity, channels, dtype=torch.bfloat16)
        for step in range(5):
            q, k, v = torch.empty(batch, 1, 3, rows, channels, dtype=torch.bfloat16).transpose(1, 3).unbind(2)
            decode_attention_triton(q, k, v, locate_rows(Past(storage, storage, layout), filled[step:]), 1.0)
    weight = torch.empty(rows * channels, dtype=torch.bfloat16)
    norms = HeadNorms(weight[:channels], weight[:channels], None, None, 1e-6)
    for tokens in (512, 1):
        joint = torch.empty(batch, tokens, 5 * rows, channels, dtype=torch.bfloat16)
        grouped_norm_rope_triton(joint, rows, norms, torch.empty(tokens, channels // 2, dtype=torch.complex64))
        stream = torch.empty(batch, tokens, rows * channels, dtype=torch.bfloat16)
        rms_norm_triton(stream, None, weight, 1e-6)
        rms_norm_triton(stream, stream, weight, 1e-6)
        silu_mul_triton(stream, stream)
print(json.dumps({"launches": launches, "variants": {name: len(keys) for name, keys in needed.items()}}))
"""


def call(root: Path, *arguments: str) -> str:
    """What Python prints in a process of its own, where kernels are compiled and not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", *arguments]
    out = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


@pytest.mark.slow
def test_attention_is_pipelined_and_spills_nothing(root: Path) -> None:
    whole, steps, planes = json.loads(call(root, "-c", COMPILE))
    for compiled in whole:
        past, present, *_ = compiled["copies"]
        assert past >= 2
        assert present >= 2
        assert compiled["matrix"] > 0
    for compiled in steps:
        assert compiled["copies"][0] >= 2
    for compiled in planes:
        assert compiled["copies"][0] >= 4  # codes and tables of keys and of values
    assert planes[1]["matrix"] > 0
    for compiled in (*whole, *steps, *planes):
        assert compiled["while_loops"] == 0
        assert compiled["spilled"] == 0


@pytest.mark.slow
def test_a_generation_compiles_few_variants(root: Path) -> None:
    counted = json.loads(call(root, "-c", COUNT, "90"))
    assert counted["launches"] > 150
    most = {
        "attention_kernel": 5,  # one per number of queries and of keys in a tile
        "past_kernel": 5,
        "decode_kernel": 1,
        "quantised_kernel": 4,  # likewise, and one of a single query
        "merge_kernel": 1,
        "pair_kernel": 1,
        "sum_kernel": 1,
        "mass_kernel": 1,
        "copy_kernel": 1,
        "norm_rope_kernel": 2,  # cosine attention, and one kind of norm in a decoder
        "rms_norm_kernel": 2,  # with a sum and without
        "silu_mul_kernel": 1,
        "modulate_kernel": 1,
    }
    assert counted["variants"] == most
    for card in ("80", "120"):
        found = json.loads(call(root, "-c", COUNT, card))["variants"]
        assert found.keys() == most.keys()
        assert all(count <= most[name] for name, count in found.items())


@pytest.mark.slow
def test_the_largest_tiles_fit_shared_memory(root: Path) -> None:
    """`hard_kv merge=exact` has heads of 136 channels; RTX cards have 99 KiB."""
    printed = call(root, "-m", "benchmarks", "compiled", "--only", "attention bf16", "--arch", "86")
    assert "HEAD_DIM=136" in printed


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "120"])
def test_what_default_runs_launch_fits_and_tiles_are_those_that_the_compiler_gives(
    arch: str, root: Path
) -> None:
    """Few registers spill. The tiles of an H200 were timed; an RTX 40 uses the tiles of an RTX 30."""
    assert "\n| " in call(
        root, "-m", "benchmarks", "compiled", "--summary", "--models", "all", "--arch", arch
    )
    if arch not in ("89", "90"):
        assert "attention bf16" in call(root, "-m", "benchmarks", "tiles", "--only", "bf16", "--arch", arch)
