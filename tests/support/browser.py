"""Events of a browser's page that tests of the dashboard look at."""

from typing import Any


def record_events(page: Any) -> tuple[list[str], list[str]]:
    """Return two lists that fill while a page is used: its errors and messages, and the addresses that it requests."""
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda made: requests.append(made.url))
    return complaints, requests
