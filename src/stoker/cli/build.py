"""`stoker build`: builds one checkpoint from several, or converts one to other formats."""

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.extras import need_engine
from stoker.cli.progress import byte_progress, error_console
from stoker.demo import EMBEDDED, NAME

QUANTIZE_HELP = (
    "Quantise a 16-bit base. int4, int4-g64, int4-g32: routed experts, attention, DeltaNet and dense MLP projections "
    "as INT4 in groups of 128, 64 or 32, rounded to nearest with the best clipping per group. hybrid, hybrid-g64, "
    "hybrid-g32: the same, with FP8 shared experts and an INT8 head. fp8: all of these projections and the shared "
    "experts as FP8 in 128x128 blocks. Routers, norms, embedding, vision and MTP stay in 16 bit."
)


def build(
    base: Annotated[str, typer.Option(help="The checkpoint directory everything else is taken from, or demo.")],
    out: Annotated[
        Path, typer.Option(help="The new directory. It grows as OUT.partial and is renamed when it is whole.")
    ],
    shared_experts: Annotated[
        str,
        typer.Option(help="FP8 shared experts: a directory or hf:REPO@REVISION, or fp8 to quantise the base's own."),
    ] = "",
    lm_head: Annotated[str, typer.Option(help="int8: the LM head with one scale per row.")] = "",
    mtp: Annotated[str, typer.Option(help="Take the MTP head from here: a directory or hf:REPO@REVISION.")] = "",
    drafter: Annotated[
        str, typer.Option(help="Add a DFlash drafter as OUT/drafter: a directory or hf:REPO@REVISION.")
    ] = "",
    quantize: Annotated[str, typer.Option(help=QUANTIZE_HELP)] = "",
    draft_weights: Annotated[
        str,
        typer.Option(
            help="int4, int4-g64 or int4-g32: the MTP head and the DFlash drafter in INT4 too, the MTP head's shared "
            "expert in FP8. Costs a little acceptance, never a token."
        ),
    ] = "",
    to: Annotated[str, typer.Option(help="bf16 or fp32: dequantise everything, for transformers and vLLM.")] = "",
    memory: Annotated[str, typer.Option(help="Upper bound of resident memory, the Python runtime included.")] = "1GiB",
    shard_size: Annotated[
        str, typer.Option(help="Largest output file. After a kill the unfinished file is begun again.")
    ] = "4GiB",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if an earlier build made it.")] = False,
) -> None:
    """Make the fast checkpoint from published ones, or quantise or export one.

    Run the same command again after an interruption: it goes on where it stopped, and the result is the same to the
    byte. OUT/stoker.json records sources, rules and the sha256 of every file.
    """
    need_engine()
    from stoker.checkpoint.build import BuildOptions
    from stoker.checkpoint.build import build as run
    from stoker.checkpoint.build.options import parse_bytes, show_bytes

    shard_bytes = parse_bytes(shard_size, "--shard-size")
    base, shared_experts, mtp = (str(EMBEDDED) if at == NAME else at for at in (base, shared_experts, mtp))
    drafter = str(EMBEDDED / "drafter") if drafter == NAME else drafter
    options = BuildOptions(base, shared_experts, lm_head, mtp, drafter, quantize, to, shard_bytes, draft_weights)
    console = error_console()
    with byte_progress(console) as bar:
        tasks: dict[str, int] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:  # the work of an earlier run does not count towards the speed
                tasks[phase] = bar.add_task(phase, total=total, completed=done)
            bar.update(tasks[phase], completed=done, total=total)  # type: ignore[arg-type]

        report = run(
            options,
            out,
            memory=parse_bytes(memory, "--memory"),
            force=force,
            say=lambda line: console.print(line, markup=False, soft_wrap=True),
            progress=show,
        )
    size = sum(file["bytes"] for file in report.files.values())
    typer.echo(f"{out}: {len(report.files)} files, {show_bytes(size)}; sources, rules and hashes are in stoker.json")
