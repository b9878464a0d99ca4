"""`kvbench publish RUN...`: finished runs as a dataset for the Hugging Face Hub."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvbench.cli.console import say
from kvbench.core.config import ConfigError
from kvbench.data.publication import check_packages
from kvbench.extras.share.arguments import read_name, split_arguments
from kvbench.extras.share.publish.upload import check_repo, upload

USAGE = "kvbench publish RUN... [out=FOLDER] [repo=USER/NAME] [license=NAME] [author=NAME]"
KEYS = ("out", "repo", "license", "author")


def publish(arguments: Sequence[str]) -> None:
    """Prepare a dataset, and upload it if a repository is named and a token is available.

    Args:
        arguments: arguments after `publish`.

    Raises:
        ConfigError: an argument is wrong, a folder is not a finished run, or a package is not installed.
        OSError: an error of the disk or the Hub.
    """
    folders, values = split_arguments(arguments, KEYS, USAGE)
    if not folders:
        raise ConfigError(f"publish: no run given; {USAGE}")
    check_packages()
    repo = values.get("repo")
    if repo is not None:
        check_repo(repo)
    author = read_name("author", values["author"]) if "author" in values else repo and repo.partition("/")[0]
    from kvbench.dashboard.page import render_bundle
    from kvbench.extras.share.publish.dataset import choose_name, prepare_dataset, read_published

    runs = read_published(folders)
    out = Path(values["out"]).expanduser() if "out" in values else Path("published", choose_name(runs))
    places = [run.folder.resolve() for run in runs]
    root = Path(os.path.commonpath([place.parents[1] for place in places]))
    make_page = partial(render_bundle, root, places)
    prepare_dataset(runs, out, values.get("license"), repo, make_page, author=author)
    say(f"prepared: {out} ({len(runs)} runs)")
    address = None if repo is None else upload(out, repo)
    upload_command = f"hf auth login; hf upload {repo or 'USER/NAME'} {out} --repo-type dataset"
    say(f"uploaded: {address}" if address else f"upload: {upload_command}")
