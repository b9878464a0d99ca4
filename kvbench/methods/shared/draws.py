"""Random values of methods, which depend on seed, prompt, layer, segment and head alone."""

import torch
from torch import Tensor

from kvbench.core.files import derive_seed
from kvbench.core.segments import ModelSpec
from kvbench.methods.shared.view import View

DRAWN_ON_HOST = "its random values are drawn on the host, different ones for each prompt"


def draw_uniform(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw float32 values in [0, 1) that depend only on a name, such as "seed:prompt:layer:segment"."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(derive_seed(name)))


def draw_normal(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normal float32 values that depend only on a name, such as "seed:prompt:layer:segment"."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(derive_seed(name)))


def draw_by_row(seed: int, view: View, spec: ModelSpec, count: int, *, shared: bool = False) -> Tensor:
    """Draw float32 values [rows, count] in [0, 1) by seed, prompt, layer, segment and head, equal in any batch.

    In texts, and if heads share values (`shared`), the first values of a row do not depend on `count`, which the
    longest prompt decides. `spec` has the shapes of this process's model, which may own a part of the heads.
    """
    heads = range(spec.first_head, spec.first_head + view.heads)

    def draw(prompt: int) -> Tensor:
        name = f"{seed}:{prompt}:{view.layer}:{view.segment.index}"
        if shared:
            return draw_uniform(name, (count,)).expand(view.heads, -1)
        if spec.writes_text:
            return torch.stack([draw_uniform(f"{name}:{head}", (count,)) for head in heads])
        return draw_uniform(name, (heads.stop, count))[heads.start :]

    values = {prompt: draw(prompt) for prompt in dict.fromkeys(view.prompts)}
    rows = torch.cat([values[prompt] for prompt in view.prompts])
    return rows.to(view.position.device, non_blocking=True)
