"""Who may come in, by which door, and what a hostile template, schema or page can do: nothing."""

import base64
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from stoker.demo import EMBEDDED
from stoker.errors import RequestError
from stoker.server.config import ServerConfig
from stoker.server.conversation import template_tools
from stoker.server.errors import ApiError
from stoker.server.protocol.chat import Function, Tool
from stoker.server.run import listen
from stoker.server.served import ServedModel
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
    ("GET", "/page/page.js"),
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


def test_the_page_may_load_nothing_from_elsewhere(shared: Running) -> None:
    page = shared.get("/")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in ("/", "/page/page.js", "/page/page.css"):
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
    ):
        with pytest.raises(RequestError):
            ServerConfig(EMBEDDED, ("x",), **given)
    assert ServerConfig(EMBEDDED, ("x",)).loopback
    assert not ServerConfig(EMBEDDED, ("x",), host="0.0.0.0").loopback
