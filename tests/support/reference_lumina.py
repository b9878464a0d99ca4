"""Support of the tests of Lumina-mGPT: the official tensors and weights, prompts given as tokens."""

from functools import lru_cache, partial

from safetensors.torch import load_file
from torch import Tensor

from kvbench.models.lumina.files import clean_chameleon, clean_lumina
from kvbench.models.lumina.tokenizer import Chameleon, ChameleonConfig
from kvbench.models.lumina.transformer import Lumina, LuminaConfig
from kvbench.models.parts.tokens import FramedTokens
from tests.support.places import GOLDENS
from tests.support.published import read_meta, read_tensors
from tests.support.reference_llamagen import filled
from tests.support.small_models import SMALL_TOKENIZER, shrink, split_numbers

meta = partial(read_meta, "lumina")
golden = partial(read_tensors, "lumina", "golden")
_SHAPE = {"depth": 2, "width": 32, "heads": 4, "head_dim": 8, "hidden": 48}
_FEW = {"vocabulary": 64, "image": (2, 2), "codes": 8}
CONFIGS = {
    "lm": LuminaConfig(**_SHAPE, kv_heads=4, vocabulary=8832, image=(4, 6)),
    "mp2_gqa": LuminaConfig(**_SHAPE, kv_heads=2, **_FEW),
    "swin": LuminaConfig(**_SHAPE, kv_heads=4, norm_after=True, **_FEW),
}
TINY_VQ = ChameleonConfig(codes=8192, channels=4, latents=32, widths=(32, 32, 64))
SMALL = shrink(
    "lumina_mgpt_7b_768", *SMALL_TOKENIZER, "model.tokenizer.channels=8", "model.prompt_tokens=12",
    head_dim=8, vocabulary=250, image=[6, 6], codes=128,
)  # fmt: skip
"""A small model with random weights, as overrides."""


@lru_cache
def official_state(name: str) -> dict[str, Tensor]:
    """The weights of a reference model by official names: `lm`, `mp2_gqa`, `swin` or `vqgan`."""
    return load_file(GOLDENS / "lumina" / f"{name}_state.safetensors")


def language_model(kind: str = "lm") -> Lumina:
    """A reference language model."""
    state = clean_lumina(official_state(kind), CONFIGS[kind])
    return filled(Lumina(CONFIGS[kind]), {name: tensor.float() for name, tensor in state.items()})


@lru_cache
def tokenizer() -> Chameleon:
    """The reference image tokenizer."""
    state = clean_chameleon(official_state("vqgan"))
    return filled(Chameleon(TINY_VQ), {name: tensor.float() for name, tensor in state.items()})


def read_numbers() -> FramedTokens:
    """A tokenizer of prompts that are token numbers, with the beginning of the image."""
    ids = meta()["ids"]
    prefix = [ids["image_start"], ids["size_base"] + 2, ids["size_base"] + 3]
    return FramedTokens(ids["bos"], split_numbers, lambda _: [*prefix], ids["new_line"], golden()["bpe2img"])


def prompt_of(run: str) -> str:
    """The tokens of a run's prompt, as `read_numbers` reads them, with what begins its image."""
    tokens = golden()[f"{run}.prompt"].tolist() + meta()["cases"][run]["forced"]
    return " ".join(map(str, tokens))
