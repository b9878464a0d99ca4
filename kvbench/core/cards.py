"""GPUs with the peak rates that their maker states."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Peak rates of a GPU.

    Attributes:
        name: name as its maker writes it.
        tera: 10^12 operations per second of dense 16-bit matrix products with float32 sums.
        tera_float32: 10^12 float32 operations per second outside tensor cores.
        giga: 10^9 bytes per second of its memory.
        source: document in which the maker states the rates.
        driver: name that the graphics driver reports.
    """

    name: str
    tera: float
    tera_float32: float
    giga: float
    source: str
    driver: str

    def find_rate(self, arithmetic: str) -> float:
        """Return operations per second in `float32`, `tf32` (half of the 16-bit rate on all GPUs here), or 16 bits."""
        tera = {"float32": self.tera_float32, "tf32": self.tera / 2}.get(arithmetic, self.tera)
        return 1e12 * tera


CARDS = {
    "a100": Card("A100 80 GB SXM", 312, 19.5, 2039, "NVIDIA A100 datasheet", "NVIDIA A100-SXM4-80GB"),
    "l40s": Card("L40S", 362, 91.6, 864, "NVIDIA L40S datasheet", "NVIDIA L40S"),
    "rtx4090": Card(
        "RTX 4090", 165.2, 82.6, 1008, "NVIDIA Ada GPU architecture whitepaper", "NVIDIA GeForce RTX 4090"
    ),
    "h100": Card("H100 SXM", 989, 67, 3350, "NVIDIA H100 datasheet", "NVIDIA H100 80GB HBM3"),
    "h200": Card("H200 SXM", 989, 67, 4800, "NVIDIA H200 datasheet", "NVIDIA H200"),
    "b200": Card("B200 SXM", 2250, 75, 8000, "NVIDIA HGX B200 datasheet", "NVIDIA B200"),
    "rtx5090": Card(
        "RTX 5090",
        209.5,
        104.8,
        1792,
        "NVIDIA RTX Blackwell GPU architecture whitepaper",
        "NVIDIA GeForce RTX 5090",
    ),
}
"""GPUs by the name that `device` takes with `task=plan`."""
