"""LangChain with the block of Python that docs/guides/clients.md gives, as it stands; then tools and structured output,
which the guide says work too."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.guides.blocks import GUIDES, blocks, section
from tests.server.clients.pypi import interpreter
from tests.server.running import Running

MORE = """
import json
from pydantic import BaseModel, Field

class Sum(BaseModel):
    "Adds two numbers."
    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)

short = model.bind(max_tokens=64)
whole = short.invoke("What is 7 times 8?").content
streamed = "".join(piece.content for piece in short.stream("What is 7 times 8?"))
forced = model.bind_tools([Sum], tool_choice="Sum").invoke("7 plus 8").tool_calls
shaped = model.with_structured_output(Sum, method="json_schema").invoke("7 plus 8")
print("\\nFOUND " + json.dumps([whole, streamed, forced[0]["name"], forced[0]["args"], shaped.model_dump()]))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter("langchain-openai==1.7.3")


def test_the_guides_block_answers_and_streams_and_tools_and_schemas_work(server: Running, python: Path) -> None:
    block = next(b for b in blocks(section(GUIDES / "clients.md", "LangChain")) if b.language == "python")
    script = block.text.replace("http://127.0.0.1:8000", server.url).replace("qwen3.5-122b-hybrid-mtp2", "demo")
    assert script != block.text
    ran = subprocess.run([python, "-c", script + MORE], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    printed, _, found = ran.stdout.rpartition("\nFOUND ")
    assert printed.startswith("56\n"), "the embedded model has learnt its tables"
    whole, streamed, name, arguments, shaped = json.loads(found)
    assert whole == streamed == "56"
    assert name == "Sum"
    assert set(arguments) == set(shaped) == {"a", "b"}
