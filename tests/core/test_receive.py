"""Receipt of files from local servers: lost connections, other hosts, the end on demand."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from kvbench.core import receive as receiving
from kvbench.core.receive import receive
from tests.support.file_server import CONTENT, Server


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    monkeypatch.setattr(receiving, "PAUSE", 0)
    with Server() as first, Server() as second:
        yield first, second


def test_a_lost_connection_is_opened_again(
    servers: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = servers
    server.resets = 2
    receive(f"{server}/net", tmp_path / "part", "net", size=len(CONTENT))
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert len(server.requests) == 3
    monkeypatch.setattr(receiving, "TRIES", 2)
    server.resets = 2
    with pytest.raises(ConnectionError):
        receive(f"{server}/net", tmp_path / "other", "net", size=len(CONTENT))
    assert (tmp_path / "other").read_bytes() == CONTENT[: (tmp_path / "other").stat().st_size]


def test_another_host_receives_no_authorization(servers: tuple[Server, Server], tmp_path: Path) -> None:
    first, second = servers
    (tmp_path / "part").write_bytes(CONTENT[:100])
    for elsewhere in (f"{second}/net", f"{first}/net"):
        first.elsewhere = elsewhere
        (tmp_path / "part").write_bytes(CONTENT[:100])
        receive(f"{first}/away", tmp_path / "part", "net", headers={"authorization": "Bearer x"})
        assert (tmp_path / "part").read_bytes() == CONTENT
    away = ("/away", "bytes=100-", "Bearer x")
    assert first.requests == [away, away, ("/net", "bytes=100-", "Bearer x")]
    assert second.requests == [("/net", "bytes=100-", None)]


def test_a_receipt_ends_on_demand_and_keeps_its_part(servers: tuple[Server, Server], tmp_path: Path) -> None:
    stop = Event()
    stop.set()
    with pytest.raises(InterruptedError, match="stopped"):
        receive(f"{servers[0]}/net", tmp_path / "part", "net", stop=stop)
    with pytest.raises(OSError, match="net: received 10240 of 20000 bytes; try again"):
        receive(f"{servers[0]}/net", tmp_path / "part", "net", size=20000)
