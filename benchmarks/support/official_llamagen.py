"""LlamaGen's official generation loop on our weights, eager (`generate.py`) and compiled (as `sample_c2i_ddp.py` does).

Keys and values are dense buffers for the whole sequence, filled with zeros; every step attends over all slots under a
mask, in plain operations.
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.llamagen.transformer import LlamaGen
from kvbench.models.parts.sampling import guide, truncate


class OfficialLoop:
    """LlamaGen's official eager loop, which allocates its buffers again for every batch."""

    def __init__(self, transformer: LlamaGen, sampling: LlamaGenSampling) -> None:
        self.transformer, self.sampling = transformer, sampling
        self._cache: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def generate(self, condition: Tensor) -> Tensor:
        """Generate image tokens int64 [prompts, tokens] after a condition [sequences, tokens, width]."""
        config = self.transformer.config
        sequences, before, _ = condition.shape
        slots = -(-(before + config.tokens) // 8) * 8
        self._prepare(condition, (sequences, config.kv_heads, slots, config.head_dim))
        place = partial(torch.Tensor.to, device=condition.device)
        rotation = place(torch.view_as_real(config.rotations(before + config.tokens)))
        causal = place(torch.ones(slots, slots, dtype=torch.bool).tril().expand(sequences, -1, -1).clone())
        x, position, drawn = condition, place(torch.arange(before)), list[Tensor]()
        while len(drawn) < config.tokens:
            with sdpa_kernel(SDPBackend.MATH) if x.shape[1] == 1 else nullcontext():
                logits = self._run(x, position, rotation[position], causal[:, None, position])
            guided = truncate(guide(logits, self.sampling, len(drawn)), self.sampling)
            drawn.append(torch.multinomial(guided.softmax(-1), 1)[:, 0])
            x = self.transformer.tok_embeddings(drawn[-1]).repeat(self.sampling.branches, 1)[:, None]
            position = position[-1:] + 1
        return torch.stack(drawn, 1)

    def _prepare(self, like: Tensor, shape: tuple[int, ...]) -> None:
        """Make buffers of keys and values, zeros."""
        depth = self.transformer.config.depth
        self._cache = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(depth)]

    def _run(self, x: Tensor, position: Tensor, rotation: Tensor, mask: Tensor) -> Tensor:
        return self._step(x, position, rotation, mask)

    def _step(self, x: Tensor, position: Tensor, rotation: Tensor, mask: Tensor) -> Tensor:
        """Run the current tokens; return the logits of the last one, float32 [sequences, vocabulary]."""
        config = self.transformer.config
        for layer, block in enumerate(self.transformer.layers):
            attention, feed, (keys, values) = block.attention, block.feed_forward, self._cache[layer]
            joint = F.linear(_normalise(x, block.attention_norm), attention.wqkv.weight)
            q, k, v = joint.split(
                [heads * config.head_dim for heads in (config.heads, *[config.kv_heads] * 2)], -1
            )
            q, k, v = (heads.unflatten(-1, (-1, config.head_dim)) for heads in (q, k, v))
            q, k, v = (heads.transpose(1, 2) for heads in (_rotate(q, rotation), _rotate(k, rotation), v))
            keys[:, :, position], values[:, :, position] = k, v
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = x + F.linear(out.transpose(1, 2).flatten(2), attention.wo.weight)
            hidden = _normalise(x, block.ffn_norm)
            gated = F.silu(F.linear(hidden, feed.w1.weight)) * F.linear(hidden, feed.w3.weight)
            x = x + F.linear(gated, feed.w2.weight)
        return F.linear(_normalise(x, self.transformer.norm), self.transformer.output.weight)[:, -1].float()


class CompiledLoop(OfficialLoop):
    """The loop with a static cache and compiled steps of one token; a condition of several tokens runs eagerly.

    On a GPU the mode is `reduce-overhead`, the official script's: CUDA graphs. On a CPU it is torch.compile's default,
    which needs a C++ compiler.
    """

    def __init__(self, transformer: LlamaGen, sampling: LlamaGenSampling) -> None:
        super().__init__(transformer, sampling)
        on_gpu = transformer.output.weight.device.type == "cuda"
        mode = "reduce-overhead" if on_gpu else None
        self._compiled = torch.compile(self._step, fullgraph=True, dynamic=False, mode=mode)

    def _prepare(self, like: Tensor, shape: tuple[int, ...]) -> None:
        """Empty the buffers, which keep their place: CUDA graphs write where they were recorded."""
        if not self._cache or self._cache[0][0].shape != shape:
            super()._prepare(like, shape)
            for buffer in (buffer for pair in self._cache for buffer in pair):
                torch._dynamo.mark_static_address(buffer)
        else:
            for buffer in (buffer for pair in self._cache for buffer in pair):
                buffer.zero_()

    def _run(self, x: Tensor, position: Tensor, rotation: Tensor, mask: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return self._step(x, position, rotation, mask)
        torch.compiler.cudagraph_mark_step_begin()
        return self._compiled(x, position, rotation, mask)


def _normalise(x: Tensor, norm: torch.nn.Module) -> Tensor:
    single = x.float()
    eps, weight = norm.eps, norm.weight
    assert isinstance(eps, float)
    assert isinstance(weight, Tensor)
    return (single * torch.rsqrt(single.square().mean(-1, keepdim=True) + eps)).type_as(x) * weight


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate heads [sequences, tokens, heads, D] by cosines and sines [tokens, D/2, 2]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    cos, sin = rotation[:, None].unbind(-1)
    a, b = pairs.unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).type_as(x)
