"""Settings of programs that use a service, ready to paste. No key is in them, only where it is taken from."""

from collections.abc import Iterator

KEY = "YOUR_KEY"  # stands for a key that the service asks for


def settings(url: str, model: str, context: int | None, key: bool) -> dict[str, str]:
    """By program. `key`: the service asks for one; `context`: tokens of a request, if known."""
    token = KEY if key else "none"
    return {
        "Claude Code": "\n".join(_claude_code(url, model, token)),
        "Codex": "\n".join(_codex(url, model, context, key)),
        "Qwen Code": "\n".join(_qwen_code(url, model, token)),
        "opencode": "\n".join(_opencode(url, model, token)),
        "Open WebUI": "\n".join(_open_webui(url, token)),
    }


def _claude_code(url: str, model: str, token: str) -> Iterator[str]:
    yield f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={token}"
    yield f"export ANTHROPIC_MODEL={model} ANTHROPIC_SMALL_FAST_MODEL={model}"
    yield "export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1"
    yield "claude"


def _codex(url: str, model: str, context: int | None, key: bool) -> Iterator[str]:
    yield "# ~/.codex/config.toml"
    yield f'model = "{model}"'
    yield 'model_provider = "stoker"'
    if context:
        yield f"model_context_window = {context}"
    yield ""
    yield "[model_providers.stoker]"
    yield 'name = "Stoker"'
    yield f'base_url = "{url}/v1"'
    yield 'wire_api = "responses"'
    if key:
        yield 'env_key = "STOKER_API_KEY"'


def _qwen_code(url: str, model: str, token: str) -> Iterator[str]:
    yield f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={token} OPENAI_MODEL={model}"
    yield "qwen"


def _opencode(url: str, model: str, token: str) -> Iterator[str]:
    yield "# ~/.config/opencode/opencode.json"
    yield "{"
    yield f'  "model": "stoker/{model}",'
    yield '  "provider": {'
    yield '    "stoker": {'
    yield '      "npm": "@ai-sdk/openai-compatible",'
    yield '      "name": "Stoker",'
    yield f'      "options": {{"baseURL": "{url}/v1", "apiKey": "{token}"}},'
    yield f'      "models": {{"{model}": {{"name": "{model}"}}}}'
    yield "    }"
    yield "  }"
    yield "}"


def _open_webui(url: str, token: str) -> Iterator[str]:
    yield "docker run -d --name open-webui --network host -v open-webui:/app/backend/data \\"
    yield f"  -e PORT=3000 -e OPENAI_API_BASE_URL={url}/v1 -e OPENAI_API_KEY={token} \\"
    yield "  ghcr.io/open-webui/open-webui:main   # then open http://127.0.0.1:3000"
