"""Programs of others that the page holds: versions, sizes, hashes and licences of the files under vendor/."""

from dataclasses import dataclass
from importlib.resources import files

from kvbench.core.config import ConfigError
from kvbench.core.files import hash_content


@dataclass(frozen=True)
class Vendored:
    """A file of an npm package, unaltered.

    Attributes:
        package: name in npm's registry.
        version: of the package.
        member: the file's path inside the package.
        name: the file's name under vendor/; its licence lies beside it as `<stem>.LICENSE`.
        size: bytes.
        sha256: of the file.
        licence: SPDX identifier.
    """

    package: str
    version: str
    member: str
    name: str
    size: int
    sha256: str
    licence: str

    @property
    def licence_name(self) -> str:
        """Name of the licence's file under vendor/."""
        return f"{self.name.split('.')[0]}.LICENSE"

    def read(self) -> str:
        """Return the file's text.

        Raises:
            ConfigError: it is not the file that the hash is of.
        """
        content = (files("kvbench.dashboard") / "vendor" / self.name).read_bytes()
        if hash_content(content) != self.sha256:
            raise ConfigError(
                f"kvbench/dashboard/vendor/{self.name}: is not {self.package} {self.version}; install kvbench again"
            )
        return content.decode()

    def read_licence(self) -> str:
        """Return the text of the file's licence."""
        return (files("kvbench.dashboard") / "vendor" / self.licence_name).read_text(encoding="utf-8")


VENDORED = (
    Vendored(
        package="d3",
        version="7.9.2",
        member="dist/d3.min.js",
        name="d3.min.js",
        size=280622,
        sha256="912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1",
        licence="ISC",
    ),
    Vendored(
        package="@observablehq/plot",
        version="0.6.17",
        member="dist/plot.umd.min.js",
        name="plot.umd.min.js",
        size=209183,
        sha256="4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb",
        licence="ISC",
    ),
    Vendored(
        package="img-comparison-slider",
        version="8.0.7",
        member="dist/index.js",
        name="img-comparison-slider.js",
        size=11382,
        sha256="6e01335000bbafdd053f851db4e0025dc3e0fadd677deca51548d6fe95b42162",
        licence="MIT",
    ),
)
"""In the order in which a page needs them."""
