"""Vision-language model as a judge: probabilities of the first token of an answer about an image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor

from kvbench.eval.files.weights import Snapshot, WeightError, file_sha256
from kvbench.eval.networks import Pixels, full_float32, load_pretrained
from kvbench.eval.protocol.component import Component

QWEN3_VL = Snapshot(
    "Qwen/Qwen3-VL-8B-Instruct",
    ("config.json", "tokenizer.json", "tokenizer_config.json"),
    how="Get it with: hf download Qwen/Qwen3-VL-8B-Instruct --local-dir ~/.cache/kvbench/weights/Qwen3-VL-8B-Instruct; "
    "or name another judge's folder with judge.path and change judge.name",
)
FILE_SUFFIXES = (".json", ".jinja", ".safetensors", ".txt")
"""Suffixes of files that transformers reads from a model's folder."""


@dataclass(frozen=True)
class JudgeModel:
    """A judge with loaded weights.

    Attributes:
        predict: function from an image uint8 [H, W, 3] and questions to probabilities float32 [questions, vocabulary]
            of the first answer token, on the CPU.
        first_token: function from a string to the id of its first token.
        decode: function from a token id to its string.
        weights: hashes of the files used.
    """

    predict: Callable[[Pixels, Sequence[str]], Tensor]
    first_token: Callable[[str], int]
    decode: Callable[[int], str]
    weights: Mapping[str, str]


@dataclass(frozen=True)
class VlmJudge(Component):
    """A vision-language model of transformers, by default Qwen3-VL-8B-Instruct.

    The model's chat template and preprocessing are applied to one user turn, image first. Probabilities are the softmax
    in float32 over the whole vocabulary at the first position of the answer. Each question is one forward pass, without
    settings of text generation.

    Attributes:
        name: part of the metrics' names.
        path: path of the model's folder, if it is neither in $KVBENCH_WEIGHTS nor in the Hub's cache.
        dtype: dtype of the weights.
        model: files of the folder other than weights (safetensors). Every file that is read is hashed.
    """

    name: str = "qwen3-vl-8b"
    path: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    model: Snapshot = QWEN3_VL
    packages: ClassVar[tuple[str, ...]] = ("transformers", "torchvision")

    def load(self, device: str) -> JudgeModel:
        """Load the model from local files.

        Raises:
            WeightError: a file is missing or its hash differs.
            ValueError: the weight files lack tensors.
        """
        from transformers import AutoModelForImageTextToText, AutoProcessor

        [folder], _ = self.require()
        if not list(folder.glob("*.safetensors")):
            raise WeightError(f"{folder} has no weights (*.safetensors). {self.model.how}")
        files = [path for path in sorted(folder.iterdir()) if path.suffix in FILE_SUFFIXES]
        hashes = {f"{self.name}/{path.name}": file_sha256(path) for path in files}
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        network = load_pretrained(AutoModelForImageTextToText, folder, device, getattr(torch, self.dtype))

        @torch.inference_mode()
        def predict(pixels: Pixels, texts: Sequence[str]) -> Tensor:
            image, rows = Image.fromarray(pixels), []
            for text in texts:
                content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
                inputs = processor.apply_chat_template(
                    [{"role": "user", "content": content}],
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=True,
                    return_tensors="pt",
                ).to(device)
                with full_float32():
                    logits = network(**inputs, use_cache=False, logits_to_keep=1).logits
                rows.append(logits[0, -1].float().softmax(-1))
            return torch.stack(rows).cpu()

        @lru_cache
        def first_token(text: str) -> int:
            return int(processor.tokenizer.encode(text, add_special_tokens=False)[0])

        def decode(token: int) -> str:
            return str(processor.tokenizer.decode([token], clean_up_tokenization_spaces=False))

        return JudgeModel(predict, first_token, decode, hashes)
