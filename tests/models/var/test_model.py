"""VAR as the harness sees it: prompts, memory and dtypes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.core.settings import Settings
from kvbench.engine.memory import paper_mib
from kvbench.models.base import read_labels
from kvbench.models.files.parameters import build_on_meta, fill_random
from kvbench.models.var.model import VARModel
from kvbench.models.var.transformer import VAR, VARConfig
from kvbench.runs.cache_plan import find_dtype
from tests.support.small_models import configured


@pytest.mark.parametrize(("name", "batch", "printed"), [("var_d30", 50, 22.412), ("var_d36", 25, 53.156)])
def test_memory_of_all_tokens_is_what_papers_print(name: str, batch: int, printed: float) -> None:
    spec = configured(f"model={name}").spec
    assert paper_mib(spec.all_heads * spec.ends[-1], spec, batch) / 1000 == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize(
    ("prompt", "label"), [("3", 3), ("0 tench", 0), (" 9  two words ", 9), ("-1", 30), ("-1 anything", 30)]
)
def test_the_first_word_is_the_class(prompt: str, label: int) -> None:
    assert read_labels([prompt], 30, "var_tiny") == [label]


def test_random_numbers_belong_to_the_shape() -> None:
    shapes = ({"depth": 2}, {"depth": 3}, {"depth": 2, "classes": 9})
    base = VARConfig(1, 32, 2, (1, 2), classes=5, codes=16, channels=4)
    made = [fill_random(build_on_meta(lambda own=own: VAR(replace(base, **own)))) for own in shapes]
    assert len(set(made)) == 3


def test_on_a_gpu_temperatures_stay_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VARModel, "compute_dtype", lambda *_: VARModel.half)  # there is no GPU
    one = configured("model=var_tiny", "model.weights=random", "model.transformer.shared_aln=true")
    one.load("cpu")
    block = one._transformer.blocks[0]
    assert block.attn.scale_mul_1H11.dtype == block.ada_gss.dtype == torch.float32
    assert block.attn.mat_qkv.weight.dtype == block.ffn.fc2.bias.dtype == torch.float16
    assert one._transformer.head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("var_d30", "cuda", torch.float16),
        ("infinity_2b", "cuda:1", torch.bfloat16),
        ("var_d30", "cpu", torch.float32),
        ("infinity_tiny", "cpu", torch.float32),
    ],
)
def test_keys_and_values_are_stored_as_computed(name: str, device: str, dtype: torch.dtype) -> None:
    one = configured(f"model={name}")
    assert one.compute_dtype(device) == dtype
    for asked, stored in (("auto", dtype), ("bfloat16", torch.bfloat16)):
        settings = Settings("run", 1, 1, 0, 8, device, asked, Path("runs"))
        assert find_dtype(settings, one) == stored
