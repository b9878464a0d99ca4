"""GenEval's rules (Ghosh et al., arXiv:2310.11513) for judging an image by its detected instances."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

Box = Sequence[float]


@dataclass(frozen=True)
class Instance:
    """A detected object. Detectors may return any class with these attributes.

    Attributes:
        label: name of the class.
        score: confidence, 0 to 1.
        box: x0, y0, x1, y1 in pixels, x1 and y1 exclusive.
        color: name of the colour; None if the detector does not know it.
    """

    label: str
    score: float
    box: Box
    color: str | None = None


@dataclass(frozen=True)
class MaskedInstance(Instance):
    """A detected object with a mask bool [H, W] of the whole image."""

    mask: NDArray[np.bool_] = field(kw_only=True)


Detector = Callable[[NDArray[np.uint8]], Sequence[Instance]]
"""Function from an image uint8 [H, W, 3] to its objects."""
ColorOf = Callable[[Sequence[Instance], str], Sequence[str | None]]
"""Function from objects of an image and the name of their class to the name of each object's colour."""


@dataclass(frozen=True)
class Thresholds:
    """Thresholds; the defaults are the official code's.

    Attributes:
        threshold: score that a detection must exceed.
        counting_threshold: score that a detection must exceed for counting prompts.
        max_objects: maximum number of detections kept for each class.
        max_overlap: IoU with a better box of the same class from which a box is dropped; 1 keeps all boxes.
        position_threshold: share of the sum of both sizes that is subtracted from an offset.
    """

    threshold: float = 0.3
    counting_threshold: float = 0.9
    max_objects: int = 16
    max_overlap: float = 1.0
    position_threshold: float = 0.1


OFFICIAL = Thresholds()
MIN_SHARE = 0.5
"""Share of the distance in a relation's direction that must be exceeded for the relation to hold."""


@dataclass(frozen=True)
class Clause:
    """Requirement of a prompt for one class.

    Attributes:
        label: the class.
        count: number of objects, at least (include) or fewer than (exclude).
        color: colour of the objects.
        position: relation to the objects of an earlier clause, and the index of that clause in `include`.
    """

    label: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None

    @classmethod
    def parse(cls, entry: Mapping[str, object]) -> "Clause":
        """Return the clause of an entry of `include` or `exclude`; raise KeyError or ValueError if it is malformed."""
        color, position = entry.get("color"), entry.get("position")
        relation = None
        if position is not None:
            if not isinstance(position, Sequence) or len(position) != 2:
                raise ValueError(f"position is [relation, clause], got {position!r}")
            relation = (str(position[0]), int(position[1]))
        return cls(
            str(entry["class"]), int(str(entry["count"])), None if color is None else str(color), relation
        )


@dataclass(frozen=True)
class Line:
    """One GenEval prompt: its task and clauses."""

    tag: str
    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...] = ()

    @classmethod
    def parse(cls, meta: Mapping[str, object]) -> "Line":
        """Read a line of evaluation_metadata.jsonl; raise ValueError if a field is missing or malformed."""
        try:
            line = cls(str(meta["tag"]), _clauses(meta.get("include")), _clauses(meta.get("exclude")))
        except (KeyError, ValueError) as error:
            raise ValueError(f"not a GenEval line ({type(error).__name__} {error}): {dict(meta)}") from error
        if line.tag not in TASKS or not line.include:
            raise ValueError(
                f"not a GenEval line (needs a tag of {', '.join(TASKS)} and a clause): {dict(meta)}"
            )
        return line


def judge_image(
    instances: Sequence[Instance],
    metadata: Mapping[str, object],
    color_of: ColorOf | None = None,
    rules: Thresholds = OFFICIAL,
) -> tuple[bool, list[str]]:
    """Return whether an image is correct, and the reasons why it is not.

    Args:
        instances: detected objects.
        metadata: GenEval line of the prompt.
        color_of: classifier of the colours of a class's objects; None for the colours from the detector.
        rules: thresholds.
    """
    line = Line.parse(metadata)
    detections = keep_detections(instances, line.tag, rules)
    reasons: list[str] = []
    matched: list[Sequence[Instance] | None] = []
    for clause in line.include:
        boxes = detections.get(clause.label, [])[: clause.count]
        wrong = _judge(clause, boxes, matched, color_of, rules)
        reasons += wrong
        matched.append(None if wrong else boxes)
    for clause in line.exclude:
        if (seen := len(detections.get(clause.label, []))) >= clause.count:
            reasons.append(f"expected {clause.label}<{clause.count}, found {seen}")
    return not reasons, reasons


def keep_detections(
    instances: Sequence[Instance], tag: str, rules: Thresholds = OFFICIAL
) -> dict[str, list[Instance]]:
    """Return the detections that count by class, in descending order of scores."""
    # The official code compares in float32.
    threshold = np.float32(rules.counting_threshold if tag == "counting" else rules.threshold)
    detections: dict[str, list[Instance]] = {}
    for label in dict.fromkeys(item.label for item in instances):
        ranked = sorted((i for i in instances if i.label == label), key=lambda i: -i.score)
        ranked = [item for item in ranked if np.float32(item.score) > threshold][: rules.max_objects]
        if chosen := _suppressed(ranked, rules.max_overlap):
            detections[label] = chosen
    return detections


def relations(box: Box, target: Box, threshold: float = OFFICIAL.position_threshold) -> set[str]:
    """Return the relations of `box` to `target`: at most two of `left of`, `right of`, `above` and `below`."""
    return {name for name, share in find_direction(box, target, threshold).items() if share > MIN_SHARE}


def find_direction(box: Box, target: Box, threshold: float = OFFICIAL.position_threshold) -> dict[str, float]:
    """Return the share of the distance between two boxes, from -1 to 1, in the direction of each relation."""
    (a, size_a), (b, size_b) = _center_and_size(box), _center_and_size(target)
    offset = a - b
    rest = np.maximum(np.abs(offset) - threshold * (size_a + size_b), 0) * np.sign(offset)
    dx, dy = (0.0, 0.0) if (np.abs(rest) < 1e-3).all() else map(float, rest / np.linalg.norm(offset))
    return {"left of": -dx, "right of": dx, "above": -dy, "below": dy}


def _clauses(entries: object) -> tuple[Clause, ...]:
    if entries is None:
        return ()
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"a list of clauses is needed, got {entries!r}")
    return tuple(Clause.parse(entry) for entry in entries)


def _judge(
    clause: Clause,
    boxes: Sequence[Instance],
    matched: Sequence[Sequence[Instance] | None],
    color_of: ColorOf | None,
    rules: Thresholds,
) -> list[str]:
    """Return why the objects `boxes` do not meet a clause; empty if they do."""
    if len(boxes) < clause.count:
        return [f"expected {clause.label}>={clause.count}, found {len(boxes)}"]
    if clause.color is not None:
        colors = [box.color for box in boxes] if color_of is None else list(color_of(boxes, clause.label))
        if (hits := colors.count(clause.color)) < clause.count:
            seen = ", ".join(str(color) for color in colors)
            return [f"expected {clause.color} {clause.label}>={clause.count}, found {hits} (colours: {seen})"]
    if clause.position is None:
        return []
    relation, index = clause.position
    targets = matched[index]
    if targets is None:
        return [f"nothing for {clause.label} to be {relation}"]
    for box in boxes:
        for target in targets:
            actual = relations(box.box, target.box, rules.position_threshold)
            if relation not in actual:
                seen = " and ".join(sorted(actual)) or "neither side of"
                return [f"expected {clause.label} {relation} target, found {seen} target"]
    return []


def _suppressed(ranked: list[Instance], max_overlap: float) -> list[Instance]:
    if max_overlap >= 1:
        return ranked
    chosen: list[Instance] = []
    for item in ranked:
        if all(_overlap(item.box, better.box) < max_overlap for better in chosen):
            chosen.append(item)
    return chosen


def _overlap(a: Box, b: Box) -> float:
    """Return the intersection over union; boxes include x1 and y1, as in the official code."""

    def area(x0: float, y0: float, x1: float, y1: float) -> float:
        return max(x1 - x0 + 1, 0) * max(y1 - y0 + 1, 0)

    shared = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    union = area(*a) + area(*b) - shared
    return shared / union if union else 0.0


def _center_and_size(box: Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    corners = np.asarray(box, np.float64).reshape(2, 2)
    return corners.mean(0), np.abs(corners[1] - corners[0])
