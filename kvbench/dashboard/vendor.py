"""Third-party scripts of the page under vendor/: versions, hashes and licences."""

from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Vendored:
    """Unmodified file of an npm package.

    Attributes:
        package: name in npm's registry.
        version: version of the package.
        name: file name under vendor/; the licence is `<stem>.LICENSE` in the same folder.
        sha256: hash of the published file, which tests compare.
        licence: SPDX identifier.
    """

    package: str
    version: str
    name: str
    sha256: str
    licence: str

    def read(self) -> str:
        """Return the file's text."""
        return (files("kvbench.dashboard") / "vendor" / self.name).read_text(encoding="utf-8")

    def read_licence(self) -> str:
        """Return the text of the file's licence."""
        name = f"{self.name.split('.')[0]}.LICENSE"
        return (files("kvbench.dashboard") / "vendor" / name).read_text(encoding="utf-8")


D3, PLOT, SLIDER = (
    "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1",
    "4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb",
    "6e01335000bbafdd053f851db4e0025dc3e0fadd677deca51548d6fe95b42162",
)
VENDORED = (
    Vendored("d3", "7.9.2", "d3.min.js", D3, "ISC"),
    Vendored("@observablehq/plot", "0.6.17", "plot.umd.min.js", PLOT, "ISC"),
    Vendored("img-comparison-slider", "8.0.7", "img-comparison-slider.js", SLIDER, "MIT"),
)
"""Scripts in the order in which the page loads them."""
