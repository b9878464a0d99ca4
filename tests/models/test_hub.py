"""Sources on the Hub: what is needed, one report of all that is missing, resuming, and no network afterwards."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kvbench.models.files import hub as hub_module
from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.hub import RepoSnapshot
from kvbench.models.files.stored import choose_files, find_digest, list_files
from kvbench.models.files.weights import Source, check_named, locate_all, locate_or_list
from tests.support.fake_hub import COMMIT, FakeHub

T5 = {
    "README.md": b"words", "config.json": b"{}", "spiece.model": b"pieces",
    "model-00001-of-00002.safetensors": b"1" * 30, "model-00002-of-00002.safetensors": b"2" * 20,
    "model.safetensors.index.json": b"{ }", "pytorch_model-00001-of-00001.bin": b"p" * 50,
    "pytorch_model.bin.index.json": b"{}", "flax_model.msgpack": b"f" * 50, "tf_model.h5": b"t" * 50,
}  # fmt: skip
REPOS = {
    "owner/t5": T5,
    "owner/model": {"net.pth": b"nnnnmmmmoooo", "other.pth": b"o" * 99, "in/model.safetensors": b"i"},
}
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NEEDED = sorted(
    name
    for name in T5
    if name.endswith((".safetensors", ".model")) or name in ("config.json", "model.safetensors.index.json")
)
TEXT = Source("model.sources.text", repo="owner/t5")
NET = Source("model.sources.net", repo="owner/model", file="net.pth")
FOLDER = Source("model.sources.folder", repo="owner/model", file="in")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setenv("KVBENCH_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2)
    hub = FakeHub(REPOS, monkeypatch, tmp_path / "cache")
    yield hub
    hub.close()


def test_only_what_is_read_is_fetched_and_compared_with_its_hash(hub: FakeHub) -> None:
    text, net, folder = locate_all([TEXT, NET, FOLDER])
    assert hub.names == sorted([*NEEDED, "net.pth", "in/model.safetensors"])
    assert (net.read_bytes(), folder.name) == (b"nnnnmmmmoooo", "in")
    assert [path.name for path in list_files(text)] == NEEDED
    assert [check_named(path) for path in (text, net)] == [find_digest(text), find_digest(net)]
    net.resolve().write_bytes(b"nnnnmmmmooo0")
    with pytest.raises(
        WeightsError, match=r"net.pth: damaged, its SHA-256 is not [0-9a-f]{64}; delete .* again"
    ):
        check_named(net)


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_a_revision_is_a_branch_a_tag_or_a_commit(revision: str | None, hub: FakeHub) -> None:
    source = Source("key", repo="owner/model", file="net.pth", revision=revision)
    source.locate()
    assert hub.asked == [("owner/model", revision or "main")]
    described = source.describe()
    assert (described["revision"], described["commit"]) == (revision or "main", COMMIT)
    assert described["sha256"] == find_digest(source.locate())


def test_afterwards_no_network_is_asked(hub: FakeHub) -> None:
    paths = locate_all([TEXT, NET])
    asked, hub.online = list(hub.asked), False
    assert locate_all([TEXT, NET]) == paths
    assert hub.asked == asked
    # A file that got lost is fetched again at the commit that the branch was resolved to.
    paths[1].unlink()
    hub.online = True
    locate_all([NET])
    assert hub.asked[-1] == ("owner/model", COMMIT)


def test_a_download_resumes_in_the_middle_of_a_file(hub: FakeHub) -> None:
    hub.breaks_at = "net.pth"
    with pytest.raises(WeightsError, match=r"net\.pth of owner/model ended early .*run it again to resume"):
        NET.locate()
    assert (NET.find(), hub.sent) == (None, [("net.pth", 6)])
    (known,) = locate_or_list([NET])
    assert isinstance(known, RepoSnapshot)
    assert known.missing == {"net.pth": 6}
    hub.breaks_at, hub.sent = None, []
    assert NET.locate().read_bytes() == REPOS["owner/model"]["net.pth"]
    assert hub.sent == [("net.pth", 6)]
    assert not list(hub.cache.rglob("*.incomplete"))


def test_a_gated_model_says_what_to_do(hub: FakeHub) -> None:
    """Everyone may list its files; large ones and small ones are refused on different ways."""
    for source, hub.gated in ((NET, 401), (Source("key", repo="owner/t5", file="config.json"), 403)):
        line = f"^{source.repo}: accept its conditions on its page, then `hf auth login`$"
        with pytest.raises(WeightsError, match=line):
            source.locate()


def test_whole_files_stay_when_a_download_ends(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_STREAMS", 1)
    hub.breaks_at = "model-00002-of-00002.safetensors"
    with pytest.raises(WeightsError, match=r"the files of owner/t5 ended early"):
        TEXT.locate()
    first, hub.sent, hub.breaks_at = list(hub.sent), [], None
    TEXT.locate()
    bytes_of = {name: sum(size for one, size in first + hub.sent if one == name) for name in NEEDED}
    assert bytes_of == {name: len(T5[name]) for name in NEEDED}


def test_a_part_that_is_damaged_begins_anew_and_gives_way_to_the_whole_file(hub: FakeHub) -> None:
    """What an earlier download of `net.pth` left: its listing and the file of its first bytes."""
    whole, (listing,) = REPOS["owner/model"]["net.pth"], locate_or_list([NET])
    assert isinstance(listing, RepoSnapshot)
    partial = listing.find_partial("net.pth")
    partial.parent.mkdir(parents=True)
    stored = hub.cache.joinpath("models--owner--model", "blobs", listing.hashes["net.pth"])
    for part in (b"xxxxxx", b"x" * 12):
        partial.write_bytes(part)
        with pytest.raises(WeightsError, match=r"ended early \(net\.pth was damaged and has been deleted\)"):
            NET.locate()
        assert NET.locate().read_bytes() == whole
        stored.unlink()
    longer = b"longer than the file"
    for part, hub.ranges in ((b"nnnn", False), (longer, False), (longer, True)):
        partial.write_bytes(part)
        assert NET.locate().read_bytes() == whole
        stored.unlink()


def test_files_that_another_program_fetched_are_found_without_a_network(hub: FakeHub) -> None:
    folder = hub.cache / "models--owner--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "net.pth").write_bytes(b"n")
    hub.online = False
    assert NET.locate().read_bytes() == b"n"


def test_all_that_is_missing_is_told_at_once(hub: FakeHub) -> None:
    sources = [
        Source("a", path="/nowhere/net.pth"), Source("b", file="vqgan.ckpt"), Source("c", repo="owner/gone"),
        Source("d", repo="owner/model", file="none.pth"), Source("e"), NET,
    ]  # fmt: skip
    parts = (
        r"a\.path=/nowhere/net\.pth: does not exist; ",
        r"b: weights missing\. Give a local copy of vqgan\.ckpt with b\.path=\.\.\.; ",
        r"c: weights missing: cannot download.*d\.path=\.\.\.",
        r"e: weights missing\. Give a local copy of the files with e\.path=\.\.\.",
    )
    with pytest.raises(WeightsError, match=".*".join(parts)):
        locate_all(sources)
    assert hub.sent == []


def test_a_full_disk_is_reported_before_a_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5))
    with pytest.raises(WeightsError, match=r"to download, 0\.0 MB free in .*: set HF_HOME to a larger disk"):
        NET.locate()
    assert hub.sent == []


def test_one_copy_of_the_weights_is_chosen() -> None:
    """As in mistralai/Mistral-7B-Instruct-v0.3: 14.5 GB of shards beside 14.5 GB for another program."""
    names = ["pytorch_model.bin", "config.json", "README.md", ".gitattributes", "images/a.json"]
    assert choose_files(names) == ["config.json", "pytorch_model.bin"]
    index, others = "model.safetensors.index.json", ["consolidated.safetensors", "adapter_model.safetensors"]
    for kept in (SHARDS, ["model.safetensors"]):
        assert choose_files([*kept, index, *others]) == sorted([*kept, index])
    two = ["first.safetensors", "second.safetensors"]
    assert choose_files([*two, index]) == sorted([*two, index])


def test_digests_of_folders_leave_documents_and_time_stamps_out(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text(name)
    before = find_digest(tmp_path)
    (tmp_path / "README.md").write_text("other words")
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "config.json").write_text("today")
    assert find_digest(tmp_path) == before
    (tmp_path / "config.json").write_text("another")
    assert find_digest(tmp_path) != before
