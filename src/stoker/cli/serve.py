"""`stoker serve`: the model behind OpenAI's and Anthropic's APIs."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.counts import context as count_context
from stoker.cli.extras import DEVICES, need_server
from stoker.cli.progress import error_console
from stoker.demo import checkpoint_at
from stoker.errors import RequestError
from stoker.speculate.choice import FORMS

if TYPE_CHECKING:
    from rich.table import Table

    from stoker.server.lifecycle.plan import Plan


def serve(
    model: Annotated[str, typer.Option(help="A checkpoint directory, or demo: the embedded model.")],
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 listens on every interface.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="STOKER_API_KEY", help="Require this key in requests; /health stays open.")
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Serve other machines without a key on purpose: no warning.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A further host name for requests, such as that of a proxy; may be given several times."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="The origin of a web page that may use the server, such as https://chat.example; * is any."),
    ] = None,
    draft: Annotated[str, typer.Option(help=f"{FORMS}. Changes the speed, never the text.")] = "auto",
    context: Annotated[
        int | None,
        typer.Option(
            parser=count_context,
            metavar="TOKENS",
            help="Most tokens of one request, including the answer, as 131072 or 128k; by default the model's.",
        ),
    ] = None,
    users: Annotated[int, typer.Option(help="Requests computed at the same time.")] = 8,
    kv_dtype: Annotated[str | None, typer.Option(help="How keys and values are stored: bf16, fp32 or fp8.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A model name that clients may use; may be given several times.")
    ] = None,
    any_model: Annotated[bool, typer.Option("--any-model", help="Accept any model name in requests.")] = False,
    default_chat_template_kwargs: Annotated[
        str, typer.Option(help='Options of the chat template as JSON, such as {"enable_thinking": false}.')
    ] = "{}",
    default_sampling: Annotated[
        str,
        typer.Option(help='Sampling that requests leave open, as JSON: {"temperature": 0.6, "top_p": 0.95}.'),
    ] = "{}",
    prompt_pause: Annotated[
        float,
        typer.Option(
            help="Seconds that other prompts may hold up a running answer; longer ones are computed in pieces."
        ),
    ] = 0.2,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more get 429.")] = 64,
    max_body: Annotated[int, typer.Option(help="Bytes of the largest request.")] = 16 << 20,
    max_messages: Annotated[int, typer.Option(help="Messages of the longest conversation.")] = 4096,
    request_timeout: Annotated[float, typer.Option(help="Seconds after which a request is ended.")] = 3600.0,
    body_timeout: Annotated[
        float, typer.Option(help="Seconds for a request's header to arrive, and for its body.")
    ] = 30.0,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds that an answer waits for a client that does not read.")
    ] = 30.0,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds after which an unresponsive engine is restarted.")
    ] = 120.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests have to finish after SIGTERM.")] = 30.0,
    memory: Annotated[
        float | None, typer.Option(help="GiB for weights and caches; by default all that is available.")
    ] = None,
    reserve: Annotated[float | None, typer.Option(help="GiB to leave free for the system.")] = None,
    prefix_cache: Annotated[
        float | None, typer.Option(help="GiB of recurrent states kept for repeated prompts.")
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    assume_acceptance: Annotated[
        float | None,
        typer.Option(
            help="For measuring: accept drafts unseen, so that a step emits this many tokens on average. The text is "
            "then not the model's."
        ),
    ] = None,
    self_test: Annotated[bool, typer.Option(help="Test the model and the drafter before serving.")] = True,
) -> None:
    """Serve a model over HTTP, with a chat page at /."""
    need_server()
    from stoker.backends.device import choose_device
    from stoker.engine.worker.heap import collection_paused
    from stoker.engine.worker.process import PreparedProcess
    from stoker.server.config import ServerConfig
    from stoker.server.lifecycle.memory_guard import read_memory
    from stoker.server.lifecycle.plan import plan_engine
    from stoker.server.lifecycle.run import serve as run

    directory = checkpoint_at(model)
    chosen = choose_device(device)
    config = ServerConfig(
        directory=directory,
        names=tuple(served_model_name or (_name(model),)),
        host=host,
        port=port,
        api_key=api_key,
        no_key=no_key,
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        any_model=any_model,
        draft=draft,
        context=context,
        users=users,
        kv_dtype=kv_dtype,
        device=chosen.device,
        memory=_bytes(memory),
        reserve=_bytes(reserve),
        prefix_cache=_bytes(prefix_cache),
        prompt_pause=prompt_pause,
        queue=queue,
        max_body=max_body,
        max_messages=max_messages,
        request_timeout=request_timeout,
        body_timeout=body_timeout,
        stall_timeout=stall_timeout,
        step_timeout=step_timeout,
        drain_timeout=drain_timeout,
        template_options=_object("--default-chat-template-kwargs", default_chat_template_kwargs),
        sampling=_object("--default-sampling", default_sampling),
        assume_acceptance=assume_acceptance,
        self_test=self_test,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    console = error_console()
    console.print(chosen.said, markup=False)
    reading = read_memory(config.device)
    prepared = PreparedProcess()  # it imports while this process plans
    with collection_paused():
        plan = plan_engine(config, reading)
    console.print(f"{config.names[0]} · {plan.context:,} tokens of context · {users} at a time · draft {draft}")
    console.print(_table(plan))
    if assume_acceptance is not None:
        warning = (
            f"WARNING: acceptance assumed. Drafts are accepted unseen, {assume_acceptance:g} tokens a step on average: "
            "the text is not the model's, and speeds hold for this acceptance alone."
        )
        logging.getLogger("stoker.server").warning("%s", warning.removeprefix("WARNING: "))
        console.print(warning, style="bold red", highlight=False)
    if config.open_to_all and not no_key:
        console.print(
            f"WARNING: there is no API key, and --host {host} lets every machine that reaches this one use the model. "
            "Set STOKER_API_KEY, or pass --no-key if that is intended.",
            style="bold red",
            highlight=False,
        )
    run(
        config,
        plan,
        announce=lambda address: console.print(f"listening on {address}", highlight=False),
        prepared=prepared,
    )


def _table(plan: "Plan") -> "Table":
    """Where the memory goes, planned."""
    from rich.box import SIMPLE
    from rich.table import Table

    from stoker.sizes.memory import size

    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("memory, planned", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    for item in plan.items:
        table.add_row(item.name, size(item.bytes), f"[dim]{item.how}[/]")
    table.add_section()
    table.add_row("planned in all", size(plan.total))
    table.add_row(
        "available now", size(plan.reading.available), "" if plan.reading.host is None else "[dim]on the card[/]"
    )
    table.add_row("kept free for the system", size(plan.reserve))
    if plan.reading.host is not None:
        table.add_row("available to the host now", size(plan.reading.host.available))
    return table


def _name(model: str) -> str:
    return Path(model).name if Path(model).is_dir() else model


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * (1 << 30))


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{option} is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise RequestError(f"{option} is {text}, expected a JSON object.")
    return found
