"""Work that a model cannot avoid, counted on the meta device: weights of its products, operations of its decoder."""

import torch
from torch import nn

from kvbench.models.base import LeastWork
from kvbench.models.parts.autoencoder import ConvDecoder, NetworkConfig

LAYERS, HEADS = ("layers", "blocks", "block_chunks"), ("head", "output", "gen_head")
"""First parts of the names of a transformer's layers, and of what computes its logits."""
PER_PROMPT = {"ada_lin", "mat_kv"}
"""Linear layers in the layers that a prompt passes, not each token."""


def count_products(transformer: nn.Module) -> LeastWork:
    """Return the weights of the products that tokens pass."""
    counts = dict.fromkeys((*LAYERS, *HEADS), 0)
    for name, module in transformer.named_modules():
        parts = name.split(".")
        if isinstance(module, nn.Linear) and parts[0] in counts and not PER_PROMPT & {*parts}:
            counts[parts[0]] += module.weight.numel()
    return LeastWork(sum(counts[name] for name in LAYERS), sum(counts[name] for name in HEADS))


def count_decoding(decoder: ConvDecoder, config: NetworkConfig, cells: int) -> int:
    """Return the operations of convolutions and products that decode the latents of an image, on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode  # a run does without

    size = config.grid if config.mixers else (1, cells)
    channels = [config.latents, *[config.code_channels] * (config.code_channels > 0)]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        decoder(*(torch.empty(1, count, *size, device="meta") for count in channels))
    return counter.get_total_flops()
