"""Local web server that serves one content and records the requests."""

import socket
import struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

CONTENT = bytes(range(256)) * 40


class Server(ThreadingHTTPServer):
    """Serves `CONTENT` under every name, and resets the first `resets` connections in the middle.

    `/short` ends early, `/gone` is not there, `/whole` ignores ranges, `/away` redirects to `elsewhere`. `requests` has
    the path, range and authorization of each request.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.resets, self.elsewhere = 0, ""
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __str__(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.server.requests.append((self.path, wanted, self.headers["Authorization"]))
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", self.server.elsewhere)
            self.end_headers()
            return
        body = CONTENT if self.path == "/whole" else CONTENT[int((wanted or "bytes=0-")[6:-1]) :]
        if self.path == "/gone" or not body:
            self.send_error(404 if body else 416)
            return
        self.send_response(206 if len(body) < len(CONTENT) else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.resets:
            self.server.resets -= 1
            self.wfile.write(body[:1000])
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()  # a reset
        else:
            self.wfile.write(body[:100] if self.path == "/short" else body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""
