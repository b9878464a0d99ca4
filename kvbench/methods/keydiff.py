"""KeyDiff: eviction of the keys most similar to the mean key."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from kvbench.methods.shared.scored import Scored
from kvbench.methods.shared.view import View


@dataclass
class KeyDiff(Scored):
    """Keep the tokens whose keys differ most from the mean key, an even share of B in every head.

    A slot's score is the negative cosine similarity between its key and the mean of the row's keys, each scaled to unit
    length (arXiv:2504.15364). No queries or attention are needed.

    Differs from the paper in: eviction happens once per segment. Keys are compared as stored, rotated by their
    positions. The paper protects no sinks.
    """

    recordable: ClassVar[bool] = True

    def score(self, view: View) -> Tensor:
        """Return the negative cosine similarity of each key to the row's mean key, float32 [rows, slots] in -1..1."""
        keys = F.normalize(view.cached_keys().float(), dim=-1)
        exists = (view.position >= 0).unsqueeze(-1)
        anchor = (keys * exists).sum(1, keepdim=True)  # a sum, because cosine similarity ignores length
        return -F.cosine_similarity(keys, anchor, dim=-1)
