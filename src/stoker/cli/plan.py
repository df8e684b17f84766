"""`stoker plan`: does this model fit this box, how fast will it be, and who measured that."""

import json
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.counts import tokens
from stoker.cli.progress import check_writable, write_result

if TYPE_CHECKING:
    from stoker.plan.answer import Question


def plan(
    model: Annotated[
        str, typer.Argument(help="A model (122b, gpt-oss-120b, ...), a checkpoint, a config.json, a hub id, or demo.")
    ],
    box: Annotated[
        str, typer.Option("--box", help="spark, '2x spark', strix-halo, 5090, ..., this, or mem=128GB,bw=273GB/s.")
    ] = "this",
    context: Annotated[str | None, typer.Option("--context", help="Tokens per request, as 131072 or 128k.")] = None,
    users: Annotated[int, typer.Option("--users", help="Requests at a time.")] = 1,
    weights: Annotated[
        str | None, typer.Option("--weights", help="bf16, fp8, int4, int4+fp8+int8head, nvfp4, q4, mxfp4, ...")
    ] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="none, mtp:K, dflash:K or lookup:K.")] = None,
    accept_length: Annotated[
        float | None, typer.Option("--accept-length", help="Tokens a step brings, if you measured it.")
    ] = None,
    workload: Annotated[
        str, typer.Option("--workload", help="general, prose, code, agent, chat, json, ...")
    ] = "general",
    engine: Annotated[str | None, typer.Option("--engine", help="vLLM, llama.cpp, SGLang or stoker.")] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="KV cache in bf16 or fp8.")] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="A named recipe: hybrid-mtp2, hybrid-dflash12, ...")
    ] = None,
    utilization: Annotated[
        float | None,
        typer.Option(
            "--utilization", help="vLLM's --gpu-memory-utilization; if not given, what is safe or else what is needed."
        ),
    ] = None,
    prefix_cache: Annotated[float, typer.Option("--prefix-cache", help="GiB set aside for cached prefixes.")] = 0.0,
    fresh: Annotated[
        str | None,
        typer.Option(
            "--new-tokens",
            help="Of several users' prompts: how much of each is not cached; a turn of ~2K if not given.",
        ),
    ] = None,
    boxes: Annotated[
        bool, typer.Option("--boxes", help="Compare all known boxes for this model, with evidence and prices.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print sources, advice and the arithmetic line by line.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with memory bar and speed chart.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Does it fit, how fast, says who. Speeds are predictions, beside their physical limit and published ones."""
    from stoker.plan.answer import Question, answer
    from stoker.report.plan_text import everything, screen

    check_writable(html)
    question = Question(
            model=model, box=box, context=tokens(context) if context else None, users=users, weights=weights,
            draft=draft, accept_length=accept_length, workload=workload, engine=engine, kv=kv, recipe=recipe,
            utilization=share(utilization), prefix_cache_gib=prefix_cache,
            fresh=tokens(fresh, "--new-tokens") if fresh else None,
    )  # fmt: skip
    if boxes:
        _boxes(question, as_json)
        return
    found = answer(question)
    if html:
        from stoker.report.plan import page

        write_result(html, page(found))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    width = get_terminal_size((100, 40)).columns
    lines = screen(found, width) + (everything(found, width) if explain else [])
    print("\n".join(lines))
    if html:
        print(f"\nWrote {html}.")


def share(utilization: float | None) -> float | None:
    from stoker.errors import RequestError

    if utilization is not None and not 0.05 <= utilization <= 1.0:
        raise RequestError(f"--utilization {utilization:g} is no share of the memory; give 0.05 to 1.")
    return utilization


def _boxes(question: "Question", as_json: bool) -> None:
    """Which box: one line for each."""
    from stoker.plan.which_box import which_box
    from stoker.report.which_box import table

    lines = which_box(question)
    if as_json:
        document = {"model": lines[0].answer.model.name, "rows": [line.to_json() for line in lines]}
        typer.echo(json.dumps(document, indent=2))
        return
    print("\n".join(table(lines, get_terminal_size((100, 40)).columns)))
