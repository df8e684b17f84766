"""`stoker serve`: the model behind OpenAI's and Anthropic's APIs."""

import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.cli.extras import need_server
from stoker.demo import checkpoint_at
from stoker.errors import RequestError
from stoker.speculate.choice import FORMS


def serve(
    model: Annotated[str, typer.Option(help="A checkpoint directory, or demo: the embedded model.")],
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is all there are.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="STOKER_API_KEY", help="Answer only those who send it; /health stays open.")
    ] = None,
    draft: Annotated[str, typer.Option(help=f"{FORMS}. Changes the speed, never the text.")] = "auto",
    context: Annotated[int | None, typer.Option(help="Most tokens of one request, answer included.")] = None,
    users: Annotated[int, typer.Option(help="Requests computed at a time.")] = 8,
    kv_dtype: Annotated[str | None, typer.Option(help="How keys and values are stored: bf16, fp32 or fp8.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients may call the model; may be given several times.")
    ] = None,
    default_chat_template_kwargs: Annotated[
        str, typer.Option(help='Options of the chat template as JSON, such as {"enable_thinking": false}.')
    ] = "{}",
    queue: Annotated[int, typer.Option(help="Requests that may wait; more get 429.")] = 64,
    max_body: Annotated[int, typer.Option(help="Bytes of the largest request.")] = 16 << 20,
    max_messages: Annotated[int, typer.Option(help="Messages of the longest conversation.")] = 4096,
    request_timeout: Annotated[float, typer.Option(help="Seconds after which a request is ended.")] = 3600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests have to end after SIGTERM.")] = 30.0,
    self_test: Annotated[bool, typer.Option(help="Check model and drafter before answering.")] = True,
) -> None:
    """Serve a model over HTTP, with a chat page at /."""
    need_server()
    from stoker.server.config import ServerConfig
    from stoker.server.plan import plan_engine
    from stoker.server.run import serve as run

    directory = checkpoint_at(model)
    config = ServerConfig(
        directory=directory,
        names=tuple(served_model_name or (_name(model),)),
        host=host,
        port=port,
        api_key=api_key,
        draft=draft,
        context=context,
        users=users,
        kv_dtype=kv_dtype,
        queue=queue,
        max_body=max_body,
        max_messages=max_messages,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        template_options=_options(default_chat_template_kwargs),
        self_test=self_test,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    engine_config, longest = plan_engine(config)
    run(config, engine_config, longest, announce=lambda address: typer.echo(f"listening on {address}", err=True))


def _name(model: str) -> str:
    return Path(model).name if Path(model).is_dir() else model


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RequestError(f"--default-chat-template-kwargs is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise RequestError(f"--default-chat-template-kwargs is {text}, expected a JSON object.")
    return found
