"""Keeps large bodies and answers off the event loop, so that one client's megabytes do not delay another's answer.

To parse and validate JSON holds the GIL throughout. A body of many values is therefore validated in a child process
first, and parsed here only if it is valid and not too large.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from stoker import sandbox
from stoker.server.errors import RETRY_S, ApiError

T = TypeVar("T")
DIRECT_VALUES = 10_000  # up to here a body is parsed directly: a few milliseconds, errors included
MOST_VALUES = 300_000  # numbers, strings, lists and objects in one body
MOST_OBJECTS = 20_000
MOST_PROBLEMS = 5  # validation errors that a response lists
VALIDATE_S, WAIT_S = 20.0, 10.0  # time limits to validate a body, and to wait for a free child
SLICE = 2000  # list entries that are encoded at a time

_children = sandbox.Sandbox(processes=1, memory=1 << 30)
_large = ThreadPoolExecutor(1, "large")  # so that large requests wait for each other only


async def in_thread(large: bool, function: Callable[..., T], *arguments: Any) -> T:
    """Runs `function` in a thread; large work one call at a time."""
    executor = _large if large else None
    return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)


class BodyRoute(APIRoute):
    """A FastAPI route that validates a body of many values in a child process before FastAPI reads it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field else None

        async def validated(request: Request) -> Response:
            if isinstance(model, type) and issubclass(model, BaseModel):
                body = await request.body()
                if max_values(body) > DIRECT_VALUES:
                    problem = await in_thread(True, _validate_in_child, body, model)
                    if problem:
                        raise ApiError(400, problem)
            return await handle(request)

        return validated


def max_values(body: bytes) -> int:
    """An upper bound of the number of values in a JSON text, found without parsing it."""
    return sum(map(body.count, (b",", b"[", b"{")))


def _validate_in_child(body: bytes, model: type[BaseModel]) -> str | None:
    try:
        place = model.__module__, model.__qualname__
        found = _children.call(find_problem, body, *place, timeout=VALIDATE_S, wait=WAIT_S)
    except sandbox.Busy as error:
        raise ApiError(
            503, "Other large requests are being read. Try again soon.", code="busy", retry_after=RETRY_S
        ) from error
    except sandbox.SandboxError as error:
        raise ApiError(400, f"The body of {len(body):,} bytes cannot be read: {error}") from error
    return None if found is None else str(found)


def find_problem(body: bytes, module: str, name: str) -> str | None:
    """Runs in the child. What is wrong with a body, in a sentence; None if it is valid."""
    try:
        value = json.loads(body)
    except UnicodeError as error:
        return f"The body is not UTF-8: {error}."
    except json.JSONDecodeError as error:
        return f"The request is not valid: the body is no JSON ({error.msg} at character {error.pos})."
    except RecursionError:
        return "The body is JSON nested too deeply."
    values, objects = count(value)
    if values > MOST_VALUES or objects > MOST_OBJECTS:
        return (
            f"The body has {values:,} values, {objects:,} of them objects, and at most {MOST_VALUES:,} values and "
            f"{MOST_OBJECTS:,} objects are taken in one request."
        )
    try:
        getattr(import_module(module), name).model_validate(value)
    except ValidationError as error:
        return invalid(error.errors(include_url=False, include_input=False))
    return None


def count(value: Any) -> tuple[int, int]:
    """The number of values in a JSON value, including itself, and how many of them are objects."""
    values, objects, left = 1, 0, [value] if isinstance(value, dict | list) else []
    while left:
        each = left.pop()
        objects += isinstance(each, dict)
        inner = each.values() if isinstance(each, dict) else each
        values += len(inner)
        left += [entry for entry in inner if isinstance(entry, dict | list)]
    return values, objects


def invalid(problems: Any) -> str:
    """The message for pydantic's validation errors, field by field."""
    found = [_problem(each) for each in problems[:MOST_PROBLEMS]]
    more = len(problems) - len(found)
    return f"The request is not valid: {'; '.join(found)}{f'; and {more} more' if more > 0 else ''}."


def _problem(each: dict[str, Any]) -> str:
    place = ".".join(str(step) for step in each["loc"] if step != "body")
    if each["type"] == "json_invalid":
        reason = each.get("ctx", {}).get("error", "")
        return f"the body is no JSON ({reason} at character {each['loc'][-1]})"
    return f"{place or 'the body'}: {each['msg']}"


async def large_json(found: dict[str, Any]) -> Response:
    """A JSON response that may be large, encoded in a thread and a few entries at a time."""
    content = await in_thread(False, lambda: "".join(_json_parts(found)).encode("utf-8", "replace"))
    return Response(content, media_type="application/json")


def _json_parts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield "{"
        for place, (name, inner) in enumerate(value.items()):
            yield f"{',' if place else ''}{json.dumps(name)}:"
            yield from _json_parts(inner)
        yield "}"
    elif isinstance(value, list) and len(value) > SLICE:
        for start in range(0, len(value), SLICE):
            text = json.dumps(value[start : start + SLICE], ensure_ascii=False, separators=(",", ":"))
            yield ("," if start else "[") + text[1:-1]
        yield "]"
    else:
        yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
