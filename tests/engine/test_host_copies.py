"""Copies from the host to a device (`meta` here), which are made once and then reused."""

import pytest
import torch
from torch import Tensor

from kvbench.engine.recording.host_copies import HostCopies


def copy_all(number: int) -> list[Tensor]:
    place = torch.empty(2, device="meta")
    return [
        torch.tensor([number, 2]).to("meta", non_blocking=True),
        torch.tensor([3.0]).to(place),
        place.copy_(torch.tensor([4.0, 5.0])),
        torch.tensor([6]).to(torch.int32),
        place + 1,
    ]


@pytest.mark.parametrize("inference", [False, True])
def test_work_gets_the_tensors_of_the_first_time(inference: bool) -> None:
    copies = HostCopies()
    with torch.inference_mode(inference), copies.note():
        first = copy_all(1)
    for _ in range(2):
        with torch.inference_mode(inference), copies.reuse():
            again = copy_all(1)
        same = [one is other for one, other in zip(first, again, strict=True)]
        assert same == [
            True,
            True,
            False,
            False,
            False,
        ]  # the others are made on a device, or stay on the host
        assert [one.device.type for one in again] == ["meta", "meta", "meta", "cpu", "meta"]


@pytest.mark.parametrize("number", [7, 1])
def test_other_copies_than_before_are_an_error(number: int) -> None:
    copies = HostCopies()
    with copies.note():
        copy_all(1)
    with copies.reuse(), pytest.raises(RuntimeError, match="copies other numbers from the host"):
        [copy_all(number) for _ in range(2)]  # the second time copies more than before
