"""Loading transformers models from local folders, with a check that no weight is missing."""

from pathlib import Path
from typing import Any


def load_pretrained(kind: Any, folder: Path, device: str) -> Any:
    """Read a model in float32 from a folder that holds all of it; nothing is downloaded.

    Args:
        kind: a model class of transformers, whose own annotations do not cover this call.
        folder: configuration and weights.
        device: where it goes.

    Raises:
        ValueError: the folder lacks some of the weights, which transformers would make up at random.
    """
    model, found = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    absent = sorted(map(str, {*found["missing_keys"], *found["mismatched_keys"]}))
    if absent:
        raise ValueError(
            f"{folder} is not a whole {kind.__name__}: {absent[0]} is missing or of another shape"
        )
    return model.float().eval().to(device)
