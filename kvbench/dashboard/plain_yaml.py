"""Untrusted YAML files, parsed within limits."""

from typing import Any

import yaml

MAX_BYTES = 1 << 18
"""Maximum size in bytes: values such as `1:1:1` take a time that grows with its square."""


class _Reader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reader of plain values without aliases, which could repeat values as often as a power of the file's size."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*name), which is not read; write the value again")
        return super().compose_node(parent, index)


def parse_yaml(content: str | bytes) -> Any:
    """Parse YAML of plain values, at most `MAX_BYTES` and without aliases; a merge key can then repeat nothing.

    Raises:
        ValueError: the content is not YAML of this kind.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 10} KiB")
    try:
        return yaml.load(content, _Reader)
    except Exception as error:  # constructors of YAML raise anything for values that do not fit their tag
        reason = " ".join(str(error).split())
        raise ValueError(f"{type(error).__name__}: {reason:.200}") from None
