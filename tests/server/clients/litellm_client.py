"""Asks the server at argv[1] through litellm and prints what came back as JSON. Run by test_litellm.py with the Python
that has litellm. Nothing but this machine is reached: whatever would go elsewhere raises."""

import json
import os
import sys
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}


def only_here(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and arguments[1][0] not in ("127.0.0.1", "::1"):
        raise RuntimeError(f"a connection to {arguments[1]}")


sys.addaudithook(only_here)

import litellm  # type: ignore[import-not-found]  # noqa: E402


def main(url: str) -> None:
    litellm.suppress_debug_info = True
    found = []
    for model, base in (("openai/demo", f"{url}/v1"), ("anthropic/demo", url)):
        given: Any = {"model": model, "api_base": base, "api_key": "any", "max_tokens": 4, "num_retries": 0}
        short = litellm.completion(**given, messages=[{"role": "user", "content": "Say hi."}])
        for streamed in (False, True):
            try:
                litellm.completion(**given, messages=[{"role": "user", "content": "word " * 9000}], stream=streamed)
                error = None
            except litellm.ContextWindowExceededError as refused:
                error = str(refused)
            found.append(
                {"model": model, "streamed": streamed, "error": error, "tokens": short.usage.completion_tokens}
            )
    print(json.dumps(found))


main(*sys.argv[1:])
