"""KV stored in FP8: half the bytes, a bounded error, and the same exactness as in bf16."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.attention import read_split, write_pages
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import FP8, Cache, KVPages
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.errors import RequestError
from tests.backends.network.forward import row_errors, run_chunks

FAMILY = "qwen3_5_moe_text"
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = torch.randint(0, 512, (300,), generator=torch.Generator().manual_seed(3)).tolist()


def fp8_cache(model: Decoder) -> Cache:
    dtype = model.embed_tokens.weight.dtype
    return Cache.allocate(model.config, pages=16, slots=4, window=150, dtype=dtype, kv_dtype=FP8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_is_bit_identical_over_chunkings(checkpoints: dict[str, Path], dtype: torch.dtype) -> None:
    model = load_model(checkpoints[FAMILY], dtype=dtype).model
    want = run_chunks(model, fp8_cache(model), TOKENS, [300], Family.PREFILL)
    for chunks in ([64, 64, 64, 64, 44], [128, 172], [256, 44]):
        assert torch.equal(run_chunks(model, fp8_cache(model), TOKENS, chunks, Family.PREFILL), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_bit_identical_alone_in_blocks_and_beside_others(
    checkpoints: dict[str, Path], dtype: torch.dtype
) -> None:
    model = load_model(checkpoints[FAMILY], dtype=dtype).model
    want = run_chunks(model, fp8_cache(model), TOKENS[:128], [1] * 128, Family.STEP)
    for chunks in ([128], [3, 13, 16, 17, 1, 60, 18]):
        assert torch.equal(run_chunks(model, fp8_cache(model), TOKENS[:128], chunks, Family.STEP), want)
    cache = fp8_cache(model)
    runs = [Run(TOKENS[100:107], 0, 1, [9, 10]), Run(TOKENS[:20], 0, 0, [3, 4])]
    with torch.inference_mode():
        hidden, _ = model(Batch.of(Family.STEP, runs, PAGE_SIZE), cache)
        assert torch.equal(model.logits(hidden[7:]), want[:20])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rejected_drafts_leave_no_trace(checkpoints: dict[str, Path], dtype: torch.dtype) -> None:
    """A wild draft, large enough to move any shared scale, changes neither the tokens before nor those after it."""
    model = load_model(checkpoints[FAMILY], dtype=dtype).model
    plain, drafted = fp8_cache(model), fp8_cache(model)

    def step(cache: Cache, tokens: list[int], cached: int, replay: int) -> Tensor:
        with torch.inference_mode():
            batch = Batch.of(Family.STEP, [Run(tokens, cached, 0, range(16), replay)], PAGE_SIZE)
            return model.logits(model(batch, cache)[0])

    rows, replay = [], 0
    for position in range(40):
        rows.append(step(plain, [TOKENS[position]], position, replay))
        replay = 1
    replay = 0
    for position in range(40):
        got = step(drafted, [TOKENS[position], 511, 7, 300 + position], position, replay)
        assert torch.equal(got[:1], rows[position])
        replay = 1


def test_the_error_against_bf16_is_bounded(checkpoints: dict[str, Path]) -> None:
    """FP8 keeps 3 digits of each key: a few per cent at most where every layer attends."""
    model = load_model(checkpoints["qwen3_moe"], dtype=torch.float32).model
    exact = Cache.allocate(model.config, pages=16, slots=1, dtype=torch.float32)
    want = run_chunks(model, exact, TOKENS, [300], Family.PREFILL)
    got = run_chunks(model, fp8_cache(model), TOKENS, [300], Family.PREFILL)
    errors = row_errors(got, want)
    assert 0 < errors.median() <= 0.05


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e4])
def test_what_is_read_is_within_a_sixteenth_of_what_was_written(size: float) -> None:
    pages = KVPages.allocate(4, 2, 64, FP8, "cpu")
    assert pages.key_scales is not None
    values = size * torch.randn(40, 2, 64)
    values[7] = 0.0
    write_pages(pages.keys, values, torch.arange(100, 140), pages.key_scales)
    read = read_split(pages.keys, torch.arange(4), pages.key_scales).transpose(1, 2).flatten(0, 1)[100:140]
    largest = values.abs().amax(-1, keepdim=True)
    assert bool(((read - values).abs() <= values.abs() / 16 + largest / 448 / 256).all())
    assert torch.equal(read[7], torch.zeros(2, 64))


def test_bytes_per_token_are_exact(checkpoints: dict[str, Path]) -> None:
    config = load_model(checkpoints[FAMILY]).config

    def per_token(kv_dtype: torch.dtype | None) -> float:
        cache = Cache.allocate(config, pages=3, slots=0, kv_dtype=kv_dtype)
        pages = [layer for layer in cache.layers if isinstance(layer, KVPages)]
        tensors = [tensor for layer in pages for tensor in vars(layer).values() if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors) / (3 * PAGE_SIZE)

    heads = config.layer_types.count("full_attention") * config.num_kv_heads
    assert per_token(None) == heads * 2 * 2 * config.head_dim
    assert per_token(FP8) == heads * 2 * (config.head_dim + 2)  # a code per value and a 16-bit scale


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"stored as torch\.int8, expected bfloat16, float32 or torch\.float8_e4m3fn"
    ):
        KVPages.allocate(1, 1, 8, torch.int8, "cpu")
