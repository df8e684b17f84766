"""Memory: document 001's table and verdicts, what does not fit and by how much, and that more never takes less."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import RequestError
from stoker.plan.advice import verdicts
from stoker.plan.catalog import GIB, boxes, find_box, find_model, find_scheme, models, schemes
from stoker.plan.memory import Ask, Budget, budget, engines
from stoker.plan.vllm_pool import pool_of
from stoker.sizes.step import Draft
from stoker.sizes.weights import WeightBytes

NVFP4 = Ask(131_072, 4, Draft("mtp", 2), "fp8", "vLLM")


def planned(model: str, box: str, weights: str, ask: Ask, utilization: float | None = None) -> Budget:
    found = find_model(model)
    return budget(found, WeightBytes.of(found, find_scheme(weights)), find_box(box), ask, utilization)


def test_document_001s_pool_follows_from_pages_shared_by_groups() -> None:
    """595,584 tokens and 12.89 requests: both from the blocks of 4 groups of 13 layers, neither written anywhere."""
    plan = planned("122b", "spark", "nvfp4", NVFP4, 0.90)
    pool = plan.pool
    assert pool is not None
    assert (pool.block_tokens, pool.page_bytes, pool.layers_per_group, pool.groups) == (4224, 4_325_376, 13, 4)
    assert (pool.blocks, pool.blocks_per_request) == (567, 32 + 3 * 4)
    assert (pool.tokens, round(pool.concurrency, 2)) == (595_584, 12.89)
    assert plan.sum_of("weights") / GIB == pytest.approx(76.02, rel=0.003)
    assert plan.fits


def test_a_page_holds_a_state_with_its_widened_convolution() -> None:
    model = find_model("122b")
    depths = {d: pool_of(model, 1 << 35, context=1, depth=d, kv_item=1.0, mtp=True).block_tokens for d in (0, 2, 12)}
    assert depths == {0: 4176, 2: 4224, 12: 4464}  # 4 MiB and (3 + d) x 24,576 bytes, in blocks of 16 x 1,024


def test_bytes_alone_promise_more_than_vllm_serves() -> None:
    pool = planned("122b", "spark", "nvfp4", NVFP4, 0.90).pool
    assert pool is not None
    assert pool.tokens_by_bytes > 3 * pool.tokens
    assert pool.concurrency_by_bytes > pool.concurrency


def test_the_stated_30_33_gib_are_12_blocks_too_many() -> None:
    """Document 001 prints a pool of 30.33 GiB beside tokens and concurrency that both are 567 blocks, 29.69 GiB."""
    pool = pool_of(find_model("122b"), int(30.33 * GIB), context=131_072, depth=2, kv_item=1.0, mtp=True)
    assert (pool.blocks, pool.tokens) == (579, 608_256)


def test_a_model_of_one_kind_of_layer_has_one_group() -> None:
    pool = pool_of(find_model("30b"), 1 << 34, context=32_768, depth=0, kv_item=2.0, mtp=False)
    assert (pool.groups, pool.block_tokens, pool.layers_per_group) == (1, 16, 48)
    assert pool.tokens == pytest.approx(pool.tokens_by_bytes, rel=0.001)


def test_document_001s_verdicts() -> None:
    model = find_model("122b")
    found = verdicts(model, WeightBytes.of(model, find_scheme("nvfp4")), find_box("spark"), NVFP4)
    assert [v.grade for v in found] == ["good"] * 4 + ["degraded", "not suitable"]


@pytest.mark.parametrize(
    ("model", "box", "weights", "fits"),
    [
        ("122b", "spark", "bf16", False),
        ("122b", "spark", "int4", True),
        ("122b", "spark", "nvfp4", True),
        ("122b", "rtx-5090", "int4", False),
        ("122b", "rtx-pro-6000", "int4", True),
        ("397b", "spark", "int4", False),
        ("397b", "2xspark", "int4", True),
        ("235b", "spark", "gptq-int4", False),
        ("235b", "2xspark", "gptq-int4", True),
        ("gpt-oss-120b", "spark", "mxfp4", True),
    ],
)
def test_what_fits_where(model: str, box: str, weights: str, fits: bool) -> None:
    plan = planned(model, box, weights, Ask(8192, 1, Draft(), "bf16", "vLLM"))
    assert plan.fits == fits
    assert plan.free_bytes == plan.capacity - plan.total


def test_the_largest_context_and_users_are_the_largest() -> None:
    ask = Ask(131_072, 2, Draft("mtp", 2), "bf16", "vLLM")
    plan = planned("122b", "rtx-pro-6000", "int4", ask)
    assert 0 < plan.max_users < 4096
    over = Ask(ask.context, plan.max_users + 1, ask.draft, ask.kv, ask.engine)
    exact = Ask(ask.context, plan.max_users, ask.draft, ask.kv, ask.engine)
    assert planned("122b", "rtx-pro-6000", "int4", exact).fits
    assert not planned("122b", "rtx-pro-6000", "int4", over).fits


def test_a_prefix_cache_takes_what_it_was_given() -> None:
    ask = Ask(8192, 1, Draft(), "bf16", "stoker")
    with_cache = Ask(8192, 1, Draft(), "bf16", "stoker", prefix_cache_gib=2.0)
    assert planned("122b", "spark", "int4", with_cache).total - planned("122b", "spark", "int4", ask).total == 2 * GIB


def test_flags_ask_vllm_for_the_same() -> None:
    plan = planned("122b", "2xspark", "int4", Ask(65_536, 3, Draft("dflash", 12), "fp8", "vLLM"))
    flags = " ".join(plan.flags)
    assert "--max-model-len 65536 --max-num-seqs 3 --kv-cache-memory-bytes" in flags
    assert "--kv-cache-dtype fp8" in flags
    assert '"method":"dflash"' in flags
    assert "--tensor-parallel-size 2" in flags
    assert plan.pool is not None
    assert plan.pool.concurrency >= 3


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (Ask(300_000, 1, Draft(), "bf16", "vLLM"), "37,856 more than"),
        (Ask(0, 1, Draft(), "bf16", "vLLM"), "at least 1"),
        (Ask(1024, 1, Draft("dflash", 16), "bf16", "vLLM"), "at most 15 tokens a step"),
        (Ask(1024, 1, Draft(), "int4", "vLLM"), "bf16 or fp8"),
    ],
)
def test_what_no_memory_would_mend_is_refused(ask: Ask, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        planned("122b", "spark", "int4", ask)


def test_a_drafter_the_model_lacks_is_refused() -> None:
    with pytest.raises(RequestError, match="no MTP head"):
        planned("235b", "2xspark", "gptq-int4", Ask(1024, 1, Draft("mtp", 2), "bf16", "vLLM"))
    with pytest.raises(RequestError, match="no DFlash drafter"):
        planned("397b", "2xspark", "int4", Ask(1024, 1, Draft("dflash", 4), "bf16", "vLLM"))


asks = st.builds(
    Ask,
    context=st.integers(1, 40_000),
    users=st.integers(1, 64),
    draft=st.sampled_from([Draft(), Draft("lookup", 4)]),
    kv=st.sampled_from(["bf16", "fp8"]),
    engine=st.sampled_from(sorted(engines())),
)
any_model = st.sampled_from([model.name for model in models()])
any_box = st.sampled_from([box.key for box in boxes()])
any_scheme = st.sampled_from(sorted(schemes()))


@settings(max_examples=150, deadline=None)
@given(any_model, any_box, any_scheme, asks, st.integers(0, 20_000), st.integers(0, 8))
def test_more_context_or_users_never_take_less(
    name: str, box: str, weights: str, ask: Ask, tokens: int, users: int
) -> None:
    model = find_model(name)
    more = Ask(min(ask.context + tokens, model.max_positions), ask.users + users, ask.draft, ask.kv, ask.engine)
    less = planned(name, box, weights, ask)
    assert planned(name, box, weights, more).total >= less.total
    assert less.max_context <= model.max_positions


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([("122b", "mtp"), ("122b", "dflash"), ("27b", "mtp"), ("27b", "dflash"), ("397b", "mtp")]),
    asks, st.integers(1, 8), st.integers(1, 7),
)  # fmt: skip
def test_deeper_drafts_never_take_less(drafter: tuple[str, str], ask: Ask, depth: int, deeper: int) -> None:
    name, kind = drafter

    def at(k: int) -> int:
        return planned(name, "2xspark", "int4", Ask(ask.context, ask.users, Draft(kind, k), ask.kv, ask.engine)).total

    none = planned(name, "2xspark", "int4", Ask(ask.context, ask.users, Draft(), ask.kv, ask.engine)).total
    assert none <= at(depth) <= at(depth + deeper)


@settings(max_examples=100, deadline=None)
@given(any_model, st.integers(1, 40_000), st.integers(1, 1 << 40), st.integers(0, 15), st.sampled_from([1.0, 2.0]))
def test_a_pool_never_holds_more_than_its_bytes(name: str, context: int, size: int, depth: int, item: float) -> None:
    model = find_model(name)
    pool = pool_of(model, size, context=context, depth=depth, kv_item=item, mtp=bool(model.mtp_layers))
    assert pool.bytes <= size
    assert pool.blocks_per_request >= 1
    layers = model.layers_of("full_attention") + model.mtp_layers
    if not model.sliding_window:
        assert pool.tokens * 2 * model.num_kv_heads * model.head_dim * item * layers <= size
