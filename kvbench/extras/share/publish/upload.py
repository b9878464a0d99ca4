"""Upload of a prepared dataset to the Hugging Face Hub."""

from pathlib import Path

from kvbench.core.config import ConfigError


def check_repo(repo: str) -> None:
    """Check a repository's name by the rules of huggingface_hub; raise ConfigError if it is wrong."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ConfigError(f"repo={repo}: must be USER/NAME, a dataset on the Hub")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        rule = str(error).partition(": '")[0].rstrip(".")  # the rest of the message repeats the name
        raise ConfigError(f"repo={repo}: the Hub refuses this name ({rule}); choose another") from None


def upload(folder: Path, repo: str) -> str | None:
    """Upload the folder of a dataset to a repository that `check_repo` accepts, created if it does not exist.

    Returns:
        Address of the upload; None without a token (`hf auth login`, or HF_TOKEN).

    Raises:
        OSError: the Hub refuses the upload or cannot be reached.
    """
    import huggingface_hub

    token = huggingface_hub.get_token()
    if token is None:
        return None
    hub = huggingface_hub.HfApi(token=token)
    hub.create_repo(repo, repo_type="dataset", exist_ok=True)
    message = f"Results of kvbench: {folder.name}"
    commit = hub.upload_folder(repo_id=repo, repo_type="dataset", folder_path=folder, commit_message=message)
    return str(commit.commit_url)
