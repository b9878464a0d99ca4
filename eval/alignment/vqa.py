"""Models that answer questions about an image."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvbench.eval.files.weights import Snapshot
from kvbench.eval.protocol.component import Component
from kvbench.eval.spaces.networks import full_float32, load_pretrained

Answer = Callable[[NDArray[np.uint8], Sequence[str]], list[str]]
"""Answers to questions about an image, uint8 [H, W, 3]."""

BLIP = Snapshot(
    "Salesforce/blip-vqa-capfilt-large",
    (
        "config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ),
)
LONGEST = 10
"""Tokens of an answer."""


class Vqa(Component, ABC):
    """Base class of models that answer questions."""

    @abstractmethod
    def load(self, device: str) -> tuple[Answer, Mapping[str, str]]:
        """Read the weights; return what answers questions, and the hashes of the files."""


@dataclass(frozen=True)
class BlipVqa(Vqa):
    """BLIP tuned on VQAv2 (Li et al., arXiv:2201.12086) by transformers, greedy answers, float32.

    Attributes:
        path: the model's folder, if neither in $KVBENCH_WEIGHTS nor in the Hub's cache.
        model: the folder's files.
    """

    path: str | None = None
    model: Snapshot = BLIP
    packages: ClassVar[tuple[str, ...]] = ("transformers", "torchvision")

    def load(self, device: str) -> tuple[Answer, Mapping[str, str]]:
        """Read the model from local files.

        Raises:
            WeightError: a file is missing or not the expected one.
            ValueError: the folder lacks weights.
        """
        from transformers import AutoTokenizer, BlipForQuestionAnswering, BlipImageProcessor

        folder, hashes = replace(self.model, path=self.path).require()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        processor = BlipImageProcessor.from_pretrained(folder, local_files_only=True)
        model = load_pretrained(BlipForQuestionAnswering, folder, device)
        ends = {
            "eos_token_id": model.config.text_config.sep_token_id,
            "pad_token_id": model.config.text_config.pad_token_id,
        }
        begin = torch.full((1, 1), model.decoder_start_token_id, device=device)

        @torch.inference_mode()
        def answer(pixels: NDArray[np.uint8], questions: Sequence[str]) -> list[str]:
            # As model.generate does, but the image is looked at once for all questions. These are not padded to a
            # batch: the decoder would read the padding.
            inputs = processor(pixels, return_tensors="pt", input_data_format="channels_last").to(device)
            answers = []
            with full_float32():
                seen = model.vision_model(pixel_values=inputs["pixel_values"])[0]
                for question in questions:
                    tokens = tokenizer(question, return_tensors="pt", truncation=True, max_length=512).to(
                        device
                    )
                    asked = model.text_encoder(tokens["input_ids"], encoder_hidden_states=seen)[0]
                    said = model.text_decoder.generate(
                        input_ids=begin,
                        encoder_hidden_states=asked,
                        max_new_tokens=LONGEST,
                        do_sample=False,
                        **ends,
                    )
                    answers.append(str(tokenizer.decode(said[0], skip_special_tokens=True)).strip())
            return answers

        return answer, hashes
