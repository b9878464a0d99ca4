"""Upload of a prepared dataset to the Hugging Face Hub."""

from pathlib import Path

from kvbench.core.config import ConfigError


def upload(folder: Path, repo: str) -> str | None:
    """Upload the folder of a dataset to the repository user/name, which is created if it does not exist.

    Returns:
        Address of the upload; None without a token (`hf auth login`, or HF_TOKEN).

    Raises:
        ConfigError: huggingface_hub is not installed.
        OSError: the Hub refuses the upload or cannot be reached.
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
    message = f"Results of kvbench: {folder.name}"
    commit = hub.upload_folder(repo_id=repo, repo_type="dataset", folder_path=folder, commit_message=message)
    return str(commit.commit_url)
