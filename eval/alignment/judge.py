"""Vision-language model as a judge: probabilities of the first token of its answer about an image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from kvbench.eval.files.weights import Snapshot, WeightError, file_sha256
from kvbench.eval.protocol.component import Component
from kvbench.eval.spaces.networks import full_float32, load_pretrained

QWEN3_VL = Snapshot(
    "Qwen/Qwen3-VL-8B-Instruct",
    ("config.json", "tokenizer.json", "tokenizer_config.json"),
    how="Get it with: hf download Qwen/Qwen3-VL-8B-Instruct --local-dir ~/.cache/kvbench/weights/Qwen3-VL-8B-Instruct; "
    "or name another judge's folder with judge.path and change judge.name",
)
READ = (".json", ".jinja", ".safetensors", ".txt")
"""Endings of files that transformers reads from a model's folder."""


@dataclass(frozen=True)
class JudgeModel:
    """A judge with its weights read.

    Attributes:
        predict: probabilities float32 [texts, vocabulary] of the first answer token, of an image uint8 [H, W, 3] with
            each of several texts.
        first_token: number of the first token of a text.
        weights: hashes of the files used.
    """

    predict: Callable[[NDArray[np.uint8], Sequence[str]], Tensor]
    first_token: Callable[[str], int]
    weights: Mapping[str, str]


@dataclass(frozen=True)
class VlmJudge(Component):
    """A vision-language model of transformers, by default Qwen3-VL-8B-Instruct.

    One user turn, image first, in the model's own chat template and with its own preprocessing. Probabilities are the
    softmax in float32 over the whole vocabulary at the first position of the answer, from a plain forward pass: no
    setting of text generation acts. Each text is a pass of its own.

    Attributes:
        name: goes into the names of metrics.
        path: the model's folder, if neither in $KVBENCH_WEIGHTS nor in the Hub's cache.
        dtype: type of its weights, `bfloat16` or `float32`.
        model: files that the folder has beside the weights (safetensors). Every file that is read is hashed.

    Raises:
        ValueError: the type is neither of these.
    """

    name: str = "qwen3-vl-8b"
    path: str | None = None
    dtype: str = "bfloat16"
    model: Snapshot = QWEN3_VL
    packages: ClassVar[tuple[str, ...]] = ("transformers", "torchvision")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype}: choose bfloat16 or float32")

    def load(self, device: str) -> JudgeModel:
        """Read the model from local files.

        Raises:
            WeightError: a file is missing or not the expected one.
            ValueError: the folder lacks weights.
        """
        from transformers import AutoModelForImageTextToText, AutoProcessor

        folder, _ = replace(self.model, path=self.path).require()
        if not list(folder.glob("*.safetensors")):
            raise WeightError(f"{folder} has no weights (*.safetensors). {self.model.how}")
        read = [path for path in sorted(folder.iterdir()) if path.suffix in READ]
        hashes = {f"{self.name}/{path.name}": file_sha256(path) for path in read}
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        network = load_pretrained(AutoModelForImageTextToText, folder, device, getattr(torch, self.dtype))

        @torch.inference_mode()
        def predict(pixels: NDArray[np.uint8], texts: Sequence[str]) -> Tensor:
            image, found = Image.fromarray(pixels), []
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
                found.append(logits[0, -1].float().softmax(-1))
            return torch.stack(found).cpu()

        @lru_cache
        def first_token(text: str) -> int:
            return int(processor.tokenizer.encode(text, add_special_tokens=False)[0])

        return JudgeModel(predict, first_token, hashes)
