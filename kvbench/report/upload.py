"""Upload of a prepared dataset to the Hugging Face Hub."""

from pathlib import Path

from kvbench.core.config import ConfigError


def upload(folder: Path, repo: str) -> str | None:
    """Upload a folder as a dataset, which is made if it is not there yet.

    Args:
        folder: what `prepare_dataset` wrote.
        repo: user/name.

    Returns:
        Address of what was uploaded; None if no token is known (`hf auth login`, or HF_TOKEN).

    Raises:
        ConfigError: huggingface_hub is not installed.
        OSError: the Hub refuses, or cannot be reached.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f'repo={repo}: huggingface_hub is not installed; pip install "kvbench[text]"'
        ) from None
    token = huggingface_hub.get_token()
    if token is None:
        return None
    hub = huggingface_hub.HfApi(token=token)
    hub.create_repo(repo, repo_type="dataset", exist_ok=True)
    done = hub.upload_folder(
        repo_id=repo,
        repo_type="dataset",
        folder_path=folder,
        commit_message=f"Results of kvbench: {folder.name}",
    )
    return str(done.commit_url)
