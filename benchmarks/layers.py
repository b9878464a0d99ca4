"""Time of the layers around attention over a generation and, on a CPU, of the product inside full-cache attention.

Each row also has lower bounds by operations and by bytes, at peak rates measured on this device first, and torch's own
operations for the same work (`torch.nn.functional.linear` and GELU; linear, SDPA, linear, sum; norm, product and sum;
norm, product, rotation; `torch.bmm`).

python -m benchmarks layers [--device cuda] [--model infinity_2b] [--batch 8] [--repeats 20]
"""

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.support.build import build_model
from benchmarks.support.floors import Work
from benchmarks.support.kernel_cases import Timer, measure_ceilings
from benchmarks.support.table import Table
from kvbench.kernels.linear import linear
from kvbench.kernels.modulate import EPSILON, modulate
from kvbench.kernels.products import wide_products
from kvbench.kernels.qk_norm_rope import qk_norm_rope
from kvbench.models.infinity import rope
from kvbench.models.parts.cross_attention import AbsorbedText, CrossAttention, TextKeys, project_text


class Layer(NamedTuple):
    """Inputs of one layer at one scale.

    Attributes:
        x: residual stream float32 [B, tokens, width].
        h: residual stream in the layers' dtype.
        wide: output of the first feed-forward layer, [B, tokens, hidden].
        condition: factor and shift, float32 [B, 1, width].
        qkv: [B, tokens, 3, H, D].
        lengths: float32 [2, H].
        rotation: complex64 [tokens, D/2].
        weights: weights of `LINEARS`, [out, in].
        biases: biases of `LINEARS`, [out].
        cross: cross-attention over the text.
        text: keys and values of the text, as the engine prepares them and in the plain form.
        keys: keys of all visible tokens, [B H, seen, D].
    """

    x: Tensor
    h: Tensor
    wide: Tensor
    condition: tuple[Tensor, Tensor]
    qkv: Tensor
    lengths: Tensor
    rotation: Tensor
    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    cross: CrossAttention
    text: tuple[TextKeys | AbsorbedText, TextKeys]
    keys: Tensor

    @property
    def queries(self) -> Tensor:
        """Queries [B H, tokens, D]."""
        return self.qkv[:, :, 0].transpose(1, 2).flatten(0, 1)


LINEARS = {"qkv": (3, 1), "proj": (1, 1), "fc1, GELU": (0, 1), "fc2": (1, 0)}
"""Output and input channels in multiples of the width; 0 is the feed-forward layer's hidden size."""


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor, *, gelu: bool) -> Tensor:
    """Apply a linear layer and GELU in torch's operations."""
    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate="tanh") if gelu else y


def torch_modulate(x: Tensor, factor: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Modulate in torch's operations."""
    return (F.layer_norm(x, x.shape[-1:], eps=EPSILON) * factor + shift).to(dtype)


def torch_norm_rope(qkv: Tensor, lengths: Tensor, rotation: Tensor) -> tuple[Tensor, ...]:
    """Normalise and rotate in torch's operations."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q, k = (
        F.normalize(x.float(), dim=-1) * length[:, None, None]
        for x, length in zip((q, k), lengths, strict=True)
    )
    even, odd = torch.stack((q, k)).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.real, rotation.imag
    q, k = torch.stack((cos * even - sin * odd, sin * even + cos * odd), -1).flatten(-2).to(qkv.dtype)
    return q, k, v


def torch_cross_attention(h: Tensor, cross: CrossAttention, text: TextKeys, x: Tensor) -> Tensor:
    """Attend to the text in torch's operations."""
    q = F.linear(h, cross.mat_q.weight, cross.mat_q.bias).unflatten(-1, (cross.heads, -1)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, text.keys, text.values, attn_mask=text.absent)
    return x + F.linear(out.transpose(1, 2).flatten(2), cross.proj.weight, cross.proj.bias)


def wide_bmm(first: Tensor, second: Tensor) -> Tensor:
    """Compute a batched product as `kernels/ragged_attention.py` does on a CPU."""
    with wide_products(first.numel() * second.shape[-1], first.device):
        return torch.bmm(first, second)


Call = Callable[[Layer], object]


def bind_linear(name: str) -> tuple[Call, Call]:
    """Return our call and torch's for one linear layer."""
    gelu, source = name.endswith("GELU"), "h" if LINEARS[name][1] else "wide"

    def bind(function: Callable[..., Tensor]) -> Call:
        return lambda layer: function(
            getattr(layer, source), layer.weights[name], layer.biases[name], gelu=gelu
        )

    return bind(linear), bind(torch_linear)


def list_calls(gpu: bool) -> dict[str, tuple[Call, Call, int]]:
    """Return by name our call, torch's call, and the number of calls per layer."""
    kernels = {name: (*bind_linear(name), 1) for name in LINEARS}
    kernels["modulate"] = (
        lambda layer: modulate(layer.x, *layer.condition, layer.h.dtype),
        lambda layer: torch_modulate(layer.x, *layer.condition, layer.h.dtype),
        2,
    )
    kernels["norm, rotation"] = (
        lambda layer: qk_norm_rope(layer.qkv, layer.lengths, layer.rotation),
        lambda layer: torch_norm_rope(layer.qkv, layer.lengths, layer.rotation),
        1,
    )
    kernels["text"] = (
        lambda layer: layer.cross(layer.h, layer.text[0], layer.x),
        lambda layer: torch_cross_attention(layer.h, layer.cross, layer.text[1], layer.x),
        1,
    )
    if not gpu:
        kernels["q k^T"] = (
            lambda layer: wide_bmm(layer.queries, layer.keys.mT),
            lambda layer: torch.bmm(layer.queries, layer.keys.mT),
            1,
        )
    return kernels


def count_work(name: str, layer: Layer) -> Work:
    """Return the minimum operations and bytes of a call."""
    size = layer.h.element_size()
    if name == "modulate":
        return Work(0.0, layer.x.numel() * (4.0 + size))
    if name == "norm, rotation":
        return Work(0.0, layer.qkv.numel() * 2 / 3 * 2.0 * size)
    if name == "q k^T":
        pairs, seen, dim = layer.keys.shape
        tokens = layer.x.shape[1]
        return Work(
            2.0 * pairs * tokens * seen * dim, 4.0 * pairs * (tokens * dim + seen * dim + tokens * seen)
        )
    if name == "text":
        _, heads, words, _ = layer.text[1].keys.shape
        channels = min(layer.x.shape[-1] + words, heads * words)  # separate or absorbed projections
        return Work(4.0 * layer.x.numel() * channels, layer.x.numel() * (8.0 + size))
    x, weight = layer.wide if LINEARS[name][1] == 0 else layer.h, layer.weights[name]
    out = x.numel() // x.shape[-1] * len(weight)
    return Work(2.0 * x.numel() * len(weight), float(size) * (x.numel() + out + weight.numel()))


def draw_layers(options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Layer]:
    """Yield random inputs of a layer for every scale of the model, with shared weights."""
    model = build_model(options.model)
    config, spec = model.transformer, model.spec
    width, hidden = config.width, config.feed_forward

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=options.device).to(dtype)

    sizes = {name: [n * width or hidden for n in ratio] for name, ratio in LINEARS.items()}
    weights = {name: random(*size) for name, size in sizes.items()}
    biases = {name: random(size[0]) for name, size in sizes.items()}
    cross = CrossAttention(width, spec.heads).to(options.device, dtype)
    sequences = options.batch * spec.branches
    mask = torch.ones(sequences, config.text_maxlen, dtype=torch.bool, device=options.device)
    rotations = rope.compute_rotations(
        spec.segments, config.rope_grid, spec.head_dim, config.rope_base, options.device
    )
    context = random(*mask.shape, width)
    plain_text = project_text(context, cross.mat_kv.weight, cross.v_bias, spec.heads, mask)
    text = (cross.prepare(context, mask), plain_text)
    for segment in spec.segments:
        rows = (sequences, segment.length)
        x = random(*rows, width, dtype=torch.float32)
        scale, shift = (random(sequences, 1, width, dtype=torch.float32) for _ in range(2))
        yield Layer(
            x, x.to(dtype), random(*rows, hidden), (scale, shift), random(*rows, 3, spec.heads, spec.head_dim),
            torch.ones(2, spec.heads, device=options.device), rotations[segment.start : segment.end], weights, biases,
            cross, text, random(sequences * spec.heads, segment.end, spec.head_dim),
        )  # fmt: skip


OPTIONS = {"device": "auto", "model": "infinity_tiny", "batch": 8, "repeats": 20, "threads": None}


def main(options: argparse.Namespace) -> None:
    """Print a row per kernel."""
    spec = build_model(options.model).spec
    timer = Timer(options.device, options.repeats)
    dtype = torch.bfloat16 if timer.gpu else torch.float32
    peak = measure_ceilings(timer, dtype)
    kernels = list_calls(timer.gpu)
    totals: dict[str, list[float]] = {name: [0.0] * 4 for name in kernels}
    with torch.inference_mode():
        for layer in draw_layers(options, dtype):
            for name, (ours, plain, times) in kernels.items():
                seconds = (*peak.floors(count_work(name, layer)), timer(ours, [layer]), timer(plain, [layer]))
                totals[name] = [
                    a + times * spec.layers * b for a, b in zip(totals[name], seconds, strict=True)
                ]
    print(
        f"{spec.name}, a generation of {options.batch} prompts, {options.batch * spec.branches} sequences, {dtype}, "
        f"torch {torch.__version__}; ceilings: {peak.flops / 1e12:.2f} TFLOP/s, {peak.bytes / 1e9:.1f} GB/s"
    )
    milliseconds = dict.fromkeys(("operations", "bytes", "ours", "torch"), ".3f")
    table = Table(milliseconds | dict.fromkeys(("x-floor", "x-torch"), ".2f"), "ms", 16)
    for name, values in totals.items():
        operations, moved, ours, plain = values
        table.add(name, *(1e3 * v for v in values), ours / max(operations, moved), ours / plain)
