"""The trunk's own greedy continuations of code or prose it was trained on, as shards for its drafters:

    python -m training.own_text --weights TRUNK [--passages own_code=40000,own_prose=20000]

A drafter is judged on what the model writes, which is plainer and repeats itself more than what people write. With
--stray N a stretch drawn at random from the trunk's distribution lies between the passage and the greedy text: it knows
many passages by heart, and a drafter might learn what it writes where it does not. The trunk is the training forward,
one token at a time with thousands of passages side by side; weights are those shipped.
"""

import argparse
import lzma
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from training import loop
from training import tokenizer as tokenizers
from training.batches import Mixture
from training.config import SHAPES
from training.delta import GatedDeltaNet, l2_norm
from training.layers import Attention, Rope, rope_table, rotate
from training.model import DecoderLayer, Model
from training.quantize import snap
from training.state import fill, load_weights

SOURCES = {"own_code": ("code", "code_tests", "packages"), "own_prose": ("novels",)}  # of each shard
PROMPT, WRITTEN = 160, 256  # tokens of a passage given, and written
SIDE_BY_SIDE = 8192  # 13 GB of recurrent states, 7 GB of keys and values
MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # the first has masks, and no plan to make for each shape


def kept_in(where: torch.device) -> torch.dtype:
    """Of what projections give, which is bf16 on a GPU (loop.precision)."""
    return torch.bfloat16 if where.type == "cuda" else torch.float32


@dataclass
class DeltaMemory:
    """What a DeltaNet layer keeps of the past: the last inputs of its convolution [B, kernel - 1, channels] and the
    fp32 state [B, HV, V, K], whose sums run over what lies side by side."""

    window: Tensor
    state: Tensor

    @classmethod
    def new(cls, layer: GatedDeltaNet, rows: int, where: torch.device) -> "DeltaMemory":
        delta = layer.delta
        window = torch.zeros(rows, delta.conv_kernel - 1, delta.conv_channels, device=where, dtype=kept_in(where))
        return cls(window, torch.zeros(rows, delta.value_heads, delta.value_dim, delta.key_dim, device=where))

    def clear(self) -> None:
        self.window.zero_()
        self.state.zero_()

    def step(self, layer: GatedDeltaNet, x: Tensor) -> Tensor:
        """x [B, 1, H] -> the same shape."""
        delta = layer.delta
        inputs = torch.cat([self.window, layer.in_proj_qkv(x).to(self.window.dtype)], dim=1)
        self.window.copy_(inputs[:, 1:])
        qkv = F.silu((inputs * layer.conv1d.weight[:, 0].T).sum(1))
        keys = delta.key_heads * delta.key_dim
        q, k, v = qkv.float().split([keys, keys, delta.value_heads * delta.value_dim], dim=-1)
        q, k = (l2_norm(y.unflatten(-1, (delta.key_heads, delta.key_dim))) for y in (q, k))
        spread = delta.value_heads // delta.key_heads
        q, k = (y.repeat_interleave(spread, dim=1)[..., None, :] for y in (q, k))  # [B, HV, 1, K]
        v = v.unflatten(-1, (delta.value_heads, delta.value_dim))
        beta = torch.sigmoid(layer.in_proj_b(x).float())[:, 0]
        g = (-torch.exp(layer.A_log) * F.softplus(layer.in_proj_a(x).float() + layer.dt_bias))[:, 0]
        state = self.state * g.exp()[..., None, None]
        change = (v - (state * k).sum(-1)) * beta[..., None]
        state = state + change[..., None] * k
        out = (state * (q * delta.key_dim**-0.5)).sum(-1)
        self.state.copy_(state)
        z = layer.in_proj_z(x).unflatten(-1, (delta.value_heads, delta.value_dim))
        return layer.out_proj(layer.norm(out[:, None], z).flatten(-2))


@dataclass
class AttentionMemory:
    """Keys and values [B, kv_heads, S, D] of all places, filled as they come."""

    keys: Tensor
    values: Tensor

    @classmethod
    def new(cls, layer: Attention, rows: int, places: int, where: torch.device) -> "AttentionMemory":
        shape = (rows, layer.kv_heads, places, layer.head_dim)
        keys, values = (torch.zeros(shape, device=where, dtype=kept_in(where)) for _ in range(2))
        return cls(keys, values)

    def step(self, layer: Attention, x: Tensor, place: Tensor, rope: Rope) -> Tensor:
        """x [B, 1, H] at `place` [1] -> the same shape. All places are read; those to come are masked."""
        q, gate = layer.q_proj(x).view(*x.shape[:-1], layer.heads, -1).split(layer.head_dim, dim=-1)
        keys, values = layer.project(x, rope)
        self.keys.index_copy_(2, place, keys.to(self.keys.dtype))
        self.values.index_copy_(2, place, values.to(self.values.dtype))
        # heads that share keys are queries of one head, so that keys are not repeated: [B, kv_heads, heads of each, D]
        q = rotate(layer.q_norm(q), rope).view(len(x), layer.kv_heads, -1, layer.head_dim).to(self.keys.dtype)
        past = torch.arange(self.keys.shape[2], device=x.device) <= place
        with sdpa_kernel(MASKED):
            out = F.scaled_dot_product_attention(q, self.keys, self.values, past[None, None, None])
        return layer.o_proj((out.reshape(gate.shape) * torch.sigmoid(gate)).flatten(-2))


def remember(memory: DeltaMemory, layer: DecoderLayer, x: Tensor) -> Tensor:
    return x + memory.step(layer.linear_attn, layer.input_layernorm(x))


def feed_forward(layer: DecoderLayer, x: Tensor) -> Tensor:
    return x + layer.mlp(layer.post_attention_layernorm(x))[0]


class Writer:
    """The trunk with its memories, for `rows` texts of at most `places` tokens.

    A step has the same shapes at every place and asks nothing of the host, so a GPU takes it as one recorded graph.
    What is mostly elementwise, the recurrent states above all, may be `compiled`: each state is then read and written
    once instead of ten times.
    """

    def __init__(self, model: Model, rows: int, places: int, compiled: bool = False) -> None:
        self.model, self.rows, self.places = model, rows, places
        where = model.embed_tokens.weight.device
        self.place = torch.zeros(1, dtype=torch.int64, device=where)
        self.memories = [
            AttentionMemory.new(layer.self_attn, rows, places, where)
            if layer.full
            else DeltaMemory.new(layer.linear_attn, rows, where)
            for layer in self._layers()
        ]
        self._remember, self._feed_forward = remember, feed_forward
        if compiled:
            self._remember = torch.compile(remember, fullgraph=True, dynamic=False)
            self._feed_forward = torch.compile(feed_forward, fullgraph=True, dynamic=False)
        self._graph: torch.cuda.CUDAGraph | None = None
        if where.type == "cuda":
            self._record()

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    def clear(self) -> None:
        """Forgets the texts, for others. Keys may stay: they are masked until they are replaced."""
        self.place.zero_()
        for memory in self.memories:
            if isinstance(memory, DeltaMemory):
                memory.clear()

    def step(self, tokens: Tensor) -> Tensor:
        """The next token [B] of each text -> logits [B, V] of the one after it, which the next step may overwrite."""
        if self._graph is None:
            return self._step(tokens)
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._logits

    @torch.no_grad()
    def _step(self, tokens: Tensor) -> Tensor:
        config = self.model.config
        with loop.precision(tokens.device):
            x = self.model.embed_tokens(tokens[:, None])
            rope = rope_table(self.place, config.rope_theta, config.rotary_dim)
            for layer, memory in zip(self._layers(), self.memories, strict=True):
                if isinstance(memory, DeltaMemory):
                    x = self._remember(memory, layer, x)
                else:
                    x = x + memory.step(layer.self_attn, layer.input_layernorm(x), self.place, rope)
                x = self._feed_forward(layer, x)
            self.place.add_(1)
            return self.model.lm_head(self.model.norm(x))[:, 0]

    def _record(self) -> None:
        """From now on a step is one launch. Steps before the recording compile and choose what it may not."""
        self._tokens = torch.zeros(self.rows, dtype=torch.int64, device=self.place.device)
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                self._step(self._tokens)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._step(self._tokens)
        self._graph = graph


@torch.no_grad()
def continuations(
    writer: Writer, prompts: Tensor, written: int, stray: int = 0, generator: torch.Generator | None = None
) -> Tensor:
    """prompts [B, P] -> [B, P + stray + written]: `stray` tokens drawn at random, the rest greedy. There may be fewer
    prompts than the writer has rows."""
    needed = prompts.shape[1] + stray + written
    if len(prompts) > writer.rows or needed > writer.places:
        raise ValueError(
            f"the writer has {writer.rows} rows of {writer.places} tokens; {len(prompts)} of {needed} do not fit."
        )
    writer.clear()
    given = F.pad(prompts, (0, 0, 0, writer.rows - len(prompts)))
    for place in range(prompts.shape[1]):
        logits = writer.step(given[:, place])
    made: list[Tensor] = []
    while len(made) < stray + written:
        if made:
            logits = writer.step(made[-1])
        if len(made) < stray:
            drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
            made.append(drawn[:, 0])
        else:
            made.append(logits.argmax(-1))
    return torch.cat([given, torch.stack(made, dim=1)], dim=1)[: len(prompts)]


def documents(texts: np.ndarray, prompt: int, end: int) -> np.ndarray:
    """One stream of uint16 tokens: each text up to its first `end` after the prompt, and an `end`."""
    parts = []
    for text in texts:
        stops = np.flatnonzero(text[prompt:] == end)
        parts += [text[: prompt + stops[0]] if len(stops) else text, [end]]
    return np.concatenate(parts).astype("<u2")


def passages(text: str) -> dict[str, int]:
    """Passages of each shard from text such as "own_code=40000,own_prose=20000"."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        shard, _, count = part.partition("=")
        if shard not in SOURCES:
            raise argparse.ArgumentTypeError(f"there is no shard '{shard}' to write; there are {', '.join(SOURCES)}.")
        if not count.isdecimal() or int(count) < 1:
            raise argparse.ArgumentTypeError(
                f"'{part}' does not say how many; write SHARD=PASSAGES, such as own_code=4096."
            )
        counts[shard] = int(count)
    return counts


def portions(counts: dict[str, int], most: int) -> list[dict[str, int]]:
    """The passages of each shard in batches of about `most`, every batch of the same mixture: a run that is cut short
    has some of each."""
    batches = -(-sum(counts.values()) // most)
    parts = []
    for batch in range(batches):
        part = {s: count * (batch + 1) // batches - count * batch // batches for s, count in counts.items()}
        parts.append({shard: count for shard, count in part.items() if count})
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="run directory or checkpoint of the trunk")
    parser.add_argument("--data", type=Path, default=Path("build/training"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--passages", type=passages, default="own_code=12288", help="SHARD=COUNT,... to write")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no further batch after so many minutes")
    parser.add_argument("--stray", type=int, default=0, help="tokens to draw at random before")
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens to write after each passage")
    parser.add_argument("--side-by-side", type=int, default=SIDE_BY_SIDE, help="passages to continue at once")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=loop.device().type == "cuda")
    parser.add_argument("--int4-group", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    model = Model(SHAPES[options.shape].model)
    fill(model, load_weights(options.weights))
    snap(model, options.int4_group)
    model.to(loop.device()).requires_grad_(False)
    shards, tokenizer = options.data / "shards", tokenizers.load(options.data / "tokenizer")
    sources = {shard: Mixture(shards, tokenizer, only=SOURCES[shard]) for shard in options.passages}
    batches = portions(options.passages, options.side_by_side)
    rows = max(sum(counts.values()) for counts in batches)
    writer = Writer(model, rows, PROMPT + options.stray + options.written, options.compile)
    generator = torch.Generator(loop.device()).manual_seed(options.seed)
    print(f"{rows} passages side by side, ready after {time.monotonic() - started:.0f} s", flush=True)
    streams: dict[str, list[Future[bytes]]] = {shard: [] for shard in options.passages}
    tokens, begun = dict.fromkeys(options.passages, 0), time.monotonic()
    with ThreadPoolExecutor(1) as beside:  # a file of several xz streams is an xz file
        for batch, counts in enumerate(batches):
            prompts = [
                sources[shard].batch(options.seed, batch, count, PROMPT - 1)[0] for shard, count in counts.items()
            ]
            prompts_there = torch.from_numpy(np.concatenate(prompts)).to(loop.device())
            made = continuations(writer, prompts_there, options.written, options.stray, generator).cpu().numpy()
            for shard, texts in zip(counts, np.split(made, np.cumsum(list(counts.values()))[:-1]), strict=True):
                text = documents(texts, PROMPT, sources[shard].marks.end_of_text)
                streams[shard].append(beside.submit(lzma.compress, text.tobytes(), preset=1))
                tokens[shard] += len(text)
            took, total = time.monotonic() - begun, sum(tokens.values())
            print(f"batch {batch + 1} of {len(batches)}: {total:,} tokens, {total / took:,.0f} tokens/s", flush=True)
            if time.monotonic() - started > 60 * options.minutes:
                break
    for shard, parts in streams.items():
        path = shards / "train" / f"{shard}.xz"
        path.write_bytes(b"".join(part.result() for part in parts))
        print(f"{path}: {tokens[shard]:,} tokens")


if __name__ == "__main__":
    main()
