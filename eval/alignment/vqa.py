"""Models that answer questions about an image."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.eval.files.weights import Snapshot
from kvbench.eval.networks import Pixels, full_float32, load_pretrained
from kvbench.eval.protocol.component import Component

Answer = Callable[[Pixels, Sequence[str]], list[str]]
"""Function from an image uint8 [H, W, 3] and questions to their answers."""

BLIP = Snapshot(
    "Salesforce/blip-vqa-capfilt-large",
    (
        *("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"),
        "model.safetensors",
    ),
)
MAX_ANSWER_TOKENS = 10
"""Maximum number of tokens of an answer."""


class Vqa(Component, ABC):
    """Base class of models that answer questions about images."""

    @abstractmethod
    def load(self, device: str) -> tuple[Answer, Mapping[str, str]]:
        """Load the weights; return a function that answers questions, and the hashes of the files by name."""


@dataclass(frozen=True)
class BlipVqa(Vqa):
    """BLIP tuned on VQAv2 (Li et al., arXiv:2201.12086) in transformers, greedy answers, float32.

    Attributes:
        path: path of the model's folder, if it is neither in $KVBENCH_WEIGHTS nor in the Hub's cache.
        model: files of the folder.
    """

    path: str | None = None
    model: Snapshot = BLIP
    packages: ClassVar[tuple[str, ...]] = ("transformers", "torchvision")

    def load(self, device: str) -> tuple[Answer, Mapping[str, str]]:
        """Load the model from local files; return its answering function and the hashes of its files.

        Raises:
            WeightError: a file is missing or its hash differs.
            ValueError: the weight file lacks tensors.
        """
        from transformers import AutoTokenizer, BlipForQuestionAnswering, BlipImageProcessor

        [folder], hashes = self.require()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        processor = BlipImageProcessor.from_pretrained(folder, local_files_only=True)
        model = load_pretrained(BlipForQuestionAnswering, folder, device)
        ends = {
            "eos_token_id": model.config.text_config.sep_token_id,
            "pad_token_id": model.config.text_config.pad_token_id,
        }
        begin = torch.full((1, 1), model.decoder_start_token_id, device=device)

        @torch.inference_mode()
        def answer(pixels: Pixels, questions: Sequence[str]) -> list[str]:
            # Like model.generate, but the image is encoded once for all questions. Questions are not padded to a
            # batch because the decoder would read the padding.
            inputs = processor(pixels, return_tensors="pt", input_data_format="channels_last").to(device)
            answers = []
            with full_float32():
                vision = model.vision_model(pixel_values=inputs["pixel_values"])[0]
                for question in questions:
                    tokens = tokenizer(question, return_tensors="pt", truncation=True, max_length=512)
                    ids = tokens["input_ids"].to(device)
                    encoded = model.text_encoder(ids, encoder_hidden_states=vision)[0]
                    reply = model.text_decoder.generate(
                        input_ids=begin,
                        encoder_hidden_states=encoded,
                        max_new_tokens=MAX_ANSWER_TOKENS,
                        do_sample=False,
                        **ends,
                    )
                    answers.append(str(tokenizer.decode(reply[0], skip_special_tokens=True)).strip())
            return answers

        return answer, hashes
