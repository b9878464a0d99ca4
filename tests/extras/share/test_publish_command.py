"""`kvbench publish`: its words, what it prints, and what the Hub is handed."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub as hub
import pytest

from kvbench.cli import app
from kvbench.core.config import ConfigError
from kvbench.extras.share.publish.command import publish
from kvbench.extras.share.publish.dataset import choose_name, read_published
from tests.support.verification import COUNT


class FakeHub:
    """Records the calls that the Hub receives."""

    asked: list[tuple[object, ...]]

    def __init__(self, token: str) -> None:
        FakeHub.asked = [("token", token)]

    def create_repo(self, *given: object, **named: object) -> None:
        self.asked.append(("create_repo", *given, named))

    def upload_folder(self, *given: object, **named: object) -> SimpleNamespace:
        self.asked.append(("upload_folder", *given, named))
        return SimpleNamespace(commit_url="https://hub/commit")


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr("sys.argv", ["kvbench", "publish", *map(str, words)])
    app.main()


def test_the_command_says_what_it_prepared_and_how_to_upload_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "HfApi", FakeHub)
    monkeypatch.setattr(hub, "get_token", lambda: None)
    call(monkeypatch, made)
    name = choose_name(read_published([made]))
    assert capsys.readouterr().out == (
        f"prepared: published/{name} (2 runs)\n"
        f"upload: hf auth login; hf upload USER/NAME published/{name} --repo-type dataset\n"
    )
    monkeypatch.setattr(hub, "get_token", lambda: "secret")
    call(monkeypatch, made, "out=set", "repo=user/name", "license=mit")
    assert capsys.readouterr().out == "prepared: set (2 runs)\nuploaded: https://hub/commit\n"
    handed = {"repo_id": "user/name", "repo_type": "dataset", "folder_path": Path("set")}
    assert FakeHub.asked == [
        ("token", "secret"),
        ("create_repo", "user/name", {"repo_type": "dataset", "exist_ok": True}),
        ("upload_folder", {**handed, "commit_message": "Results of kvbench: set"}),
    ]
    about = hub.DatasetCard.load(tmp_path / "set" / "README.md").data.to_dict()
    assert (about["license"], about["author"]) == ("mit", "user")
    page = (tmp_path / "set" / "dashboard.html").read_text()
    document = json.loads(page.split('id="document">')[1].split("</script>")[0])
    assert {run["folder"] for run in document["runs"]} == {run.path for run in read_published([made])}
    assert len(document["bundle"]["pictures"]) == 2 * COUNT
    with pytest.raises(SystemExit, match="error: publish: nowhere is not a finished run"):
        call(monkeypatch, "nowhere")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "publish: no run given"),
        (["runs/a", "outt=set"], "outt=set: no such key"),
        (["runs/a", "out="], "out=: no such key, no value"),
        (["runs/a", "author=a\nb"], "author='a.nb': must be a name of 1 to 80 printable characters"),
        (["runs/a", f"author={'b' * 81}"], "must be a name of 1 to 80"),
        (["runs/a", "repo=name"], "repo=name: must be USER/NAME"),
        (["runs/a", "repo=a/b/c"], "repo=a/b/c: must be USER/NAME"),
        (["runs/a", "repo=user/a--b"], "repo=user/a--b: the Hub refuses this name .*Cannot have --"),
        (["runs/a", "repo=us\u00e9r/b"], "repo=us\u00e9r/b: the Hub refuses this name"),
    ],
)
def test_words_that_cannot_be_read_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        publish(words)
