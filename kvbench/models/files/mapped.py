"""Memory that is mapped from files, and the release of its pages after reading."""

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

MAPS = Path("/proc/self/maps")


def list_file_maps() -> list[range]:
    """Return the address ranges that are mapped from files; an empty list if the system does not list them."""
    if not MAPS.is_file():
        return []
    maps = []
    for line in MAPS.read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        if inode != "0":
            maps.append(range(*(int(address, 16) for address in addresses.split("-"))))
    return maps


def release_pages(tensors: Iterable[Tensor], maps: Sequence[range]) -> None:
    """Let the system drop the pages of tensors that are mapped from files; they are read again if they are needed.

    Otherwise pages that were read count as memory of the process until the whole file is unmapped.

    Args:
        tensors: tensors on the CPU.
        maps: result of `list_file_maps`; tensors elsewhere stay, because their contents would be lost.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    advise, page = ctypes.CDLL(None).madvise, mmap.PAGESIZE
    for tensor in tensors:
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        start, stop = -(-first // page) * page, end // page * page
        if start < stop and any(first in area and end <= area.stop for area in maps):
            advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
