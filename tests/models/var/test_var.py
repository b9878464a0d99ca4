"""VAR's transformer, sampling, loop and tokenizer: equal to the official ones, and VAR as the harness sees it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec
from kvbench.core.settings import Settings
from kvbench.engine.cache import KVCache
from kvbench.engine.memory import paper_mib
from kvbench.methods.full import Full
from kvbench.models.base import NotFinite, read_labels
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.layers import make_attend
from kvbench.models.var import loop as var_generation
from kvbench.models.var.loop import draw_token_scales
from kvbench.models.var.model import VARModel
from kvbench.models.var.sampling import VARSampling, draw_tokens, truncate
from kvbench.models.var.tokenizer import choose_convolution
from kvbench.models.var.transformer import VARBlock, VARConfig
from kvbench.runs.cache_plan import find_dtype
from tests.support.drawing import close
from tests.support.engine import open_cache
from tests.support.reference import OneStream
from tests.support.reference_var import (
    FULL_VQ,
    SIDES,
    TINY_VQ,
    golden,
    meta,
    round_blocks,
    tokenizer,
    transformer,
)
from tests.support.small_models import configured


class Run(NamedTuple):
    """One reference run done again: what functions of the loop returned, scale by scale, and the sum of all codes."""

    expected: dict[str, Tensor]
    raw: list[Tensor]
    seen: dict[str, list[Tensor]]
    summed: Tensor


def open_full(config: VARConfig) -> KVCache:
    spec = ModelSpec("tiny", config.depth, config.heads, config.width // config.heads, config.segments)
    return open_cache(Full(), spec)


def rerun(kind: str, run: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Does a run again; the smooth one continues at every step from the official program's logits and codes.

    Its mixture makes 150 times of what logits differ by in rounding, and every later scale of that again.
    """
    settings = meta()["runs"][f"{kind}.{run}"]
    expected = {
        key.removeprefix(f"{run}."): t for key, t in golden(kind).items() if key.startswith(f"{run}.")
    }
    net, raw = transformer(kind), []
    seen: dict[str, list[Tensor]] = {
        name: [] for name in ("guide", "truncate", "draw_tokens", "draw_codes", "make_features")
    }

    def watch(name: str) -> None:
        inner = getattr(var_generation, name)

        def wrapped(*arguments: Any) -> Tensor:
            if name == "guide":
                raw.append(arguments[0])
            seen[name].append(inner(*arguments))
            if run == "smooth" and name in ("guide", "draw_codes"):
                scale = len(seen[name]) - 1
                codes = expected[f"s{scale}.h_BChw"].flatten(2).transpose(1, 2)
                return expected[f"s{scale}.logits_cfg"] if name == "guide" else codes
            return seen[name][-1]

        monkeypatch.setattr(var_generation, name, wrapped)

    for name in seen:
        watch(name)
    noise = OneStream(settings["g_seed"], settings["B"])
    labels = expected["label_2B"][: settings["B"]]
    if settings["label_B"] is None:  # the official program draws labels first, from the same stream
        classes = torch.ones(1, net.config.classes)
        drawn = torch.multinomial(classes, settings["B"], replacement=True, generator=noise.generator)
        assert torch.equal(drawn[0], labels)
    sampling = VARSampling(
        settings["cfg"], settings["top_k"], settings["top_p"], smooth=settings["more_smooth"]
    )
    summed = draw_token_scales(net, tokenizer(), labels, open_full(net.config), noise, sampling)
    return Run(expected, raw, seen, summed)


@pytest.mark.parametrize("run", ["sampled", "greedy", "smooth", "nulllabel", "randlabel"])
@pytest.mark.parametrize("kind", ["sep", "shared"])
def test_equals_the_official_program(kind: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done, compared = rerun(kind, run, monkeypatch), 0
    every = {
        "h_BChw": done.seen["draw_codes"], "next_pooled": done.seen["make_features"], "logits_raw": done.raw,
        "logits_filtered": done.seen["truncate"],
    }  # fmt: skip
    for scale, (logits, tokens) in enumerate(zip(done.seen["guide"], done.seen["draw_tokens"], strict=True)):
        close(logits, done.expected[f"s{scale}.logits_cfg"])
        assert torch.equal(tokens, done.expected[f"s{scale}.idx"]), f"tokens of scale {scale}"
        for name, found in every.items():
            if (expected := done.expected.get(f"s{scale}.{name}")) is not None:
                close(found[scale], expected.flatten(2).mT if expected.dim() == 4 else expected)
                compared += 1
    assert compared == {"sampled": 13, "smooth": 9}.get(run, 0)
    close(done.summed, done.expected["s4.f_hat"])
    with torch.inference_mode():
        close((tokenizer().decode(done.summed) + 1) / 2, done.expected["img"])


@pytest.mark.parametrize("kind", ["sep", "shared"])
def test_one_pass_equals_the_official_one_and_the_loop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = golden(kind)
    at_once = transformer(kind)(expected["tf.label"], expected["tf.x_in"])
    close(at_once, expected["tf.logits"])
    stepped = torch.cat([raw.chunk(2)[0] for raw in rerun(kind, "greedy", monkeypatch).raw], 1)
    close(at_once, stepped)


def under_autocast(
    block: VARBlock, x: Tensor, gss: Tensor, attend: Callable[..., Tensor], dtype: torch.dtype
) -> Tensor:
    """A block of float32 weights as the official program runs it: linear layers in `dtype`, norms in float32."""

    def linear(h: Tensor, layer: nn.Linear, bias: Tensor | None = None) -> Tensor:
        return F.linear(h.to(dtype), layer.weight.to(dtype), (layer.bias if bias is None else bias).to(dtype))

    def norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-6).mul(scale.add(1)).add_(shift)

    gate1, gate2, scale1, scale2, shift1, shift2 = gss.unbind(2)
    own = block.attn
    bias = torch.cat((own.q_bias, torch.zeros_like(own.q_bias), own.v_bias))
    qkv = linear(norm(x, scale1, shift1), own.mat_qkv, bias).unflatten(-1, (3, own.heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q = F.normalize(q.float(), dim=-1) * own.scale_mul_1H11.clamp_max(math.log(100)).exp()
    out = attend(0, q.to(dtype), F.normalize(k.float(), dim=-1).to(dtype), v, None)
    x = x + linear(out.transpose(1, 2).flatten(2), own.proj).mul_(gate1)
    h = F.gelu(linear(norm(x, scale2, shift2), block.ffn.fc1), approximate="tanh")
    return x + linear(h, block.ffn.fc2) * gate2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["sep", "shared"])
def test_a_block_rounds_where_autocast_does(kind: str, dtype: torch.dtype) -> None:
    exact, net = transformer(kind), transformer(kind)
    round_blocks(net, dtype)
    labels, x = golden(kind)["tf.label"], torch.randn(2, 14, 64, generator=torch.Generator().manual_seed(0))
    condition = net.condition(labels)
    silu = F.silu(exact.class_emb(labels))
    for layer, block in enumerate(exact.layers):
        ada = exact.shared_ada_lin[1] if kind == "shared" else block.ada_lin[1]
        gss = F.linear(silu.to(dtype), ada.weight.to(dtype), ada.bias.to(dtype)).unflatten(-1, (1, 6, 64))
        if kind == "shared":
            gss = block.ada_gss + gss
        attend = make_attend(net.config.segments[:3])
        expected = under_autocast(block, x, gss, attend, dtype)
        with torch.inference_mode():
            given = (layer, condition.modulation[layer], condition.projections[layer])
            found = net.layers[layer](x.clone(), *given, attend)
        # Elsewhere sums in another order are rounded the other way in their last bit.
        assert (found == expected).float().mean() > 0.95
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("number", range(8))
def test_equals_the_official_sampler(number: int) -> None:
    combination, expected = meta()["sampler_combos"][number], golden("sampler")
    sampling = VARSampling(top_k=combination["top_k"], top_p=combination["top_p"])
    found = truncate(expected["logits"], sampling)
    assert torch.equal(found, expected[f"filtered.{number}"])
    tokens = draw_tokens(found, OneStream(combination["seed"], len(found)))
    assert torch.equal(tokens, expected[f"idx.{number}"].squeeze(-1))


def test_logits_that_are_not_finite_are_refused() -> None:
    net, labels, noise = transformer("sep"), torch.tensor([3, 7]), PromptNoise(0, (0, 1))
    net.class_emb.weight[7] = float("nan")
    with pytest.raises(NotFinite, match="prompt 1 of the batch, segment 0"):
        draw_token_scales(net, tokenizer(), labels, open_full(net.config), noise, VARSampling())


def sizes(sides: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(side, side) for side in sides]


@pytest.mark.parametrize(
    ("config", "name", "sides"),
    [
        pytest.param(TINY_VQ, "vae_tiny", SIDES, id="tiny"),
        pytest.param(FULL_VQ, "vae_full", (1, 2, 3, 4), id="published shape", marks=pytest.mark.slow),
    ],
)
def test_equals_the_official_tokenizer(config: object, name: str, sides: tuple[int, ...]) -> None:
    model, expected = tokenizer(config), golden(name)
    latents = model.latents(expected["img_in"])
    close(latents, expected["f"])
    tokens, summed = model.encode(expected["f"], sizes(sides))
    for scale, found in enumerate(tokens):
        assert torch.equal(found.flatten(1), expected[f"idx.{scale}"]), f"tokens of scale {scale}"
    close(summed, expected[f"f_hat.{len(sides) - 1}"])
    close(model.decode(expected["fhat_in"]), expected["fhat_img"])
    if name == "vae_tiny":
        close(model.encoder(expected["img_in"]), expected["enc"])
        for scale in range(len(sides)):
            close(model.decode(expected[f"f_hat.{scale}"]), expected[f"recon.{scale}"])
    rebuilt = torch.zeros_like(summed)
    for scale, found in enumerate(tokens):
        rebuilt = model.add(rebuilt, model.codes(found), scale, len(sides))
        close(rebuilt, expected[f"f_hat.{scale}"])


def test_another_schedule_than_the_models_own_ends_at_the_grid() -> None:
    tokens, _ = tokenizer().encode(golden("vae_tiny")["f"], sizes((1, 3, 6)))
    for scale, found in enumerate(tokens):
        assert torch.equal(found.flatten(1), golden("vae_tiny")[f"idx_alt.{scale}"])
    with pytest.raises(ValueError, match=r"last scale is \(5, 5\), the latents are \(6, 6\)"):
        tokenizer().encode(torch.zeros(1, 8, 6, 6), sizes((1, 5)))


def test_convolutions_of_the_published_schedules() -> None:
    for schedule, expected in meta()["phi_index"].items():
        scales = int(schedule.removeprefix("K4_S"))
        assert [choose_convolution(scale, scales) for scale in range(scales)] == expected


def test_memory_of_all_tokens_is_what_papers_print() -> None:
    for name, batch, printed in (("var_d30", 50, 22.412), ("var_d36", 25, 53.156)):
        spec = configured(f"model={name}").spec
        found = paper_mib(spec.all_heads * spec.ends[-1], spec, batch) / 1000
        assert found == pytest.approx(printed, abs=5e-4)


def test_the_first_word_is_the_class_and_minus_one_none() -> None:
    assert read_labels(["3", "0 tench", " 9  two words ", "-1 anything"], 30, "var_tiny") == [3, 0, 9, 30]


def test_on_a_gpu_temperatures_stay_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VARModel, "compute_dtype", lambda *_: VARModel.half)  # there is no GPU
    one = configured("model=var_tiny", "model.weights=random", "model.transformer.shared_aln=true")
    one.load("cpu")
    block = one._transformer.blocks[0]
    assert block.attn.scale_mul_1H11.dtype == block.ada_gss.dtype == torch.float32
    assert block.attn.mat_qkv.weight.dtype == block.ffn.fc2.bias.dtype == torch.float16
    assert one._transformer.head.weight.dtype == torch.float32


def test_keys_and_values_are_stored_as_computed() -> None:
    for name, device, dtype in (
        ("var_d30", "cuda", torch.float16),
        ("infinity_2b", "cuda:1", torch.bfloat16),
        ("var_d30", "cpu", torch.float32),
    ):
        one = configured(f"model={name}")
        assert one.compute_dtype(device) == dtype
        for asked, stored in (("auto", dtype), ("bfloat16", torch.bfloat16)):
            assert find_dtype(Settings("run", 1, 1, 0, 8, device, asked, Path("runs")), one) == stored
