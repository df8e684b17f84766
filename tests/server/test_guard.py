"""Who may come in, by which door, and what a hostile template, schema or page can do: nothing."""

import asyncio
import base64
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.demo import EMBEDDED
from stoker.errors import RequestError
from stoker.server.config import ServerConfig
from stoker.server.errors import ApiError
from stoker.server.guard import Guard
from stoker.server.lifecycle.run import listen
from stoker.server.model import ServedModel
from stoker.server.prepare.template import template_tools
from stoker.server.schemas.chat import Function, Tool
from tests.server.faulty import SLOW
from tests.server.running import PATIENCE_S, Running, chat_body

KEY = "sk-0123456789abcdef"


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    options = ("--model", "demo", "--users", "1", "--no-self-test", "--request-timeout", "8")
    server = Running(*options, module="tests.server.faulty", env={"STOKER_API_KEY": KEY})
    try:
        yield server.wait(KEY)
    finally:
        server.stop()


PATHS = (
    ("GET", "/"),
    ("GET", "/page/app.js"),
    ("GET", "/state"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/v1/models"),
    ("GET", "/nothing"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)


@pytest.mark.parametrize("key", [None, "wrong", KEY[:-1], KEY + "x", KEY.upper()])
def test_without_the_key_nothing_but_health_answers(locked: Running, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}", "x-api-key": key}
    for method, path in PATHS:
        response = httpx.request(
            method, locked.url + path, headers=headers, json={} if method == "POST" else None, timeout=PATIENCE_S
        )
        assert response.status_code == 401, path
        assert "API key" in response.text
        assert KEY not in response.text
    assert locked.get("/health", headers=headers).status_code == 200


def test_with_the_key_in_any_of_its_places(locked: Running) -> None:
    basic = base64.b64encode(f"anyone:{KEY}".encode()).decode()
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"authorization": f"Basic {basic}"}):
        assert locked.post("/v1/chat/completions", chat_body(max_tokens=2), headers=headers).status_code == 200
        assert locked.get("/", headers=headers).status_code == 200
    assert locked.get("/", headers={"authorization": "Basic !!"}).status_code == 401
    assert KEY not in locked.log


def test_a_request_that_takes_too_long_is_ended(locked: Running) -> None:
    headers, body = {"x-api-key": KEY}, chat_body(max_tokens=8000, ignore_eos=True, seed=SLOW)
    whole = locked.post("/v1/chat/completions", body, headers=headers)
    assert whole.status_code == 504, whole.text
    assert "ended after 8 s with" in whole.json()["error"]["message"]
    streamed = locked.post("/v1/chat/completions", {**body, "stream": True}, headers=headers)
    assert streamed.status_code == 200
    assert "ended after 8 s with" in streamed.text.split("data: ")[-2]
    assert locked.post("/v1/chat/completions", chat_body(max_tokens=2), headers=headers).status_code == 200


def test_only_the_bound_address_answers(shared: Running) -> None:
    """127.0.0.1 by default: not even another address of this machine."""
    port = int(shared.url.rpartition(":")[2])
    assert shared.url.startswith("http://127.0.0.1:")
    others = {"127.0.0.2", *(entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET))}
    for address in others - {"127.0.0.1"}:
        with pytest.raises(OSError), socket.create_connection((str(address), port), timeout=5):  # noqa: PT011
            pass


def test_a_page_cannot_reach_the_server_by_a_name_of_its_own(shared: Running) -> None:
    """DNS rebinding: the browser would send the attacker's name."""
    for host, status in (("evil.example", 403), ("evil.example:8000", 403), ("localhost:1", 200), ("[::1]:80", 200)):
        assert shared.get("/state", headers={"host": host}).status_code == status, host
    assert "access-control-allow-origin" not in shared.get("/state", headers={"origin": "http://evil.example"}).headers


GUARDED = {
    "foreign": ({"origin": "http://evil.example"}, 403),
    "foreign, not JSON": ({"origin": "http://evil.example", "content-type": "text/plain"}, 403),
    "a file or a frame": ({"origin": "null"}, 403),
    "another port": ({"origin": "http://127.0.0.1:1"}, 403),
    "a form of another site": ({"sec-fetch-site": "cross-site"}, 403),
    "no address at all": ({"origin": "http://[::1"}, 403),
    "typed by a user": ({"sec-fetch-site": "none"}, 200),
    "a program": ({}, 200),
}


@pytest.mark.parametrize("kind", GUARDED)
def test_a_page_of_another_site_cannot_make_a_browser_compute_here(shared: Running, kind: str) -> None:
    headers, status = GUARDED[kind]
    response = shared.post("/tokenize", {"prompt": "x"}, headers=headers)
    assert response.status_code == status, response.text
    assert "access-control-allow-origin" not in response.headers
    assert status == 200 or "--cors-origin" in response.text


def test_the_servers_own_page_may_ask_it(shared: Running) -> None:
    assert shared.post("/tokenize", {"prompt": "x"}, headers={"origin": shared.url}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/json;x=y", None])
def test_json_is_read_whatever_it_is_called(shared: Running, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = httpx.post(shared.url + "/tokenize", content=b'{"prompt": "x"}', headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    form = httpx.post(shared.url + "/tokenize", content=b"prompt=x", headers=headers, timeout=PATIENCE_S)
    assert form.status_code == 400
    assert "no JSON" in form.text


def test_other_ways_to_ask(shared: Running) -> None:
    """No CORS unless it is asked for, no WebSockets."""
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    preflight = httpx.request("OPTIONS", shared.url + "/v1/chat/completions", headers=asked, timeout=PATIENCE_S)
    assert preflight.status_code == 405
    assert "access-control-allow-origin" not in preflight.headers
    assert httpx.head(shared.url + "/health", timeout=PATIENCE_S).status_code in (200, 405)
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
    }
    assert shared.get("/health", headers=upgrade).status_code == 200  # as if it had not been asked


async def guarded(config: ServerConfig, method: str = "POST", kind: str = "http", **headers: str) -> tuple[int, Any]:
    """What the guard lets through to an app that answers 200, with the headers of the response."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await Guard(app, config)({"type": kind, "method": method, "path": "/x", "headers": raw}, receive, send)
    if kind == "websocket":
        return sent[0]["code"], None
    return sent[0]["status"], {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}


def test_pages_that_are_allowed_may_use_the_server() -> None:
    page, other = "https://chat.example", "https://evil.example"
    config = ServerConfig(EMBEDDED, ("x",), api_key=KEY, cors_origins=(page,))
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,content-type"}
    status, headers = asyncio.run(guarded(config, "OPTIONS", origin=page, **asked))  # a browser sends no key with it
    assert status == 200
    assert headers["access-control-allow-origin"] == page
    assert "authorization" in headers["access-control-allow-headers"]
    status, headers = asyncio.run(guarded(config, origin=page, authorization=f"Bearer {KEY}"))
    assert (status, headers["access-control-allow-origin"]) == (200, page)
    status, headers = asyncio.run(guarded(config, origin=page))
    assert (status, headers["access-control-allow-origin"]) == (401, page)  # or the page could not read why
    status, headers = asyncio.run(guarded(config, origin=other, authorization=f"Bearer {KEY}"))
    assert status == 403
    assert "access-control-allow-origin" not in headers
    anyone = ServerConfig(EMBEDDED, ("x",), cors_origins=("*",))
    status, headers = asyncio.run(guarded(anyone, origin=other))
    assert (status, headers["access-control-allow-origin"]) == (200, "*")
    assert asyncio.run(guarded(config, kind="websocket"))[0] == 1008


def test_names_that_the_server_answers_to() -> None:
    def status(name: str, **options: Any) -> int:
        return asyncio.run(guarded(ServerConfig(EMBEDDED, ("x",), **options), host=name))[0]

    assert status("llm.example") == 403
    assert status("llm.example", allowed_hosts=("LLM.example",)) == 200
    assert status("192.168.1.7:8000") == 403
    open_to_all: dict[str, Any] = {"host": "0.0.0.0"}
    assert status("evil.example", **open_to_all) == 403
    assert status("evil.example", **open_to_all, allowed_hosts=("llm.example",)) == 403
    for host in ("192.168.1.7:8000", "[fe80::1]:8000", "localhost:1", socket.gethostname(), "llm.example:80"):
        assert status(host, **open_to_all, allowed_hosts=("llm.example",)) == 200, host
    config = ServerConfig(EMBEDDED, ("x",), host="0.0.0.0", api_key=KEY)
    assert asyncio.run(guarded(config, host="any.example", x_api_key=KEY))[0] == 200
    behind = ServerConfig(EMBEDDED, ("x",), allowed_hosts=("llm.example",))  # a proxy that changes the Host
    assert asyncio.run(guarded(behind, host="127.0.0.1:8000", origin="https://llm.example"))[0] == 200


@pytest.mark.parametrize("more", [(), ("--no-key",), ("--api-key", "x")])
def test_serving_everybody_without_a_key_is_said_loudly(more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_API_KEY", raising=False)
    monkeypatch.setattr("stoker.server.lifecycle.run.serve", lambda *arguments, **options: None)
    result = CliRunner().invoke(app, ["serve", "--model", "demo", "--host", "0.0.0.0", *more])
    assert result.exit_code == 0, result.output
    assert ("WARNING: there is no API key" in result.output) == (not more)


def test_options_of_the_command_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerConfig] = []
    monkeypatch.setattr("stoker.server.lifecycle.run.serve", lambda config, *_, **__: served.append(config))
    options = ["--cors-origin", "https://a.example", "--cors-origin", "https://b.example", "--any-model"]
    options += ["--allowed-host", "llm.example", "--served-model-name", "one", "--served-model-name", "two"]
    result = CliRunner().invoke(app, ["serve", "--model", "demo", *options])
    assert result.exit_code == 0, result.output
    (config,) = served
    assert config.cors_origins == ("https://a.example", "https://b.example")
    assert config.allowed_hosts == ("llm.example",)
    assert (config.any_model, config.names) == (True, ("one", "two"))


def test_any_model_name_is_answered_where_that_is_asked_for() -> None:
    ServedModel(EMBEDDED, ["x"], 8192, {}, any_name=True).check_name("claude-sonnet-5")
    with pytest.raises(ApiError, match="--any-model"):
        ServedModel(EMBEDDED, ["x"], 8192, {}).check_name("claude-sonnet-5")


def test_the_page_may_load_nothing_from_elsewhere(shared: Running) -> None:
    page = shared.get("/")
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    for name in ("/", "/page/app.js", "/page/page.css"):
        assert "http://" not in shared.get(name).text.replace("http://www.w3.org", "")
        assert "https://" not in shared.get(name).text


HOSTILE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.getcwd() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ range(10000000000) | list }}",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    return folder


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_chat_template_reads_nothing_and_runs_nothing(hostile: Path, template: str) -> None:
    (hostile / "chat_template.jinja").write_text(template + "{{ messages[0].content }}")
    model = ServedModel(hostile, ["x"], 8192, {})
    try:
        text = model.decode(model.render([{"role": "user", "content": "hello"}]))
    except ApiError as error:
        text = error.message if error.status == 400 else "not told"
    assert text == "hello" or text.startswith("The chat template cannot render")  # or what it asked for is not there
    for word in ("root:", "uid=", "<class", "<module"):
        assert word not in text


def test_text_of_a_request_is_never_run_as_a_template() -> None:
    model = ServedModel(EMBEDDED, ["x"], 8192, {})
    text = "{{ 7 * 7 }}{% raw %}"
    tool = Tool(function=Function(name="a", description=text, parameters={"x": text}))
    rendered = model.decode(model.render([{"role": "user", "content": text}], template_tools([tool])))
    assert text in rendered
    assert "49" not in rendered


def test_a_port_that_is_taken_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RequestError, match=rf"cannot listen on 127.0.0.1, port {port}: Address already in use"):
            listen("127.0.0.1", port)
    with pytest.raises(RequestError, match=r"cannot listen on no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 8000)


def test_settings_that_make_no_sense_are_refused() -> None:
    for given in (
        {"api_key": " "},
        {"users": 0},
        {"port": 70000},
        {"context": 1},
        {"kv_dtype": "int3"},
        {"draft": "x"},
        {"api_key": "x", "no_key": True},
        {"allowed_hosts": ("https://llm.example",)},
        {"allowed_hosts": ("llm.example:80",)},
        {"cors_origins": ("llm.example",)},
        {"cors_origins": ("https://llm.example/",)},
        {"sampling": {"temperature": -1}},
        {"sampling": {"top_k": 2.5}},
        {"sampling": {"top_p": True}},
        {"sampling": {"presence_penalty": 1.0}},
    ):
        with pytest.raises(RequestError):
            ServerConfig(EMBEDDED, ("x",), **given)
    assert ServerConfig(EMBEDDED, ("x",)).loopback
    assert not ServerConfig(EMBEDDED, ("x",), host="0.0.0.0").loopback
