"""The ASGI application: routes, exception handlers that answer in each API's format, and the guard in front of them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

import stoker
from stoker.server.endpoints import chat, completions, messages, page, responses
from stoker.server.endpoints import models as about
from stoker.server.endpoints.body import invalid
from stoker.server.errors import ApiError
from stoker.server.guard import Guard
from stoker.server.lifecycle.service import Service
from stoker.server.stream import ClientGone, JsonResponse

log = logging.getLogger("stoker.server")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase}
    for status in (400, 401, 403, 404, 405, 408, 413, 429, 500, 503, 504)
}


def create_app(service: Service) -> ASGIApp:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(service.run())
        running.add_done_callback(service.ended)
        yield
        await service.supervisor.stop()
        running.cancel()

    app = FastAPI(
        title="Stoker",
        version=stoker.__version__,
        summary="OpenAI's and Anthropic's APIs in front of one model.",
        docs_url=None,  # its page loads scripts from elsewhere; /openapi.json is served
        redoc_url=None,
        lifespan=lifespan,
        responses=ERRORS,
        default_response_class=JsonResponse,
    )
    app.state.service = service
    app.state.kept_items = responses.KeptItems()
    for module in (about, chat, completions, responses, messages, page):
        app.include_router(module.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ValidationError, _validation_error)  # of a request translated into a chat request
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(ClientDisconnect, _client_gone)  # in the middle of a body
    app.add_exception_handler(Exception, _internal_error)
    return Guard(app, service.config)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JsonResponse(error.body(request.url.path), error.status, error.headers)


async def _validation_error(request: Request, error: Exception) -> Response:
    """A body that does not validate: what is wrong, field by field."""
    assert isinstance(error, RequestValidationError | ValidationError)
    return await _api_error(request, ApiError(400, invalid(error.errors())))


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, and bodies that could not be read."""
    assert isinstance(error, HTTPException)
    cause = error.__cause__
    if isinstance(cause, ApiError):
        return await _api_error(request, cause)
    if isinstance(cause, UnicodeError):
        message = f"The body is not UTF-8: {cause}."
    elif isinstance(cause, RecursionError):
        message = "The body is JSON nested too deeply."
    elif cause is not None:
        message = f"The body cannot be read: {cause}."
    else:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}."
    answer = await _api_error(request, ApiError(error.status_code, message))
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client is gone, so nobody reads this


async def _internal_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    reason = ApiError(500, f"The server made a mistake: {type(error).__name__}. Its log has the details.")
    return JsonResponse(reason.body(request.url.path), 500)
