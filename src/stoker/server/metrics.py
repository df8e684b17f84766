"""Prometheus metrics: vLLM's names where it has them, so that its dashboards work; our own begin with stoker:.

Counters live in the server and not in the engine, so that they survive a restart of the engine.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from stoker.engine.event import Event, Finish, Stats
from stoker.server.generation import Progress, count_accepted

if TYPE_CHECKING:
    from stoker.engine.event import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
REFUSALS = ("not_ready", "memory", "queue_full")
FINISHES = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CANCELLED: "abort", Finish.ERROR: "error"}


disable_created_metrics()  # a second series per counter that nobody reads


@dataclass
class Counts:
    """What the page draws, counted since the server's start as answers are made."""

    tokens: int = 0
    steps: int = 0  # per request that took part, without the one that its prompt ends with
    step_tokens: int = 0  # made by those steps
    drafted: int = 0
    accepted: int = 0


class Metrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._values = (model_name, "0")
        self.counts = Counts()
        self._positions: list[tuple[Counter, Counter]] = []  # drafted and accepted, by position in a block
        self._depths: dict[int, Counter] = {}
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that began.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens made.")
        self.cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Steps of requests that verified drafts.")
        self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self.accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self.forced = self._counter("stoker:forced_tokens", "Tokens that a grammar left no choice about.")
        self.steps = self._counter("stoker:request_steps", "Decode steps, counted per request that took part.")
        self.restarts = self._counter("stoker:engine_restarts", "How often the engine was started again.")
        self.cache_evictions = self._counter("stoker:prefix_cache_sheds", "Prefix caches given up for want of memory.")
        names = (*LABELS, "finished_reason")
        self._finished = Counter("vllm:request_success", "Requests that ended.", names, registry=self.registry)
        names = (*LABELS, "reason")
        self._refused = Counter("stoker:requests_refused", "Requests turned away.", names, registry=self.registry)
        names = (*LABELS, "position")
        self._drafted_at = Counter(
            "stoker:spec_decode_num_draft_tokens_per_pos", "Drafts verified.", names, registry=self.registry
        )
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that were accepted.", names, registry=self.registry
        )
        names = (*LABELS, "depth")
        self._depth = Counter("stoker:step_depth", "Steps by number of drafts.", names, registry=self.registry)
        self.first_token_s = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.between_s = self._histogram("vllm:inter_token_latency_seconds", "From one step of a request to the next.")
        self.request_s = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.")
        self.queue_s = self._histogram("vllm:request_queue_time_seconds", "From arrival until it was computed.")
        self.prefill_s = self._histogram("vllm:request_prefill_time_seconds", "From there to the first token.")
        self.decode_s = self._histogram("vllm:request_decode_time_seconds", "From there to the end.")
        for finish in Finish:
            self._finished.labels(*self._values, FINISHES[finish])
        for reason in REFUSALS:  # a series that begins at 1 has not increased
            self._refused.labels(*self._values, reason)

    def watch(self, read: Callable[[], "Iterator[tuple[str, str, float]]"]) -> None:
        """Registers gauges that are read at each scrape: name, help, value."""
        self.registry.register(_Gauges(read, self._values))

    def refused(self, reason: str) -> None:
        self._refused.labels(*self._values, reason).inc()

    def stepped(self, event: Event, progress: Progress) -> None:
        """Counts a step of one request."""
        if not event.tokens:
            return
        now = time.perf_counter()
        self.generation_tokens.inc(len(event.tokens))
        self.counts.tokens += len(event.tokens)
        if progress.first_at is None:
            progress.first_at = now
            self.first_token_s.observe(now - progress.arrived_at)
        else:
            self.steps.inc()
            self.counts.steps += 1
            self.counts.step_tokens += len(event.tokens)
            self.between_s.observe(now - (progress.last_at or now))
            self._drafted(event)
        progress.last_at = now

    def ended(self, finish: Finish, progress: Progress, stats: Stats) -> None:
        self._finished.labels(*self._values, FINISHES[finish]).inc()
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.request_s.observe(time.perf_counter() - progress.arrived_at)
        if finish in (Finish.STOP, Finish.LENGTH):
            self.cache_queries.inc(stats.prompt_tokens)
            self.cache_hits.inc(stats.cached_tokens)
            self.queue_s.observe(stats.queue_s)
            self.prefill_s.observe(stats.prefill_s)
            self.decode_s.observe(stats.decode_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _drafted(self, event: Event) -> None:
        accepted = count_accepted(event.drafts, event.tokens) if event.assumed is None else event.assumed
        if event.forced:
            self.forced.inc(accepted)
            return
        depth = len(event.drafts)
        if depth not in self._depths:
            self._depths[depth] = self._depth.labels(*self._values, depth)
        self._depths[depth].inc()
        if not depth:
            return
        self.drafts.inc()
        self.draft_tokens.inc(depth)
        self.accepted.inc(accepted)
        self.counts.drafted += depth
        self.counts.accepted += accepted
        while len(self._positions) < depth:
            labels = (*self._values, len(self._positions))
            self._positions.append((self._drafted_at.labels(*labels), self._accepted_at.labels(*labels)))
        for index in range(depth):
            self._positions[index][0].inc()
            if index < accepted:
                self._positions[index][1].inc()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, LABELS, buckets=SECONDS, registry=self.registry).labels(*self._values)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], "Iterator[tuple[str, str, float]]"], values: tuple[str, str]) -> None:
        self._read, self._values = read, values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, text, value in self._read():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._values, value)
            yield gauge


def engine_gauges(stats: "EngineStats") -> Iterator[tuple[str, str, float]]:
    """Gauges of the engine's latest stats."""
    held = stats.pages_used - stats.pages_cached
    yield "vllm:num_requests_running", "Requests being computed.", stats.running
    yield "vllm:num_requests_waiting", "Requests in the engine's queue.", stats.waiting
    yield "vllm:kv_cache_usage_perc", "Share of KV pages that requests hold, 1 is all.", held / stats.pages
    yield "stoker:kv_pages", "KV pages of 64 tokens.", stats.pages
    yield "stoker:kv_pages_held", "KV pages that requests hold.", held
    yield "stoker:kv_pages_cached", "KV pages that only the prefix cache holds.", stats.pages_cached
    yield "stoker:slots", "Recurrent states, one per running request.", stats.slots
    yield "stoker:slots_used", "Recurrent states in use.", stats.slots_used
    yield "stoker:checkpoints", "States kept by the prefix cache.", stats.snapshots
    yield "stoker:cache_bytes", "Bytes of KV pages, states and checkpoints, used or not.", stats.cache_bytes
    yield "stoker:preemptions", "Requests put back for want of pages since the engine started.", stats.preemptions
    steps = stats.totals.steps
    computed = stats.totals.prefill_tokens + steps
    yield "stoker:tokens_computed", "Prompt tokens and steps of the engine: stands still only when it does.", computed
    yield "stoker:step_seconds_mean", "Mean time of a decode step since start.", stats.totals.step_s / max(1, steps)
    controller = stats.depth_controller
    if controller and controller.get("distinct_experts"):
        experts = controller["distinct_experts"]["measured"]
        yield "stoker:distinct_experts_per_step", "Distinct experts per layer that a step reads, mean.", experts
