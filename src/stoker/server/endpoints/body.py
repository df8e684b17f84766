"""Large requests and answers, kept off the event loop: one client's megabytes must not delay another's answer.

Parsing and checking JSON hold Python's lock from beginning to end. A body of many values is therefore first examined in
a child process, and only one that is sound and small enough is read here.
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
FEW_VALUES = 10_000  # are read at once: a few milliseconds, errors included
MOST_VALUES = 300_000  # numbers, texts, lists and objects of one body
MOST_OBJECTS = 20_000
MOST_PROBLEMS = 5  # of a request that are named
EXAMINE_S, WAIT_S = 20.0, 10.0  # for a child to examine a body, and for a child to be free
SLICE = 2000  # entries of a list that are encoded at a time

_children = sandbox.Sandbox(processes=1, memory=1 << 30)
_large = ThreadPoolExecutor(1, "large")  # so that large work waits for large work only


async def in_thread(large: bool, function: Callable[..., T], *arguments: Any) -> T:
    """Runs `function` off the event loop; large work one at a time."""
    executor = _large if large else None
    return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)


class BodyRoute(APIRoute):
    """FastAPI's route, which examines a body of many values elsewhere before it is read here."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field else None

        async def examined(request: Request) -> Response:
            if isinstance(model, type) and issubclass(model, BaseModel):
                body = await request.body()
                if most_values(body) > FEW_VALUES:
                    problem = await in_thread(True, _examined, body, model)
                    if problem:
                        raise ApiError(400, problem)
            return await handle(request)

        return examined


def most_values(body: bytes) -> int:
    """At least as many as the values of a JSON text; found in a moment, since nothing is parsed."""
    return sum(map(body.count, (b",", b"[", b"{")))


def _examined(body: bytes, model: type[BaseModel]) -> str | None:
    try:
        found = _children.call(examine, body, model.__module__, model.__qualname__, timeout=EXAMINE_S, wait=WAIT_S)
    except sandbox.Busy as error:
        raise ApiError(
            503, "Other large requests are being read. Try again soon.", code="busy", retry_after=RETRY_S
        ) from error
    except sandbox.SandboxError as error:
        raise ApiError(400, f"The body of {len(body):,} bytes cannot be read: {error}") from error
    return None if found is None else str(found)


def examine(body: bytes, module: str, name: str) -> str | None:
    """In the child: what is wrong with a body, in a sentence. None: it may be read as it is."""
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
    """Values within a JSON value, itself included, and how many of them are objects."""
    values, objects, left = 1, 0, [value] if isinstance(value, dict | list) else []
    while left:
        each = left.pop()
        objects += isinstance(each, dict)
        inner = each.values() if isinstance(each, dict) else each
        values += len(inner)
        left += [entry for entry in inner if isinstance(entry, dict | list)]
    return values, objects


def invalid(problems: Any) -> str:
    """What is wrong with a body, field by field."""
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
    """An answer that may be long, encoded off the event loop and a few entries at a time."""
    content = await in_thread(False, lambda: "".join(_pieces(found)).encode("utf-8", "replace"))
    return Response(content, media_type="application/json")


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield "{"
        for place, (name, inner) in enumerate(value.items()):
            yield f"{',' if place else ''}{json.dumps(name)}:"
            yield from _pieces(inner)
        yield "}"
    elif isinstance(value, list) and len(value) > SLICE:
        for start in range(0, len(value), SLICE):
            text = json.dumps(value[start : start + SLICE], ensure_ascii=False, separators=(",", ":"))
            yield ("," if start else "[") + text[1:-1]
        yield "]"
    else:
        yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
