"""GenEval's detector `mask2former-hf`: Mask2Former (Cheng et al., arXiv:2112.01527) by transformers.

The official detector has the same architecture, from another training run in mmdetection. Its scores differ, mostly
for counting, so the metrics have different names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kvbench.eval.alignment.clip import PACKAGES
from kvbench.eval.files.weights import Snapshot
from kvbench.eval.geneval.colors import ClipColors
from kvbench.eval.geneval.rules import MaskedInstance
from kvbench.eval.geneval.score import DetectorModel, LoadedDetector
from kvbench.eval.networks import Pixels, full_float32, load_pretrained

MASK2FORMER = Snapshot(
    "facebook/mask2former-swin-small-coco-instance",
    ("config.json", "preprocessor_config.json", "model.safetensors"),
)
DIVISOR = 32  # sides of the padded input are multiples of it, as in mmdetection
MAX_INSTANCES = 100
"""Maximum number of instances of an image, as in mmdetection."""
MIN_SCORE = 0.1
"""Minimum score of a recorded instance; GenEval's thresholds are 0.3 and 0.9."""

CLASSES = tuple(
    """person|bicycle|car|motorcycle|airplane|bus|train|truck|boat|traffic light|fire hydrant|stop sign|parking meter|
bench|bird|cat|dog|horse|sheep|cow|elephant|bear|zebra|giraffe|backpack|umbrella|handbag|tie|suitcase|frisbee|skis|
snowboard|sports ball|kite|baseball bat|baseball glove|skateboard|surfboard|tennis racket|bottle|wine glass|cup|fork|
knife|spoon|bowl|banana|apple|sandwich|orange|broccoli|carrot|hot dog|pizza|donut|cake|chair|couch|potted plant|bed|
dining table|toilet|tv|laptop|computer mouse|tv remote|computer keyboard|cell phone|microwave|oven|toaster|sink|
refrigerator|book|clock|vase|scissors|teddy bear|hair drier|toothbrush""".replace("\n", "").split("|")
)
"""GenEval's names of COCO's 80 classes, in COCO's order; three names differ from COCO."""


class Output(Protocol):
    """Output of the network for one image.

    Attributes:
        class_queries_logits: [1, queries, classes + 1], the last class is `nothing`.
        masks_queries_logits: [1, queries, h, w].
    """

    class_queries_logits: Tensor
    masks_queries_logits: Tensor


@dataclass(frozen=True)
class Mask2Former(DetectorModel):
    """Mask2Former-Swin-S on COCO and CLIP for colours.

    Attributes:
        path: path of the model's folder, if it is neither in $KVBENCH_WEIGHTS nor in the Hub's cache.
        shortest: length in pixels to which the shorter side is resized, if `longest` allows it.
        longest: maximum length of the longer side in pixels.
        colors: the colour classifier.
        model: files of the folder.
    """

    path: str | None = None
    shortest: int = 800
    longest: int = 1333
    colors: ClipColors = field(default_factory=ClipColors)
    model: Snapshot = MASK2FORMER
    packages: ClassVar[tuple[str, ...]] = ("transformers", *PACKAGES)
    classes: ClassVar[tuple[str, ...]] = CLASSES

    def load(self, device: str) -> LoadedDetector:
        """Load both networks from local files.

        Raises:
            WeightError: a file is missing or its hash differs.
            ValueError: the weight file lacks tensors, or the model's classes are not COCO's 80 classes.
        """
        from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor

        [folder], hashes = self.require()
        network = load_pretrained(Mask2FormerForUniversalSegmentation, folder, device)
        _check_classes({int(number): str(name) for number, name in (network.config.id2label or {}).items()})
        # Sizes of the official detector; the settings in the folder resize to 384 x 384.
        size = {"shortest_edge": self.shortest, "longest_edge": self.longest}
        processor = Mask2FormerImageProcessor(size=size, size_divisor=DIVISOR)

        @torch.inference_mode()
        def detect(pixels: Pixels) -> list[MaskedInstance]:
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
) -> list[MaskedInstance]:
    """Return the instances that mmdetection would find, in descending order of scores.

    The 100 best pairs of query and class are used. Masks are interpolated (bilinear) to the network's input, cropped
    to `valid` and interpolated to the image. The score is class probability x mean mask probability inside the mask.

    Args:
        output: output of the network for one image.
        padded: height and width of the network's input.
        valid: height and width of the input without padding.
        size: height and width of the image.
        min_score: minimum score of a returned instance.
    """
    classes = output.class_queries_logits[0].softmax(-1)[:, :-1]
    scores, best = classes.flatten().topk(min(MAX_INSTANCES, classes.numel()))
    instances = []
    for score, pair in zip(scores.tolist(), best.tolist(), strict=True):
        if score < min_score:  # the mask can only lower the score further
            break
        query, label = divmod(pair, classes.shape[1])
        logits = output.masks_queries_logits[:, query : query + 1]
        logits = F.interpolate(logits, padded, mode="bilinear", align_corners=False)[
            ..., : valid[0], : valid[1]
        ]
        logits = F.interpolate(logits, size, mode="bilinear", align_corners=False)[0, 0]
        mask = logits > 0
        score *= float((logits.sigmoid() * mask).sum() / (mask.sum() + 1e-6))
        if score >= min_score:
            inside = mask.cpu().numpy()
            instances.append(MaskedInstance(CLASSES[label], score, find_mask_box(inside), mask=inside))
    return sorted(instances, key=lambda instance: -instance.score)


def find_mask_box(mask: NDArray[np.bool_]) -> tuple[float, float, float, float]:
    """Return the box x0, y0, x1, y1 around a non-empty mask [H, W] in pixels, x1 and y1 exclusive."""
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _check_classes(names: Mapping[int, str]) -> None:
    if len(names) != len(CLASSES) or (names.get(0), names.get(79)) != ("person", "toothbrush"):
        raise ValueError(
            f"the detector has {len(names)} classes, from {names.get(0)} to {names.get(len(names) - 1)}; give one with "
            "COCO's 80, from person to toothbrush"
        )
