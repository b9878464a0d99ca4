"""Support of the tests of Infinity: the reference program's small models."""

from functools import lru_cache

from kvbench.models.infinity.tokenizer import BSQ, BSQConfig
from kvbench.models.infinity.transformer import InfinityConfig
from tests.support.reference import packed


@lru_cache
def tokenizer(name: str) -> BSQ:
    """A reference tokenizer; some files lack the encoder."""
    state, shape = packed(f"{name}.weights")
    widths = {
        f"{part}_widths": tuple(shape["base_ch"] * m for m in shape[f"{part}_ch_mult"])
        for part in ("encoder", "decoder")
    }
    config = BSQConfig(
        bits=shape["codebook_dim"], base=shape["base_ch"], **widths, blocks=shape["num_res_blocks"]
    )
    model = BSQ(config)
    lacking = model.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)
    assert not lacking.unexpected_keys
    assert all(key.startswith("encoder.") for key in lacking.missing_keys)
    return model.eval()


def read_shape(name: str, grid: tuple[int, int] | None = None) -> tuple[InfinityConfig, BSQ]:
    """The shape of a reference transformer, and its tokenizer."""
    shape = packed(f"{name}.weights")[1]
    vae = tokenizer(shape["vae"])
    channels = vae.config.bits * (4 if shape["apply_spatial_patchify"] else 1)
    names = ("depth", "embed_dim", "num_heads", "block_chunks")
    text = (shape["text_channels"], shape["text_maxlen"])
    return InfinityConfig(*(shape[name] for name in names), channels, *text, grid), vae
