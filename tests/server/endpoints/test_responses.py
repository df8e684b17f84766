"""OpenAI's responses as agents use them: tools that are no functions, past items, references to them, odd values."""

import json
from typing import Any

import httpx2 as httpx
import pytest

from stoker.server.endpoints.responses import KeptItems
from stoker.server.errors import ApiError
from stoker.server.output.custom import CustomCalls, CustomInput
from stoker.server.output.pieces import CallArguments, CallStart, Content, Piece
from stoker.server.prepare.responses import chat_request
from stoker.server.schemas.chat import AllowedToolsChoice, ChatRequest, NamedTool
from stoker.server.schemas.responses import ResponsesRequest
from tests.server.running import NO_THINK, PATIENCE_S, Running

GRAMMAR: dict[str, Any] = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": GRAMMAR}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {"type": "function", "name": "find", "parameters": {"type": "object"}, "defer_loading": True},
        {"type": "function", "name": "list", "parameters": {"type": "object"}},
        {"type": "mcp", "server_label": "x"},
    ],
}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "local_shell"},
    {"type": "mcp", "server_label": "files", "server_url": "http://127.0.0.1:1"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "odd\r\nx-evil: 1"},
]
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def chat(**body: Any) -> ChatRequest:
    return chat_request(ResponsesRequest.model_validate({"input": "hi", **body}), lambda name: None)


def body(**more: Any) -> dict[str, Any]:
    return {"input": "Say hi.", "max_output_tokens": 8, "temperature": 0, "chat_template_kwargs": NO_THINK, **more}


def ask(server: Running, **more: Any) -> httpx.Response:
    return server.post("/v1/responses", body(**more))


# -- what a request means


def test_functions_in_namespaces_and_custom_tools_are_offered_and_the_rest_is_named() -> None:
    found = chat(tools=[*HOSTED, CUSTOM, NAMESPACE, {"type": "function", "name": "look", "parameters": {}}])
    assert found.tools is not None
    assert [tool.function.name for tool in found.tools] == ["apply_patch", "crm.find", "crm.list", "look"]
    patch, first, second, _ = (tool.function for tool in found.tools)
    assert patch.parameters is not None
    assert patch.parameters["properties"]["input"]["type"] == "string"
    assert patch.description is not None
    assert "Edit files." in patch.description
    assert GRAMMAR["definition"] in patch.description
    assert "Customers." in (first.description or "")
    assert second.description is None
    assert found.custom_tools == {"apply_patch"}
    assert found.omitted == [*(f"tool:{tool['type']}" for tool in HOSTED), "tool:mcp"]


def test_tool_choice_names_tools_of_any_kind() -> None:
    tools = [CUSTOM, NAMESPACE, *HOSTED]
    for choice, name in [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "find", "namespace": "crm"}, "crm.find"),
        ({"type": "function", "name": "list"}, "crm.list"),
    ]:
        wanted = chat(tools=tools, tool_choice=choice).tool_choice
        assert isinstance(wanted, NamedTool)
        assert wanted.function.name == name
    left_out = chat(tools=tools, tool_choice={"type": "web_search"})
    assert left_out.tool_choice == "auto"
    assert "tool_choice:web_search" in left_out.omitted
    entries = [{"type": "custom", "name": "apply_patch"}, {"type": "namespace", "name": "crm"}, {"type": "mcp"}]
    found = chat(tools=tools, tool_choice={"type": "allowed_tools", "mode": "required", "tools": entries}).tool_choice
    assert isinstance(found, AllowedToolsChoice)
    assert [tool.function.name for tool in found.allowed_tools.tools] == ["apply_patch", "crm.find", "crm.list"]
    assert found.allowed_tools.mode == "required"


def test_in_chat_too_a_tool_that_was_left_out_cannot_be_chosen_and_costs_no_turn() -> None:
    def said(choice: Any) -> ChatRequest:
        return ChatRequest.model_validate({"messages": [], "tools": [hosted, look], "tool_choice": choice})

    hosted, look = {"type": "web_search"}, {"type": "function", "function": {"name": "look"}}
    found = said(hosted)
    assert (found.tool_choice, found.omitted) == ("auto", ["tool:web_search", "tool_choice:web_search"])
    found = said({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [hosted, look]}})
    assert isinstance(found.tool_choice, AllowedToolsChoice)
    assert [tool.function.name for tool in found.tool_choice.allowed_tools.tools] == ["look"]
    assert found.omitted == ["tool:web_search", "tool_choice:web_search"]
    assert said(look).omitted == ["tool:web_search"]


def test_past_calls_of_every_kind_are_read() -> None:
    found = chat(
        input=[
            {"role": "user", "content": "Do it."},
            {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin\n"},
            {"type": "function_call", "call_id": "2", "name": "find", "namespace": "crm", "arguments": "{}"},
            {"type": "local_shell_call", "call_id": "3", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "Ann"}]},
            {"type": "local_shell_call_output", "id": "3", "output": '{"stdout": "a"}'},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "mcp_list_tools", "server_label": "files", "tools": []},
        ]
    )
    calls = [call.function for call in found.messages[1].tool_calls or []]
    assert [(call.name, json.loads(str(call.arguments))) for call in calls] == [
        ("apply_patch", {"input": "*** Begin\n"}),
        ("crm.find", {}),
        ("local_shell", {"type": "exec", "command": ["ls"]}),
    ]
    assert [message.content for message in found.messages[2:]] == ["done", "Ann", '{"stdout": "a"}']
    assert found.omitted == ["item:web_search_call", "item:mcp_list_tools"]


def test_only_a_picture_in_the_newest_message_is_refused() -> None:
    """Clients send the whole conversation again, so an earlier picture would refuse every turn after it."""
    seen = {"role": "user", "content": [{"type": "input_text", "text": "see "}, PICTURE]}
    with pytest.raises(ApiError, match=r"Could not process image: input\[1\]\.content\[1\] ") as refused:
        chat(input=[{"role": "user", "content": "hi"}, seen, {"role": "developer", "content": "Be brief."}])
    assert refused.value.code == "invalid_image"
    call = {"type": "function_call", "name": "look", "call_id": "1", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": [PICTURE]}
    custom = {"type": "custom_tool_call_output", "call_id": "1", "output": [PICTURE, {"type": "input_file"}]}
    found = chat(input=[seen, call, output, custom])
    note = "[Could not process image: this model reads text only.]"
    texts = [message.content for message in found.messages if message.role != "assistant"]
    assert texts == [f"see {note}", note, f"{note}{note.replace('image', 'input_file')}"]
    assert found.omitted == ["image", "image", "image", "input_file"]


def test_the_text_of_a_custom_call_comes_out_whole_wherever_its_arguments_are_cut() -> None:
    text = 'a "b"\\\n\té😀{}'
    for arguments in (json.dumps({"input": text}), json.dumps({"input": text}, ensure_ascii=False)):
        for cut in range(len(arguments) + 1):
            found = CustomInput()
            told = found.push(arguments[:cut]) + found.push(arguments[cut:]) + found.finish()
            assert told == found.text == text
            broken = CustomInput()
            broken.push(arguments[:cut])
            broken.finish()
            assert cut < len('{"input": "') or text.startswith(broken.text)
    other = CustomCalls({"patch"})
    pieces: list[Piece] = [CallStart(0, "patch"), CallArguments(0, '{"te'), CallArguments(0, 'xt": 1}'), Content("x")]
    assert [*other.push(pieces), *other.finish()] == [
        CallStart(0, "patch"),
        CallArguments(0, '{"text": 1}'),
        Content("x"),
    ]


def test_old_items_make_room() -> None:
    kept = KeptItems(most=100)
    for place in range(20):
        kept.keep({"id": f"msg_{place}", "text": "x" * 10})
    assert kept.find("msg_0") is None
    assert kept.find("msg_19") == {"id": "msg_19", "text": "x" * 10}


# -- the server


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_that_cannot_be_offered_cost_no_turn(server: Running, streamed: bool) -> None:
    given = body(tools=[*HOSTED, NAMESPACE], stream=streamed, tool_choice="auto")
    with httpx.stream("POST", server.url + "/v1/responses", json=given, timeout=PATIENCE_S) as response:
        response.read()
    assert response.status_code == 200, response.text
    named = response.headers["x-stoker-omitted"]
    assert named.startswith("tool:web_search,tool:local_shell,tool:mcp,tool:file_search,")
    assert f"answered without {named}" in server.log
    assert ask(server, tools=HOSTED, tool_choice="required").status_code == 200
    told = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "web_search"}], "max_tokens": 2},
    )
    assert (told.status_code, told.headers["x-stoker-omitted"]) == (200, "tool:web_search")


def test_a_custom_tool_is_called_with_text(server: Running) -> None:
    given = body(tools=[CUSTOM, NAMESPACE], max_output_tokens=60, tool_choice={"type": "custom", "name": "apply_patch"})
    whole = server.post("/v1/responses", given).json()
    (call,) = whole["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
    assert call["input"]
    assert not call["input"].startswith("{")
    events = list(server.stream("/v1/responses", given))
    told = "".join(event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta")
    (done,) = (event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert told == done == call["input"]
    (item,) = events[-1]["response"]["output"]
    assert item["type"] == "custom_tool_call"
    assert not [event for event in events if "function_call_arguments" in event["type"]]
    again = [{"role": "user", "content": "go"}, item]
    again.append({"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"})
    assert ask(server, input=again, tools=[CUSTOM]).status_code == 200


def test_a_function_of_a_namespace_is_called_by_both_names(server: Running) -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "list"}]}
    found = ask(server, tools=[NAMESPACE, CUSTOM], tool_choice=choice, max_output_tokens=60, parallel_tool_calls=False)
    (call,) = found.json()["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "list", "crm")


def test_a_custom_tool_in_chat(server: Running) -> None:
    tool = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edit.", "format": {"type": "text"}}}
    question = {"role": "user", "content": "Edit."}
    given = {"messages": [question], "tools": [tool], "max_tokens": 60, "temperature": 0}
    given |= {"tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}}, "chat_template_kwargs": NO_THINK}
    message = server.post("/v1/chat/completions", given).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "apply_patch")
    assert call["custom"]["input"]
    told = [
        piece
        for chunk in server.stream("/v1/chat/completions", given)
        for choice in chunk["choices"]
        for piece in choice["delta"].get("tool_calls", [])
    ]
    assert told[0]["type"] == "custom"
    assert "".join(piece["custom"]["input"] for piece in told) == call["custom"]["input"]
    answered = [question, message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    after = server.post("/v1/chat/completions", {"messages": answered, "tools": [tool], "max_tokens": 4})
    assert after.status_code == 200, after.text


def test_items_of_past_answers_can_be_referred_to(server: Running) -> None:
    question = {"role": "user", "content": "Say hi."}
    first = ask(server, input=[question]).json()["output"]
    by_id = [{"type": "item_reference", "id": item["id"]} for item in first]
    more = [{"role": "user", "content": "And?"}]
    referred = ask(server, input=[question, *by_id, *more])
    assert referred.status_code == 200, referred.text
    given = ask(server, input=[question, *first, *more]).json()
    assert referred.json()["output"][0]["content"] == given["output"][0]["content"]
    assert referred.json()["usage"]["input_tokens"] == given["usage"]["input_tokens"]
    unkept = ask(server, input=[question], store=False).json()["output"][0]["id"]
    for name in ("msg_none", unkept):
        refused = ask(server, input=[question, {"type": "item_reference", "id": name}])
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input[1]")
        assert f"Item with id '{name}' not found" in refused.text


def test_sampling_is_as_in_chat(server: Running) -> None:
    usage = ask(server, ignore_eos=True, max_output_tokens=400).json()["usage"]
    assert usage["output_tokens"] == 400
    text = ask(server, max_output_tokens=40).json()["output"][0]["content"][0]["text"]
    stopped = ask(server, max_output_tokens=40, stop=[text[2:5]]).json()
    assert stopped["output"][0]["content"][0]["text"] == text[: text.index(text[2:5])]
    for name in ("max_tokens", "messages", "response_format", "reasoning_effort"):
        refused = ask(server, **{name: 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert ask(server, n=2).status_code == 400


ODD = [
    '"metadata": {"a": NaN}',
    '"metadata": {"a": 1e999, "b": [-1e999]}',
    '"metadata": {"\\ud800": "\\udfff"}',
    '"reasoning": {"effort": "low", "summary": 1e999}',
    '"text": {"format": {"type": "text"}, "verbosity": "\\ud800"}',
    '"tool_choice": "\\ud800"',
    '"tools": [{"type": "\\ud800"}]',
    '"tools": [{"type": "function", "name": "x", "parameters": {"type": "object", "default": NaN}}]',
    '"tools": [{"type": "function", "name": "\\ud800", "parameters": {}}]',
    '"instructions": "\\ud800"',
    '"user": "\\ud800"',
    '"model": "\\ud800"',
    '"chat_template_kwargs": {"enable_thinking": NaN, "x": "\\ud800"}',
    '"metadata": ' + '{"a":' * 200 + "1" + "}" * 200,
    '"metadata": ' + '{"a":' * 900 + "1" + "}" * 900,
]


@pytest.mark.parametrize("field", ODD)
def test_odd_values_are_echoed_safely_or_refused(server: Running, field: str) -> None:
    head = '"max_tokens": 2, "max_output_tokens": 2'
    says = '"messages": [{"role": "user", "content": "hi"}]'
    for path, start in [
        ("/v1/responses", '"input": "hi", "max_output_tokens": 2'),
        ("/v1/responses", '"input": "hi", "max_output_tokens": 2, "stream": true'),
        ("/v1/chat/completions", f"{head}, {says}"),
        ("/v1/messages", f"{head}, {says}"),
        ("/v1/completions", f'{head}, "prompt": "hi"'),
        ("/tokenize", says),
    ]:
        sent = "{" + start + ", " + field + "}"
        headers = {"content-type": "application/json"}
        response = httpx.post(server.url + path, content=sent.encode(), headers=headers, timeout=PATIENCE_S)
        assert response.status_code in (200, 400, 404), (path, response.text)
        if "stream" not in start:
            json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        else:
            assert "response.failed" not in response.text


def test_values_of_the_wrong_kind_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"reasoning": {"effort": 5}},
        {"tool_choice": {"type": "allowed_tools"}},
        {"tool_choice": {"type": 5}},
        {"tool_choice": {"type": "function"}},
        {"tools": [{"type": "namespace", "name": "x", "tools": 5}]},
        {"input": [{"type": "custom_tool_call", "name": 5}]},
        {"input": [{"type": "item_reference"}]},
        {"input": [{"type": "unheard of"}]},
    ]
    for more in wrong:
        with pytest.raises(ApiError):
            chat(**more)
