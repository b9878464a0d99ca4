"""GenEval's detector `mask2former-hf`: Mask2Former (Cheng et al., arXiv:2112.01527) by transformers.

The official detector is the same network out of another training run, under mmdetection. Scores of the two do not
compare to the digit, most of all for counting, and so the name says which it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.alignment.clip import PACKAGES
from kvbench.eval.files.weights import Snapshot
from kvbench.eval.geneval.colors import ClipColors, Region
from kvbench.eval.geneval.score import DetectorModel, LoadedDetector
from kvbench.eval.spaces.networks import full_float32, load_pretrained

MASK2FORMER = Snapshot(
    "facebook/mask2former-swin-small-coco-instance",
    ("config.json", "preprocessor_config.json", "model.safetensors"),
)
DIVISOR = 32
TOP = 100
"""Instances that mmdetection keeps of an image."""
MIN_SCORE = 0.1
"""Instances that score less are not recorded; GenEval's own thresholds are 0.3 and 0.9."""

CLASSES = tuple(
    """person|bicycle|car|motorcycle|airplane|bus|train|truck|boat|traffic light|fire hydrant|stop sign|parking meter|
bench|bird|cat|dog|horse|sheep|cow|elephant|bear|zebra|giraffe|backpack|umbrella|handbag|tie|suitcase|frisbee|skis|
snowboard|sports ball|kite|baseball bat|baseball glove|skateboard|surfboard|tennis racket|bottle|wine glass|cup|fork|
knife|spoon|bowl|banana|apple|sandwich|orange|broccoli|carrot|hot dog|pizza|donut|cake|chair|couch|potted plant|bed|
dining table|toilet|tv|laptop|computer mouse|tv remote|computer keyboard|cell phone|microwave|oven|toaster|sink|
refrigerator|book|clock|vase|scissors|teddy bear|hair drier|toothbrush""".replace("\n", "").split("|")
)
"""GenEval's names of COCO's 80 classes, in COCO's order; three of them are not COCO's own."""


class Output(Protocol):
    """Output of the network for one image.

    Attributes:
        class_queries_logits: [1, queries, classes + 1], the last is `nothing`.
        masks_queries_logits: [1, queries, h, w].
    """

    class_queries_logits: Tensor
    masks_queries_logits: Tensor


@dataclass(frozen=True)
class Mask2Former(DetectorModel):
    """Mask2Former-Swin-S on COCO and CLIP for colours.

    Attributes:
        path: the model's folder, if neither in $KVBENCH_WEIGHTS nor in the Hub's cache.
        shortest: the image's shorter side is resized to so many pixels,
        longest: unless the longer one would exceed this.
        colors: the colour classifier.
        model: the folder's files.
    """

    path: str | None = None
    shortest: int = 800
    longest: int = 1333
    colors: ClipColors = field(default_factory=ClipColors)
    model: Snapshot = MASK2FORMER
    packages: ClassVar[tuple[str, ...]] = ("transformers", *PACKAGES)
    classes: ClassVar[tuple[str, ...]] = CLASSES

    def load(self, device: str) -> LoadedDetector:
        """Read both networks, from local files only.

        Raises:
            WeightError: a file is missing or not the expected one.
            ValueError: the folder lacks weights, or the model does not tell COCO's 80 classes apart.
        """
        from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor

        folder, hashes = replace(self.model, path=self.path).require()
        network = load_pretrained(Mask2FormerForUniversalSegmentation, folder, device)
        _check_classes({int(number): str(name) for number, name in (network.config.id2label or {}).items()})
        # The folder's own settings resize to 384 x 384; these are the official detector's.
        size = {"shortest_edge": self.shortest, "longest_edge": self.longest}
        processor = Mask2FormerImageProcessor(size=size, size_divisor=DIVISOR)

        @torch.inference_mode()
        def detect(pixels: NDArray[np.uint8]) -> list[Region]:
            inputs = processor(pixels, return_tensors="pt", input_data_format="channels_last").to(device)
            with full_float32():
                outputs = network(**inputs)
            inside = inputs["pixel_mask"][0].bool()
            valid = (int(inside.any(1).sum()), int(inside.any(0).sum()))
            padded = (int(inside.shape[0]), int(inside.shape[1]))
            return find_instances(outputs, padded, valid, (pixels.shape[0], pixels.shape[1]))

        colors, color_hashes = self.colors.load(device)
        return LoadedDetector(detect, colors, {**hashes, **color_hashes})


def find_instances(
    output: Output,
    padded: tuple[int, int],
    valid: tuple[int, int],
    size: tuple[int, int],
    min_score: float = MIN_SCORE,
) -> list[Region]:
    """Return the objects that mmdetection would find in the network's output, best score first.

    The 100 best pairs of query and class; masks interpolated (bilinear) to the network's input, its padding cut off,
    then to the image; score = class probability x mean mask probability inside the mask.

    Args:
        output: the network's output for one image.
        padded: height and width of the network's input.
        valid: height and width of the part of that input that is image and not padding.
        size: height and width of the image.
        min_score: objects of lower scores are left out.
    """
    classes = output.class_queries_logits[0].softmax(-1)[:, :-1]
    scores, best = classes.flatten().topk(min(TOP, classes.numel()))
    found = []
    for score, number in zip(scores.tolist(), best.tolist(), strict=True):
        if score < min_score:  # the mask's share only lowers it
            break
        query, label = divmod(number, classes.shape[1])
        logits = output.masks_queries_logits[:, query : query + 1]
        logits = F.interpolate(logits, padded, mode="bilinear", align_corners=False)[
            ..., : valid[0], : valid[1]
        ]
        logits = F.interpolate(logits, size, mode="bilinear", align_corners=False)[0, 0]
        mask = logits > 0
        score *= float((logits.sigmoid() * mask).sum() / (mask.sum() + 1e-6))
        if score >= min_score:
            inside = mask.cpu().numpy()
            found.append(Region(CLASSES[label], score, mask_box(inside), mask=inside))
    return sorted(found, key=lambda region: -region.score)


def mask_box(mask: NDArray[np.bool_]) -> tuple[float, float, float, float]:
    """Return the box x0, y0, x1, y1 around a mask [H, W] that is not empty; far edges lie one past the last pixel."""
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _check_classes(names: Mapping[int, str]) -> None:
    if len(names) != len(CLASSES) or (names.get(0), names.get(79)) != ("person", "toothbrush"):
        raise ValueError(
            f"the detector distinguishes {len(names)} classes, from {names.get(0)} to {names.get(len(names) - 1)}; "
            "COCO's 80 from person to toothbrush are needed"
        )
