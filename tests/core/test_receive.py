"""Receipt of files from local servers: lost connections, other hosts, the end on demand."""

import socket
import struct
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from kvbench.core import receive as receiving
from kvbench.core.receive import receive

CONTENT = bytes(range(256)) * 40


class Handler(BaseHTTPRequestHandler):
    """Serves `CONTENT`, resets the first `resets` connections in the middle; `/away` redirects to `elsewhere`."""

    resets = 0
    elsewhere = ""
    requests: list[tuple[str, str | None, str | None]]

    def do_GET(self) -> None:
        self.requests.append((self.path, self.headers["Range"], self.headers["Authorization"]))
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", self.elsewhere)
            self.end_headers()
            return
        start = int((self.headers["Range"] or "bytes=0-")[6:-1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        if type(self).resets:
            type(self).resets -= 1
            self.wfile.write(CONTENT[start : start + 1000])
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()  # a reset
            return
        self.wfile.write(CONTENT[start:])

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[type[Handler], str]]]:
    """Two servers, each with its handler and address."""
    monkeypatch.setattr(receiving, "PAUSE", 0)
    kinds = [type("One", (Handler,), {"requests": []}) for _ in range(2)]
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in kinds]
    for server in servers:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield [(kind, f"http://127.0.0.1:{one.server_port}") for kind, one in zip(kinds, servers, strict=True)]
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_lost_connection_is_opened_again(
    handlers: list[tuple[type[Handler], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, address = handlers[0]
    handler.resets = 2
    receive(f"{address}/net", tmp_path / "part", "net", size=len(CONTENT))
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert len(handler.requests) == 3
    monkeypatch.setattr(receiving, "TRIES", 2)
    handler.resets = 2
    with pytest.raises(ConnectionError):
        receive(f"{address}/net", tmp_path / "other", "net", size=len(CONTENT))
    assert (tmp_path / "other").read_bytes() == CONTENT[: (tmp_path / "other").stat().st_size]


def test_another_host_receives_no_authorization(
    handlers: list[tuple[type[Handler], str]], tmp_path: Path
) -> None:
    (first, address), (second, other) = handlers
    (tmp_path / "part").write_bytes(CONTENT[:100])
    for elsewhere in (f"{other}/net", f"{address}/net"):
        first.elsewhere = elsewhere
        (tmp_path / "part").write_bytes(CONTENT[:100])
        receive(f"{address}/away", tmp_path / "part", "net", headers={"authorization": "Bearer x"})
        assert (tmp_path / "part").read_bytes() == CONTENT
    away = ("/away", "bytes=100-", "Bearer x")
    assert first.requests == [away, away, ("/net", "bytes=100-", "Bearer x")]
    assert second.requests == [("/net", "bytes=100-", None)]


def test_a_receipt_ends_on_demand_and_keeps_its_part(
    handlers: list[tuple[type[Handler], str]], tmp_path: Path
) -> None:
    stop = Event()
    stop.set()
    with pytest.raises(InterruptedError, match="stopped"):
        receive(f"{handlers[0][1]}/net", tmp_path / "part", "net", stop=stop)
    with pytest.raises(OSError, match="net: received 10240 of 20000 bytes; try again"):
        receive(f"{handlers[0][1]}/net", tmp_path / "part", "net", size=20000)
