"""Requests that get no answer, in OpenAI's format. Pure."""

from typing import Any

LONGEST_MESSAGE = 2000
"""Characters of an error, which may quote what a request holds."""


def short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


class Refused(Exception):
    """An HTTP status and the error that goes with it."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(short(message, LONGEST_MESSAGE))
        self.status, self.code, self.param = status, code, param and short(param)

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


TOO_LONG = "context_length_exceeded"
KINDS = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}


def wrong(key: str, value: Any, expected: str) -> Refused:
    """A field that holds what it cannot."""
    return Refused(400, f"{short(key)}={short(repr(value))}: expected {expected}", "invalid_value", key)
