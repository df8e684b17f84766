"""The arithmetic of a plan, line by line, so that nobody has to believe it."""

from collections.abc import Iterator

from stoker.plan.answer import Answer
from stoker.plan.catalog import GIB
from stoker.plan.speed import AS, Speed, box_name, fitted


def explain(answer: Answer) -> Iterator[str]:
    yield from _memory(answer)
    if answer.budget.pool:
        yield from _pool(answer)
    yield from _speed(answer)
    yield from _first_token(answer)


def _memory(answer: Answer) -> Iterator[str]:
    yield "Memory, in bytes:"
    for item in answer.budget.items:
        yield f"  {item.bytes:>18,}  {item.name} ({item.how})"
    yield f"  {answer.budget.total:>18,}  all of it"
    yield f"  {answer.budget.capacity:>18,}  {answer.box.name} shows ({answer.box.visible_gib:g} GiB)"
    yield f"  {answer.budget.free_bytes:>18,}  {'left' if answer.fits else 'missing'}"


def _pool(answer: Answer) -> Iterator[str]:
    pool, model, ask = answer.budget.pool, answer.model, answer.ask
    assert pool is not None
    yield ""
    yield "vLLM's KV pool:"
    if pool.recurrent_groups:
        state = pool.state_bytes // max(1, ask.draft.verified) // max(1, model.layer_types.count("linear_attention"))
        yield f"  a recurrent layer's state with its convolution is {state:,} bytes"
    yield (
        f"  an attention block is {pool.block_tokens:,} tokens: the least multiple of 16 whose page holds it, "
        f"{pool.page_bytes:,} bytes"
    )
    yield (
        f"  {pool.groups} groups of {pool.layers_per_group} layers: {pool.attention_groups} of attention, "
        f"{pool.recurrent_groups} recurrent"
    )
    yield f"  {pool.bytes / GIB:.2f} GiB / ({pool.layers_per_group} x {pool.page_bytes:,}) = {pool.blocks:,} blocks"
    yield f"  {pool.blocks:,} // {pool.groups} x {pool.block_tokens:,} = {pool.tokens:,} tokens, as vLLM counts them"
    yield (
        f"  a request of {pool.context:,} tokens takes {pool.blocks_per_request} blocks: "
        f"{pool.concurrency:.2f} of them at a time"
    )
    yield (
        f"  by bytes alone the pool would hold {pool.tokens_by_bytes:,} tokens of one sequence, or "
        f"{pool.concurrency_by_bytes:.2f} requests of that length"
    )


def _speed(answer: Answer) -> Iterator[str]:
    speed, box = answer.speed, answer.box
    yield ""
    yield f"A step of {answer.ask.draft.verified} tokens x {speed.users} users reads, in GB:"
    yield from _reads(speed)
    yield f"  {speed.reads.total / 1e9:>8.3f}  all of it"
    if answer.model.experts:
        yield (
            f"  {speed.reads.distinct_experts:.1f} of {answer.model.experts} experts per layer are touched "
            f"({answer.model.top_k} by one token)"
        )
    fit = fitted()
    engine = AS.get(answer.ask.engine, answer.ask.engine)
    yield ""
    paper = speed.reads.total / speed.limit_step_s / 1e9  # of all devices that read at the same time
    sure = fit.deviation(box_name(box), f"format:{engine}:plain")
    yield (
        f"  bandwidth {paper:g} GB/s on paper x {speed.efficiency:.3f} ± {speed.efficiency * sure:.3f} (fitted) = "
        f"{paper * speed.efficiency:.1f} GB/s"
    )
    layer, doubt = 1e3 * fit.layer_seconds(box, engine), fit.deviation(f"layer:{engine}")
    yield f"  {layer:.3f} ± {layer * doubt:.3f} ms per layer are no reading (fitted to {engine})"
    for name, seconds in speed.terms.items():
        yield f"  {1e3 * seconds:>8.2f} ms  {name}"
    yield f"  {1e3 * speed.step_s:>8.2f} ms  a step"
    assumed = ", acceptance assumed" if answer.acceptance.assumed else ""
    yield (
        f"  {speed.users} x {speed.accepted:.2f} tokens per step ({answer.acceptance.said_by}{assumed}) / "
        f"{1e3 * speed.step_s:.2f} ms = {speed.users * speed.accepted / speed.step_s:.1f} tok/s"
    )
    if speed.answer:
        yield (
            f"  with {speed.prompts_s:.1f} s of prompts for every answer of {speed.answer} tokens each: "
            f"{speed.uncorrected:.1f} tok/s"
        )
    yield (
        f"  x {speed.factor:.3f} for what measured runs like it had more or less than predicted = "
        f"≈ {speed.tokens_per_s:.1f} tok/s predicted, {speed.low:.1f} to {speed.high:.1f}: four rows in five of "
        "sources never seen, and every grade-A row of the recipe"
    )
    yield (
        f"  limit: {speed.users} x {speed.accepted:.2f} / ({speed.reads.total / 1e9:.3f} GB / {paper:g} GB/s) = "
        f"{speed.limit:.1f} tok/s"
    )


def _reads(speed: Speed) -> Iterator[str]:
    for name, size in {**speed.reads.items, **speed.reads.draft_items}.items():
        yield f"  {size / 1e9:>8.3f}  {name}"


def _first_token(answer: Answer) -> Iterator[str]:
    yield ""
    yield f"Prompts of {answer.ask.context:,} tokens: ≈ {answer.prefill:,.0f} tok/s predicted. First token, cold:"
    for prompt, seconds in answer.first_token.items():
        yield f"  {prompt:>8,} tokens  ≈ {seconds:.2f} s predicted"
