"""Makes the reference data of Emu3 with classes of transformers: `python -m tests.support.emu3_goldens`."""

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.support.places import GOLDENS
from tests.support.reference_emu3 import (
    CODES,
    CONFIG,
    IMAGE,
    NEGATIVE,
    NUMBERS,
    SUFFIX,
    TINY_VQ,
    make_weight,
    write_tokenizer,
)

FOLDER = GOLDENS / "emu3"
CASES = {
    "greedy": {"cfg": 3.0, "top_k": 2048, "seed": None, "prompts": 1},
    "sampled": {"cfg": 3.0, "top_k": 20, "seed": 11, "prompts": 2},
    "unguided": {"cfg": 1.0, "top_k": 2048, "seed": 12, "prompts": 1},
}
PROMPT, RECTANGLE = "a red cube", (2, 3, 5)
FRAMED = ("", "a red cube", "café, 2 dogs", "90*90 <|image start|> x")


def make_config() -> transformers.Emu3Config:
    """The tiny model's configuration."""
    text = {
        "vocab_size": CONFIG.vocabulary, "hidden_size": CONFIG.width, "intermediate_size": CONFIG.hidden,
        "num_hidden_layers": CONFIG.depth, "num_attention_heads": CONFIG.heads, "num_key_value_heads": CONFIG.kv_heads,
        "pad_token_id": NUMBERS["<|endoftext|>"], "bos_token_id": NUMBERS["<|extra_203|>"],
        "eos_token_id": NUMBERS["<|extra_204|>"],
    }  # fmt: skip
    base = TINY_VQ.widths[0]
    images = {
        "codebook_size": CODES, "base_channels": base,
        "channel_multiplier": [width // base for width in TINY_VQ.widths], "num_res_blocks": TINY_VQ.blocks,
        "attn_resolutions": [len(TINY_VQ.widths) - 1], "hidden_size": TINY_VQ.widths[-1],
    }  # fmt: skip
    return transformers.Emu3Config(vq_config=images, text_config=text, vocabulary_map=NUMBERS)


def make_processor(folder: Path) -> transformers.Emu3Processor:
    """The processor of prompts and pixels, with the tiny tokenizer; means and deviations are the published ones."""
    named = {
        "image_token": "<image>", "boi_token": "<|image start|>", "eoi_token": "<|image end|>",
        "image_wrapper_token": "<|image token|>", "eof_token": "<|extra_201|>",
    }  # fmt: skip
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(write_tokenizer(folder / "tokenizer.json")),
        bos_token="<|extra_203|>", eos_token="<|extra_204|>", pad_token="<|endoftext|>",
        extra_special_tokens=named,
    )  # fmt: skip
    half = [0.5] * 3
    return transformers.Emu3Processor(
        transformers.Emu3ImageProcessor(image_mean=half, image_std=half), tokenizer
    )


def frame(processor: Any, text: str) -> list[int]:
    """The tokens of a prompt in its frame."""
    rows, columns = IMAGE
    area = rows * columns * processor.downsample_ratio**2
    inputs = processor(
        text=[text], return_for_image_generation=True, ratio=f"{columns}:{rows}", image_area=area
    )
    assert inputs["image_sizes"] == [[rows, columns]]
    return list(inputs["input_ids"][0])


def constrain(visual: list[int], first: int) -> Callable[[int, Tensor], list[int]]:
    """The official rule for the tokens that may follow `first` tokens of a prompt and all drawn after it."""
    rows, columns = IMAGE
    ends = [NUMBERS[name] for name in ("<|extra_201|>", "<|image end|>", "<|extra_204|>")]

    def allow(_: int, tokens: Tensor) -> list[int]:
        offset = len(tokens) - first + 1
        if offset % (columns + 1) == 0 and offset <= (columns + 1) * rows:
            return [NUMBERS["<|extra_200|>"]]
        return visual if offset < (columns + 1) * rows else [ends[offset - (columns + 1) * rows - 1]]

    return allow


def run(
    model: Any, processor: Any, case: dict[str, Any], prompt: list[int], negative: list[int]
) -> dict[str, Tensor]:
    """Tokens, logits and images of one case."""
    rows, columns = IMAGE
    if case["seed"] is not None:
        torch.manual_seed(case["seed"])
    batch = torch.tensor([prompt] * case["prompts"])
    allow = constrain(model.vocabulary_mapping.image_tokens, len(prompt))
    guided = {} if case["cfg"] == 1 else {"negative_prompt_ids": torch.tensor([negative] * case["prompts"])}
    out = model.generate(
        input_ids=batch, attention_mask=torch.ones_like(batch), do_sample=case["seed"] is not None,
        top_k=case["top_k"] if case["seed"] is not None else None, max_new_tokens=rows * (columns + 1) + 3,
        guidance_scale=case["cfg"], prefix_allowed_tokens_fn=allow,
        return_dict_in_generate=True, output_logits=True, output_scores=True, **guided,
    )  # fmt: skip
    tokens = out.sequences[:, len(prompt) :]
    pixels = model.decode_image_tokens(image_tokens=tokens, height=rows, width=columns)
    images = processor.postprocess(list(pixels.float()), return_tensors="pt")
    shape = (*pixels.shape[:1], 3, *pixels.shape[2:])
    results = {
        "tokens": tokens.to(torch.int16), "logits": torch.stack(out.logits),
        "kept_counts": torch.stack(out.scores).isfinite().sum(-1).to(torch.int16), "pixels": pixels.contiguous(),
        "image_u8": torch.stack(list(images["pixel_values"])).reshape(shape).permute(0, 2, 3, 1).contiguous(),
    }  # fmt: skip
    if guided:
        sequence = torch.cat((guided["negative_prompt_ids"], tokens), 1)
        passed = model(sequence).logits[:, len(negative) - 1 : -1]
        results["negative_logits"] = passed.transpose(0, 1).contiguous()
    return results


def list_keys(config: transformers.Emu3Config) -> dict[str, Any]:
    """Names, shapes and kinds of the tensors of a model's file, and the number of parameters that draw an image."""
    with torch.device("meta"):
        state = transformers.Emu3ForConditionalGeneration(config).state_dict()
    return {"keys": {name: (list(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in state.items()}}


@torch.no_grad()
def make(folder: Path) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    full = transformers.Emu3Config(vocabulary_map={"<image>": 0})
    keys = {"tiny": list_keys(make_config()), "gen": list_keys(full)}
    model = transformers.Emu3ForConditionalGeneration(make_config()).eval()
    model.load_state_dict({name: make_weight(name, tuple(x.shape)) for name, x in model.state_dict().items()})
    with tempfile.TemporaryDirectory() as place:
        processor = make_processor(Path(place))
    prompt, negative = (frame(processor, text) for text in (PROMPT + SUFFIX, NEGATIVE))
    golden = {
        f"{name}.{key}": tensor
        for name, case in CASES.items()
        for key, tensor in run(model, processor, case, prompt, negative).items()
    }
    codes = torch.randint(CODES, RECTANGLE, generator=torch.Generator().manual_seed(3))
    golden |= {"vq.codes": codes.to(torch.int16), "vq.pixels": model.model.vqmodel.decode(codes).contiguous()}
    save_file(golden, folder / "golden.safetensors")
    (folder / "keys.json.gz").write_bytes(gzip.compress(json.dumps(keys).encode(), mtime=0))
    meta = {
        "transformers": transformers.__version__, "cases": CASES, "prompt": prompt, "negative": negative,
        "framed": {text: frame(processor, text) for text in FRAMED},
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    make(FOLDER)
