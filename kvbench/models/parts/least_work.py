"""Work that a model cannot avoid, counted on the meta device: weights of its products, operations of its decoder."""

import torch
from torch import nn

from kvbench.models.base import LeastWork
from kvbench.models.parts.autoencoder import ConvDecoder, NetworkConfig

LAYERS, HEADS = ("layers", "blocks", "block_chunks"), ("head", "output", "gen_head")
"""First parts of the module names of a transformer's layers, and of the projections to its logits."""
PER_PROMPT = {"ada_lin", "mat_kv"}
"""Names of linear layers inside transformer layers that run once per prompt, not per token."""


def count_products(transformer: nn.Module) -> LeastWork:
    """Count the weights of the matrix products that every token passes, in layers and heads."""
    counts = dict.fromkeys((*LAYERS, *HEADS), 0)
    for name, module in transformer.named_modules():
        parts = name.split(".")
        if isinstance(module, nn.Linear) and parts[0] in counts and not PER_PROMPT & {*parts}:
            counts[parts[0]] += module.weight.numel()
    return LeastWork(sum(counts[name] for name in LAYERS), sum(counts[name] for name in HEADS))


def count_decoding(decoder: ConvDecoder, config: NetworkConfig, cells: int) -> int:
    """Count the floating-point operations of convolutions and products that decode an image of `cells` cells."""
    from torch.utils.flop_counter import FlopCounterMode  # runs do not need it

    size = config.grid if config.mixers else (1, cells)
    channels = [config.latents, *[config.code_channels] * (config.code_channels > 0)]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        decoder(*(torch.empty(1, count, *size, device="meta") for count in channels))
    return counter.get_total_flops()
