"""Random numbers of methods, which depend on seed, prompt, layer, segment and head alone."""

import torch
from torch import Tensor

from kvbench.core.files import derive_seed
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.view import View

DRAWN_ON_HOST = "its random numbers are drawn on the host, others for each prompt"


def draw_uniform(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw float32 numbers in 0..1 that depend only on a name, such as "seed:prompt:layer:segment"."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(derive_seed(name)))


def draw_normal(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal float32 numbers that depend only on a name, as `draw_uniform`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(derive_seed(name)))


def draw_by_row(seed: int, view: View, spec: ModelSpec, count: int, *, shared: bool = False) -> Tensor:
    """Draw float32 numbers [rows, count] in 0..1 by seed, prompt, layer, segment and head, in any batch the same.

    In texts, and if heads share them (`shared`), the first numbers of a row do not depend on `count`, which the longest
    prompt decides. `spec` has the shapes of this process's model, which may own a part of the heads.
    """
    heads = range(spec.first_head, spec.first_head + view.heads)

    def draw(prompt: int) -> Tensor:
        name = f"{seed}:{prompt}:{view.layer}:{view.segment.index}"
        if shared:
            return draw_uniform(name, (count,)).expand(view.heads, -1)
        if spec.writes_text:
            return torch.stack([draw_uniform(f"{name}:{head}", (count,)) for head in heads])
        return draw_uniform(name, (heads.stop, count))[heads.start :]

    numbers = {prompt: draw(prompt) for prompt in dict.fromkeys(view.prompts)}
    rows = torch.cat([numbers[prompt] for prompt in view.prompts])
    return rows.to(view.position.device, non_blocking=True)
