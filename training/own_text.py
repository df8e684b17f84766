"""The trunk's own greedy continuations of code or prose it was trained on, as a shard for its drafters:

    python -m training.own_text --weights TRUNK [--shard own_prose]

A drafter is judged on what the model writes, which is plainer and repeats itself more than what people write. With
--stray N a stretch drawn at random from the trunk's distribution lies between the passage and the greedy text: it knows
many passages by heart, and a drafter might learn what it writes where it does not. The trunk is the training forward,
one token at a time with thousands of passages side by side; weights are those shipped.
"""

import argparse
import lzma
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training import loop
from training import tokenizer as tokenizers
from training.batches import Mixture
from training.config import SHAPES
from training.delta import GatedDeltaNet, l2_norm
from training.layers import Attention, rope_table, rotate
from training.model import DecoderLayer, Model
from training.quantize import snap
from training.state import fill, load_weights

SOURCES = {"own_code": ("code", "code_tests"), "own_prose": ("novels",)}  # of each shard
PROMPT, WRITTEN = 160, 256  # tokens of a passage given, and written
SIDE_BY_SIDE = 2048


@dataclass
class DeltaMemory:
    """What a DeltaNet layer keeps of the past: the last inputs of its convolution and the state [B, HV, K, V]."""

    window: Tensor
    state: Tensor

    @classmethod
    def new(cls, layer: GatedDeltaNet, rows: int, where: torch.device) -> "DeltaMemory":
        delta = layer.delta
        shape = (rows, delta.value_heads, delta.key_dim, delta.value_dim)
        window = torch.zeros(rows, delta.conv_kernel - 1, delta.conv_channels, device=where)
        return cls(window, torch.zeros(shape, device=where))

    def step(self, layer: GatedDeltaNet, x: Tensor) -> Tensor:
        """x [B, 1, H] -> the same shape."""
        delta = layer.delta
        inputs = torch.cat([self.window, layer.in_proj_qkv(x).to(self.window.dtype)], dim=1)
        self.window = inputs[:, 1:]
        qkv = F.silu(torch.einsum("btc,ct->bc", inputs, layer.conv1d.weight[:, 0]))
        keys = delta.key_heads * delta.key_dim
        q, k, v = qkv.float().split([keys, keys, delta.value_heads * delta.value_dim], dim=-1)
        q, k = (l2_norm(y.unflatten(-1, (delta.key_heads, delta.key_dim))) for y in (q, k))
        spread = delta.value_heads // delta.key_heads
        q, k = (y.repeat_interleave(spread, dim=1) for y in (q, k))
        v = v.unflatten(-1, (delta.value_heads, delta.value_dim))
        beta = torch.sigmoid(layer.in_proj_b(x).float())[:, 0]
        g = (-torch.exp(layer.A_log) * F.softplus(layer.in_proj_a(x).float() + layer.dt_bias))[:, 0]
        with torch.autocast(x.device.type, enabled=False):
            self.state = self.state * g.exp()[..., None, None]
            change = (v - (k[..., None] * self.state).sum(-2)) * beta[..., None]
            self.state = self.state + k[..., None] * change[..., None, :]
            out = ((q * delta.key_dim**-0.5)[..., None] * self.state).sum(-2)
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
        return cls(torch.zeros(shape, device=where), torch.zeros(shape, device=where))

    def step(self, layer: Attention, x: Tensor, place: int, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, gate = layer.q_proj(x).view(*x.shape[:-1], layer.heads, -1).split(layer.head_dim, dim=-1)
        q = rotate(layer.q_norm(q), rope).transpose(1, 2)
        keys, values = layer.project(x, rope)
        self.keys[:, :, place : place + 1], self.values[:, :, place : place + 1] = keys, values
        keys, values = (
            seen[:, :, : place + 1].to(q.dtype).repeat_interleave(layer.heads // layer.kv_heads, dim=1)
            for seen in (self.keys, self.values)
        )
        out = F.scaled_dot_product_attention(q, keys, values).transpose(1, 2)
        return layer.o_proj((out * torch.sigmoid(gate)).flatten(-2))


class Writer:
    """The trunk with its memories, for `rows` texts of at most `places` tokens."""

    def __init__(self, model: Model, rows: int, places: int) -> None:
        self.model, self.place = model, 0
        where = model.embed_tokens.weight.device
        self.memories = [
            AttentionMemory.new(layer.self_attn, rows, places, where)
            if layer.full
            else DeltaMemory.new(layer.linear_attn, rows, where)
            for layer in self._layers()
        ]

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    def step(self, tokens: Tensor) -> Tensor:
        """The next token [B] of each text -> logits [B, V] of the one after it."""
        config = self.model.config
        x = self.model.embed_tokens(tokens[:, None])
        rope = rope_table(torch.tensor([self.place], device=tokens.device), config.rope_theta, config.rotary_dim)
        for layer, memory in zip(self._layers(), self.memories, strict=True):
            normed = layer.input_layernorm(x)
            if isinstance(memory, DeltaMemory):
                x = x + memory.step(layer.linear_attn, normed)
            else:
                x = x + memory.step(layer.self_attn, normed, self.place, rope)
            x = x + layer.mlp(layer.post_attention_layernorm(x))[0]
        self.place += 1
        return self.model.lm_head(self.model.norm(x))[:, 0]


@torch.no_grad()
def continuations(
    model: Model, prompts: Tensor, written: int, stray: int = 0, generator: torch.Generator | None = None
) -> Tensor:
    """prompts [B, P] -> [B, P + stray + written]: `stray` tokens drawn at random, the rest greedy."""
    writer = Writer(model, len(prompts), prompts.shape[1] + stray + written)
    with loop.precision(prompts.device):
        for place in range(prompts.shape[1]):
            logits = writer.step(prompts[:, place])
        made: list[Tensor] = []
        while len(made) < stray + written:
            if made:
                logits = writer.step(made[-1])
            if len(made) < stray:
                drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
                made.append(drawn[:, 0])
            else:
                made.append(logits.argmax(-1))
    return torch.cat([prompts, torch.stack(made, dim=1)], dim=1)


def documents(texts: np.ndarray, prompt: int, end: int) -> np.ndarray:
    """One stream of uint16 tokens: each text up to its first `end` after the prompt, and an `end`."""
    parts = []
    for text in texts:
        stops = np.flatnonzero(text[prompt:] == end)
        parts += [text[: prompt + stops[0]] if len(stops) else text, [end]]
    return np.concatenate(parts).astype("<u2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="run directory or checkpoint of the trunk")
    parser.add_argument("--data", type=Path, default=Path("build/training"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--shard", choices=list(SOURCES), default="own_code")
    parser.add_argument("--passages", type=int, default=12_288)
    parser.add_argument("--stray", type=int, default=0, help="tokens to draw at random before")
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens to write after each passage")
    parser.add_argument("--int4-group", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    model = Model(SHAPES[options.shape].model)
    fill(model, load_weights(options.weights))
    snap(model, options.int4_group)
    model.to(loop.device()).requires_grad_(False)
    rows = Mixture(options.data / "shards", tokenizers.load(options.data / "tokenizer"), only=SOURCES[options.shard])
    generator = torch.Generator(loop.device()).manual_seed(options.seed)
    parts, started = [], time.monotonic()
    for step, begin in enumerate(range(0, options.passages, SIDE_BY_SIDE)):
        count = min(SIDE_BY_SIDE, options.passages - begin)
        prompts, _ = rows.batch(options.seed, step, count, PROMPT - 1)
        prompts_there = torch.from_numpy(prompts).to(loop.device())
        made = continuations(model, prompts_there, options.written, options.stray, generator)
        parts.append(documents(made.cpu().numpy(), PROMPT, rows.marks.end_of_text))
        print(f"{begin + count} of {options.passages} passages, {time.monotonic() - started:.0f} s", flush=True)
    tokens = np.concatenate(parts)
    path = options.data / "shards" / "train" / f"{options.shard}.xz"
    path.write_bytes(lzma.compress(tokens.tobytes(), preset=1))
    print(f"{path}: {len(tokens):,} tokens")


if __name__ == "__main__":
    main()
