"""vLLM's log becomes phases, seconds and GiB."""

from pathlib import Path

import pytest

from stoker.engines.vllm_log import Phases, read_start

CPU = Path(__file__).parent / "data" / "vllm-0.32-cpu.log"
# As vLLM 0.19 to 0.32 print them on a card, with the numbers of document 001.
CARD = """\
(APIServer pid=7) INFO 04-25 10:00:00 [utils.py:233] non-default args: {'model_tag': '/models/qwen35-122b-nvfp4'}
(EngineCore pid=9) INFO 04-25 10:00:20 [gpu_model_runner.py:5040] Starting to load model /models/qwen35-122b-nvfp4...
Loading safetensors checkpoint shards:   0% Completed | 0/17 [00:00<?, ?it/s]
Loading safetensors checkpoint shards:  47% Completed | 8/17 [04:00<04:21, 29.5s/it]
(EngineCore pid=9) INFO 04-25 10:08:41 [default_loader.py:501] Loading weights took 501.20 seconds
(EngineCore pid=9) INFO 04-25 10:08:41 [gpu_model_runner.py:5071] Loading drafter model...
Loading safetensors checkpoint shards:  50% Completed | 9/18 [00:30<00:43,  4.3s/it]
(EngineCore pid=9) INFO 04-25 10:09:54 [default_loader.py:501] Loading weights took 73.00 seconds
(EngineCore pid=9) INFO 04-25 10:09:54 [gpu_model_runner.py:5150] Model loading took 76.02 GiB memory and \
574.500000 seconds
(EngineCore pid=9) INFO 04-25 10:09:55 [monitor.py:37] [backbone] Starting torch.compile
(EngineCore pid=9) INFO 04-25 10:10:31 [monitor.py:60] [backbone] torch.compile took 36.50 s in total
(EngineCore pid=9) INFO 04-25 10:10:31 [monitor.py:37] [eagle_head] Starting torch.compile
(EngineCore pid=9) INFO 04-25 10:10:38 [monitor.py:60] [eagle_head] torch.compile took 6.60 s in total
(EngineCore pid=9) INFO 04-25 10:10:39 [gpu_worker.py:400] Available KV cache memory: 30.33 GiB
(EngineCore pid=9) INFO 04-25 10:10:39 [kv_cache_utils.py:2327] GPU KV cache size: 595,584 tokens, \
Maximum concurrency for 131,072 tokens per request: 12.89x
(EngineCore pid=9) INFO 04-25 10:10:40 [autotuner.py:312] flashinfer.jit: [Autotuner]: Autotuning process starts ...
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  29%|##9       | 5/17 [00:04<00:10,  1.17it/s]
(EngineCore pid=9) INFO 04-25 10:11:04 [gpu_model_runner.py:6582] Graph capturing finished in 14 secs, took 0.27 GiB
(EngineCore pid=9) INFO 04-25 10:11:05 [core.py:402] init engine (profile, create kv cache, warmup model) took 70.90 s \
(compilation: 43.10 s)
(APIServer pid=7) INFO 04-25 10:11:06 [entry.py:140] Starting vLLM server on http://127.0.0.1:8000
"""


def phases(text: str) -> list[str]:
    found: list[str] = []
    reader = Phases()
    for line in text.splitlines():
        if (phase := reader.read(line)) and (not found or found[-1] != phase.name):
            found.append(phase.name)
    return found


def test_phases_of_a_start_on_a_card_come_in_their_order():
    assert phases(CARD) == [
        *("initializing", "loading weights", "loading drafter", "compiling", "warming up", "compiling", "warming up"),
        *("allocating caches", "autotuning", "capturing graphs", "warming up", "starting the API"),
    ]


def test_a_second_start_begins_with_the_model_again():
    assert phases(CARD + CARD).count("loading weights") == 2


def test_progress_bars_tell_how_far():
    reader = Phases()
    percents = [phase.percent for line in CARD.splitlines() if (phase := reader.read(line)) and phase.percent]
    assert percents == [47.0, 50.0, 29.0]


def test_seconds_and_sizes_are_those_the_log_tells():
    start = read_start(CARD.splitlines())
    assert {each.name: each.seconds for each in start.took} == {
        "loading weights": 501.2,
        "loading drafter": 73.0,
        "model and drafter": 574.5,
        "compiling: backbone": 36.5,
        "compiling: eagle_head": 6.6,
        "capturing graphs": 14.0,
        "init engine": 70.9,
    }
    assert (start.weights_gib, start.cache_gib, start.graphs_gib) == (76.02, 30.33, 0.27)
    assert (start.cache_tokens, start.requests_of_full_context) == (595_584, 12.89)


def test_of_several_starts_the_latest_counts():
    later = CARD.replace("501.20", "557.00")
    assert read_start((CARD + later).splitlines()).seconds("loading weights") == 557.0
    assert read_start(["nothing"]).took == []


def test_a_recorded_start_on_a_cpu_is_read():
    text = CPU.read_text()
    assert phases(text) == [
        *("initializing", "loading weights", "compiling", "warming up", "allocating caches", "starting the API"),
    ]
    start = read_start(text.splitlines())
    assert start.seconds("loading weights") == 0.22
    assert start.seconds("init engine") == pytest.approx(33.93)
    assert (start.cache_gib, start.cache_tokens) == (2.35, 937_984)
