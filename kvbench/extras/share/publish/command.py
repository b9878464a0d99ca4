"""`kvbench publish RUN...`: finished runs as a dataset for the Hugging Face Hub."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvbench.cli.console import say
from kvbench.core.config import ConfigError
from kvbench.extras.share.arguments import read_name, split_arguments
from kvbench.extras.share.publish.upload import check_repo, upload

USAGE = "kvbench publish RUN... [out=FOLDER] [repo=USER/NAME] [license=NAME] [author=NAME]"
KEYS = ("out", "repo", "license", "author")


class PublishRequest(NamedTuple):
    """Request to publish runs.

    Attributes:
        runs: folders of runs.
        out: folder of the dataset; None for a new folder in published/.
        repo: dataset on the Hub, user/name; None to upload nothing.
        licence: identifier of the licence on the Hub; None if not given.
        author: name of the publisher, as given or the user of `repo`; None if neither is given.
    """

    runs: tuple[Path, ...]
    out: Path | None
    repo: str | None
    licence: str | None
    author: str | None


def publish(arguments: Sequence[str]) -> None:
    """Prepare a dataset, and upload it if a repository is named and a token is available.

    Args:
        arguments: arguments after `publish`.

    Raises:
        ConfigError: an argument is wrong, a folder is not a finished run, or a package is not installed.
        OSError: an error of the disk or the Hub.
    """
    request = parse_arguments(arguments)
    from kvbench.dashboard.page import render_bundle
    from kvbench.extras.share.publish.dataset import choose_name, prepare_dataset, read_published

    runs = read_published(request.runs)
    out = request.out or Path("published", choose_name(runs))
    folders = [run.folder.resolve() for run in runs]
    root = Path(os.path.commonpath([folder.parents[1] for folder in folders]))
    make_page = partial(render_bundle, root, folders)
    prepare_dataset(runs, out, request.licence, request.repo, make_page, author=request.author)
    say(f"prepared: {out} ({len(runs)} runs)")
    address = None if request.repo is None else upload(out, request.repo)
    repo = request.repo or "USER/NAME"
    upload_command = f"hf auth login; hf upload {repo} {out} --repo-type dataset"
    say(f"uploaded: {address}" if address else f"upload: {upload_command}")


def parse_arguments(arguments: Sequence[str]) -> PublishRequest:
    """Parse the arguments of the command.

    Raises:
        ConfigError: a key is unknown or has a wrong value, no run is named, or the Hub refuses the repository's name.
    """
    runs, values = split_arguments(arguments, KEYS, USAGE)
    if not runs:
        raise ConfigError(f"publish: no run given; {USAGE}")
    repo = values.get("repo")
    if repo is not None:
        check_repo(repo)
    out = Path(values["out"]).expanduser() if "out" in values else None
    user = repo.partition("/")[0] if repo is not None else None
    author = read_name("author", values["author"]) if "author" in values else user
    return PublishRequest(runs, out, repo, values.get("license"), author)
