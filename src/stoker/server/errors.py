"""Errors of requests, in the format of the API that the request used."""

from typing import Any

from stoker.errors import EngineError, RequestError, StokerError

RETRY_S = 2  # Retry-After where no better estimate is known
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error response. The message is a sentence with the numbers and the way out."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        anthropic_message: str | None = None,
        anthropic_code: str | None = None,
    ) -> None:
        """`anthropic_message` replaces the message where clients of Anthropic's API match on its wording;
        `anthropic_code` is the error_code by which its SDK chooses an exception."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after
        self.anthropic_message, self.anthropic_code = anthropic_message or message, anthropic_code

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            found["www-authenticate"] = 'Basic realm="stoker, any user name, the API key as password"'
        if self.status in (408, 413):
            found["connection"] = "close"  # the rest of the body is not read
        return found

    def openai(self) -> dict[str, Any]:
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status == 401:
            kind = "authentication_error"
        else:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}}

    def anthropic(self) -> dict[str, Any]:
        fallback = "invalid_request_error" if self.status < 500 else "api_error"
        kind = ANTHROPIC_KINDS.get(self.status, fallback)
        error: dict[str, Any] = {"type": kind, "message": self.anthropic_message}
        if self.anthropic_code:
            error["details"] = {"error_code": self.anthropic_code}
        return {"type": "error", "error": error}

    def body(self, path: str) -> dict[str, Any]:
        return self.anthropic() if path.startswith("/v1/messages") else self.openai()


class TimedOut(StokerError):
    """A request that took longer than requests may."""


def api_error(error: StokerError) -> ApiError:
    """The response to an error of the engine or of our own checks."""
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, TimedOut):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_unavailable", retry_after=RETRY_S)
    return ApiError(500, str(error))
