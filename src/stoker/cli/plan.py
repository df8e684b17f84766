"""`stoker plan`: does this model fit this box, how fast will it be, and who measured that."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.counts import tokens
from stoker.cli.progress import check_writable, output_console, write_result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stoker.plan.answer import Answer

GIB = 1 << 30
MARKS = {"good": "[green]✓[/]", "degraded": "[yellow]![/]", "not suitable": "[red]✗[/]"}


def plan(
    model: Annotated[
        str, typer.Argument(help="A model (122b, gpt-oss-120b, ...), a checkpoint, a config.json, or demo.")
    ],
    box: Annotated[
        str, typer.Option("--box", help="spark, 2xspark, strix-halo, rtx-5090, h200, ..., or this.")
    ] = "this",
    context: Annotated[str | None, typer.Option("--context", help="Tokens per request, as 131072 or 128k.")] = None,
    users: Annotated[int, typer.Option("--users", help="Requests at a time.")] = 1,
    weights: Annotated[
        str | None, typer.Option("--weights", help="bf16, fp8, int4, int4+fp8+int8head, nvfp4, ...")
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
    explain: Annotated[bool, typer.Option("--explain", help="Print the arithmetic line by line.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with memory bar and speed chart.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Does it fit, how fast, says who. Speeds are predictions, beside their physical limit and published ones."""
    from stoker.plan.answer import Question, answer

    check_writable(html)
    found = answer(
        Question(
            model=model, box=box, context=tokens(context) if context else None, users=users, weights=weights,
            draft=draft, accept_length=accept_length, workload=workload, engine=engine, kv=kv, recipe=recipe,
            utilization=share(utilization), prefix_cache_gib=prefix_cache,
        )
    )  # fmt: skip
    if html:
        from stoker.report.plan import page

        write_result(html, page(found))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    console = output_console()
    _print(found, console, everything=explain)
    if explain:
        from stoker.plan.explain import explain as lines

        console.print()
        for line in lines(found):
            console.print(line, markup=False, soft_wrap=True)
    if html:
        console.print(f"\nWrote {html}.", markup=False)


def share(utilization: float | None) -> float | None:
    from stoker.errors import RequestError

    if utilization is not None and not 0.05 <= utilization <= 1.0:
        raise RequestError(f"--utilization {utilization:g} is no share of the memory; give 0.05 to 1.")
    return utilization


def _print(found: "Answer", console: "Console", everything: bool) -> None:
    """What was asked comes first: does it fit, how fast, says who."""
    ask, free = found.ask, found.budget.free_bytes
    console.print(f"{found.model.name} on {found.box.name}", style="bold", markup=False)
    asked = f"drafts: {ask.draft}; {ask.engine}; {ask.users} x {ask.context:,} tokens, KV {ask.kv}"
    console.print(f"{found.weights.title}; {asked}\n", markup=False)
    if found.fits:
        console.print(
            f"[bold green]Fits, {free / GIB:.1f} GiB left.[/] At most {found.budget.max_context:,} tokens for "
            f"{ask.users} at a time, or {found.budget.max_users:,} of {ask.context:,} tokens."
        )
    else:
        console.print(f"Does not fit: {-free:,} bytes ({-free / GIB:.1f} GiB) are missing.", style="bold red")
    _print_speed(found, console)
    _print_evidence(found, console)
    console.print(_memory_table(found))
    if found.fits and (pool := found.budget.pool):
        console.print(
            f"vLLM would count {pool.tokens:,} tokens and {pool.concurrency:.2f} such requests in {pool.blocks:,} "
            f"blocks (pages shared by {pool.groups} groups of layers; by bytes alone {pool.concurrency_by_bytes:.2f}). "
            "Its flags:"
        )
        console.print("  " + " ".join(found.budget.flags), style="dim", markup=False, soft_wrap=True)
        console.print()
    _print_compat(found, console, everything)
    for line in found.advice:
        console.print(f"[cyan]→[/] {_escape(line.text)} [dim]({_escape(line.because)})[/]")
    if found.verdicts:
        console.print()
        for verdict in found.verdicts:
            console.print(
                f"{MARKS[verdict.grade]} {verdict.use}: {verdict.grade} [dim]({verdict.because}, predicted)[/]"
            )


def _memory_table(found: "Answer") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory", no_wrap=True)
    table.add_column("GiB", justify="right")
    table.add_column("of the box", justify="right")
    table.add_column("")
    for item in found.budget.items:
        of = item.bytes / found.budget.capacity
        shown = item.how if not item.name.startswith("graphs") else ""
        table.add_row(item.name, f"{item.bytes / GIB:.2f}", f"{of:.1%}", f"[dim]{_escape(shown)}[/]")
    table.add_section()
    total, capacity = found.budget.total, found.budget.capacity
    table.add_row("total", f"{total / GIB:.2f}", f"{total / capacity:.1%}", "", style="bold")
    return table


def _print_speed(found: "Answer", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    from stoker.plan.answer import SHORT

    speed, ask = found.speed, found.ask
    each = f", {speed.per_user:.1f} each" if ask.users > 1 else ""
    assumed = ", acceptance assumed" if found.acceptance.assumed else ""
    console.print(
        f"{'' if found.fits else 'If it did: '}[bold]≈ {speed.tokens_per_s:.1f} tok/s predicted[/] "
        f"({speed.low:.1f} to {speed.high:.1f}{each}) on "
        f"{found.question.workload} text at {ask.context:,} tokens of context, ≈ {found.short.tokens_per_s:.1f} at "
        f"{min(SHORT, ask.context)}; physical limit {speed.limit:.1f}."
    )
    if ask.draft.drafting:
        said = f"{found.acceptance.tokens_per_step:.2f} tokens per step ({found.acceptance.said_by}{assumed})."
        console.print(said, style="dim", markup=False)
    if ask.engine == "stoker":
        console.print(
            "Stoker's engine has not been measured on this box: its steps are assumed to cost what vLLM's do."
        )
    first = ", ".join(f"{n:,} tokens {s:.1f} s" for n, s in found.first_token.items())
    console.print(f"First token of a cold prompt, predicted: {first}.")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("drafts", "general tok/s", "agent tok/s", "limit (agent)"):
        table.add_column(name, justify="left" if name == "drafts" else "right")
    for line in found.compared:
        planned = line.draft == ask.draft
        table.add_row(
            f"{line.draft}{' (planned)' if planned else ''}", f"≈ {line.general.tokens_per_s:.1f}",
            f"≈ {line.agent.tokens_per_s:.1f}", f"{line.agent.limit:.0f}", style="bold" if planned else "",
        )  # fmt: skip
    console.print(table)


def _print_evidence(found: "Answer", console: "Console") -> None:
    from stoker.cli.evidence import evidence_table, print_links

    if found.evidence:
        console.print(evidence_table(found.evidence, "nearest measurements"))
        print_links(found.evidence, console)
    else:
        console.print("Nobody published a measurement of this model that we know of.\n")


def _print_compat(found: "Answer", console: "Console", everything: bool) -> None:
    """What works is shown only where everything is; what does not, or is disputed, always."""
    shown = [finding for finding in found.compat if everything or finding.verdict != "works"]
    for finding in shown:
        colour = {"works": "green", "conflicting": "yellow", "does not work": "red"}[finding.verdict]
        latest = finding.standing[0] if finding.standing else finding.rules[0]
        if finding.conflicting:
            console.print(f"[{colour}]{finding.topic}: conflicting[/]")
            for rule in finding.standing:
                said = "works" if rule.works else "does not"
                console.print(
                    f"  {said}: {_escape(rule.statement)} [dim]({rule.engine}, {rule.date}, {rule.source})[/]"
                )
        else:
            console.print(
                f"[{colour}]{finding.topic}: {finding.verdict}[/] – {_escape(latest.statement)} "
                f"[dim]({latest.engine}, {latest.date}, {latest.source})[/]"
            )
    if shown:
        console.print()


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
