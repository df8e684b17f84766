"""Asks the server at argv[1] through instructor in TOOLS mode and prints what came back as JSON. Run by
test_instructor.py with the Python that has instructor."""

import json
import sys
from typing import Any, Literal

import instructor  # type: ignore[import-not-found]
import openai
from pydantic import BaseModel, Field


class Stop(BaseModel):
    city: str = Field(max_length=20)
    minute: int = Field(ge=0, le=59)


class Fare(BaseModel):
    kind: Literal["fare"]
    price: int = Field(ge=1, le=99)  # a float might get digits without end


class Pass(BaseModel):
    kind: Literal["pass"]
    number: str = Field(pattern="^[A-Z]{2}[0-9]{4}$")


class Journey(BaseModel):
    """A journey by train or bus."""

    vehicle: Literal["train", "bus"]
    start: Stop
    via: list[Stop] = Field(min_length=1, max_length=2)
    ticket: Fare | Pass
    note: str | None = Field(max_length=20)
    seats: int = Field(ge=1, le=9)


def main(url: str) -> None:
    sent: list[dict[str, Any]] = []
    # no retries: what is no Journey raises, and is not asked for again
    asked = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    client = instructor.from_openai(asked, mode=instructor.Mode.TOOLS)
    client.on("completion:kwargs", lambda **given: sent.append(given))
    given: Any = {
        "response_model": Journey,
        "model": "demo",
        "messages": [{"role": "user", "content": "From Győr to Pécs by train, 2 seats."}],
        "max_tokens": 400,
        "temperature": 0,
        "max_retries": 0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    whole = client.create(**given)
    partials = [partial.model_dump(warnings=False) for partial in client.create_partial(**given)]
    found = {
        "tool_choice": sent[0]["tool_choice"],
        "parameters": sent[0]["tools"][0]["function"]["parameters"],
        "whole": whole.model_dump(),
        "partials": partials,
        "last": Journey.model_validate(partials[-1]).model_dump(),
    }
    print(json.dumps(found))


main(*sys.argv[1:])
