"""Modules that moved; importing one by its old name fails with a line that names the new one."""

import sys

PACKAGES = {
    "methods.shared": "base capacities grouped layer_shares output_norms redundancy scored select view wrapper",
    "models.files": "hub downloads checkpoints stored weights official_files llama_files parameters",
    "models.parts": "autoencoder codebook cross_attention decoder layers rotary text tokens tensor_parallel",
    "cli.config": "compose messages check_groups search_path instantiate",
}
"""Modules that moved from the package above into each of these packages of kvbench."""
RENAMED = {
    "core.locks": "core.claims",
    "methods.capabilities": "methods.shared.uses",
    "eval.paired.metrics": "eval.paired.psnr, .ssim and .lpips",
}
"""New names of other modules of kvbench."""
MOVED = {
    f"{package.rpartition('.')[0]}.{name}": f"{package}.{name}"
    for package, names in PACKAGES.items()
    for name in names.split()
} | RENAMED
"""New name of each module by its old one, both without `kvbench.`"""


class MovedFinder:
    """Finder that raises for the old name of a module; the last of `sys.meta_path`."""

    def find_spec(self, name: str, *_: object) -> None:
        """Raise ModuleNotFoundError for a module that moved."""
        if (new := MOVED.get(name.removeprefix("kvbench."))) and name.startswith("kvbench."):
            # An error with a `name` would be swallowed by `from package import module`.
            raise ModuleNotFoundError(f"{name} moved to kvbench.{new}")


def install() -> None:
    """Add the finder to `sys.meta_path`, once."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedFinder())
