"""Without gradients layers are computed in pieces and in place: the numbers are those of the whole."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.models.base import FiniteCheck, NotFinite
from kvbench.models.parts import layers
from kvbench.models.parts.autoencoder import ImageTokenizer
from kvbench.models.parts.decoding import Decoding
from kvbench.models.parts.layers import FeedForward, add_gated
from kvbench.models.var import sampling
from kvbench.models.var.sampling import VARSampling, truncate


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("room", "pieces"), [(0, [1] * 12), (5, [5, 5, 2]), (11, [11, 1]), (12, [12])])
def test_the_feed_forward_in_pieces(room: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, h = FeedForward(8, 32), random(1, 2, 6, 8)
    first, second = layer.fc1, layer.fc2
    expected = F.gelu(h @ first.weight.T + first.bias, approximate="tanh") @ second.weight.T + second.bias
    seen: list[int] = []
    linear = layers.linear

    def watched(x: Tensor, *given: Any, gelu: bool = False) -> Tensor:
        seen.extend([x.numel() // 8] if gelu else [])
        return linear(x, *given, gelu=gelu)

    monkeypatch.setattr(layers, "linear", watched)
    monkeypatch.setattr(layers, "PIECE_BYTES", room * 32 * 4)
    torch.testing.assert_close(layer(h), expected)
    assert seen == [12]  # whole where gradients are wanted
    with torch.no_grad():
        found = layer(h)
    torch.testing.assert_close(found, expected.detach())
    assert seen[1:] == pieces
    assert (found.data_ptr() == h.data_ptr()) == (len(pieces) > 1)


@pytest.mark.parametrize(
    ("stream", "branch", "rounded"),
    [
        (torch.float32, torch.float32, True),
        (torch.float32, torch.float32, False),
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.bfloat16, True),
    ],
)
def test_a_gated_branch_is_added_in_place(stream: torch.dtype, branch: torch.dtype, rounded: bool) -> None:
    x, h, gate = random(0, 2, 5, 8).to(stream), random(1, 2, 5, 8).to(branch), random(2, 2, 1, 8)
    functional = add_gated(x, h, gate, rounded=rounded)
    product = (h.double() * gate.double()).to(branch if rounded else torch.float64)
    bound = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[functional.dtype]
    torch.testing.assert_close(functional.double(), x.double() + product.double(), atol=1e-6, rtol=bound)
    with torch.no_grad():
        found = add_gated(x, h, gate, rounded=rounded)
    assert torch.equal(found, functional)
    assert found is x


def test_logits_are_truncated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, limits = 3 * random(0, 2, 7, 40), VARSampling(top_k=20, top_p=0.9)
    whole = truncate(logits, limits)
    assert 0 < whole.isinf().float().mean() < 1
    monkeypatch.setattr(sampling, "PIECE_BYTES", 3 * 40 * 4)
    assert torch.equal(truncate(logits, limits), whole)


def test_images_are_decoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.models.parts.decoding.PIXELS_PER_CALL", 2 * 3 * 4 * 25)
    seen: list[int] = []

    class Enlarging(ImageTokenizer):
        def decode(self, latents: Tensor) -> Tensor:
            seen.append(len(latents))
            return F.interpolate(latents, scale_factor=5)

    latents = torch.linspace(-1, 1, 5 * 3 * 12).view(5, 3, 3, 4)
    pixels = Decoding().decode(Enlarging(), latents, 5, "float32", "nearest")
    assert seen == [2, 2, 1]
    assert (pixels.shape, pixels.dtype) == ((5, 15, 20, 3), torch.uint8)
    expected = torch.linspace(0, 255, 5 * 3 * 12).round().view(5, 3, 3, 4)
    assert torch.equal(pixels[:, ::5, ::5].permute(0, 3, 1, 2).float(), expected)


def test_a_cpu_is_asked_at_once_and_a_gpu_in_the_end() -> None:
    check, logits = FiniteCheck(), torch.zeros(3, 4, 2)
    check.note(logits, 0)
    logits[2, 1] = torch.inf
    with pytest.raises(NotFinite, match="prompt 2 of the batch, segment 1"):
        check.note(logits, 1)
    check.conclude()
    check = FiniteCheck()
    check._maxima = [torch.ones(3, 1), torch.tensor([[1.0], [torch.nan], [torch.inf]])]
    with pytest.raises(NotFinite, match="prompt 1 of the batch, segment 1"):
        check.conclude()
