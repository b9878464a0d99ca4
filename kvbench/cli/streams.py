"""Standard streams that are closed, lose their reader, or cannot encode a character."""

import io
import os
import sys
from contextlib import suppress
from typing import IO, Any, TextIO, cast

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}
"""Standard streams in the order of their descriptors."""


class _Pipe(io.FileIO):
    """Standard stream whose further output is dropped once nothing reads it, as after `| head`."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def repair_streams() -> None:
    """Replace closed standard streams with the null device and make both outputs accept any text.

    A command continues after the reader of its output has ended. Characters outside a stream's encoding become "?".
    Streams that the calling program has replaced in `sys` are left unchanged.
    """
    for descriptor, (name, mode) in enumerate(MODES.items()):
        try:
            os.fstat(descriptor)
        except OSError:  # otherwise the next file that is opened would get the program's output
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
        elif mode == "w" and getattr(sys, name) is getattr(sys, f"__{name}__"):
            setattr(sys, name, _wrap(getattr(sys, name), descriptor))


def _wrap(stream: TextIO, descriptor: int) -> TextIO:
    """Return a stream in place of a standard one, with the same encoding and buffering."""
    with suppress(BrokenPipeError):
        stream.flush()
    raw = _Pipe(descriptor, "w", closefd=False)
    unbuffered = bool(getattr(stream, "write_through", False))  # `python -u`
    return io.TextIOWrapper(
        cast(IO[bytes], raw) if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="replace",
        line_buffering=bool(getattr(stream, "line_buffering", False)),
        write_through=unbuffered,
    )
