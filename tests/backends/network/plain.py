"""The MTP head and the DFlash drafter computed the slow, obvious way: the yardstick Stoker's networks are held to.

Written from the published description alone; nothing of Stoker is called. fp32, whole sequences, no cache and no
pages, explicit masks, one head and one expert at a time. `config` is always the raw config.json.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]


def load_tensors(directory: Path) -> Tensors:
    """Every tensor of a checkpoint directory, in fp32."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update({name: values.float() for name, values in load_file(file).items()})
    return tensors


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest |found - expected| / |expected| (L2) of any row."""
    assert found.shape == expected.shape
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def one_plus(weight: Tensor) -> Tensor:
    """The factor of a Qwen3.5 norm."""
    return 1.0 + weight


def itself(weight: Tensor) -> Tensor:
    """The factor of a Qwen3 (and DFlash) norm."""
    return weight


def rms_norm(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * factor


def rope(x: Tensor, positions: Tensor, theta: float, rotary: int) -> Tensor:
    """Turns dim i with dim i + rotary/2 of x [T, D] by position * theta^(-2i / rotary)."""
    out = x.clone()
    half = rotary // 2
    for i in range(half):
        angle = positions.float() * theta ** (-2 * i / rotary)
        a, b = x[:, i], x[:, i + half]
        out[:, i] = a * angle.cos() - b * angle.sin()
        out[:, i + half] = b * angle.cos() + a * angle.sin()
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """One head: q [Q, D] over k and v [S, D] where `visible` [Q, S]."""
    scores = (q @ k.T) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ v


def gated_attention(t: Tensors, stem: str, x: Tensor, positions: Tensor, config: Config) -> Tensor:
    """Causal attention of Qwen3.5: q_proj holds, head by head, the query rows and then the gate rows."""
    dim, eps = config["head_dim"], config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    theta = config["rope_parameters"]["rope_theta"]
    rotary = int(dim * config["rope_parameters"]["partial_rotary_factor"])
    q_rows, k_rows, v_rows = (x @ t[f"{stem}.{name}_proj.weight"].T for name in "qkv")
    q_factor, k_factor = (one_plus(t[f"{stem}.{name}_norm.weight"]) for name in "qk")
    rows = torch.arange(len(x))
    visible = rows[None, :] <= rows[:, None]
    outs = []
    for head in range(heads):
        both = q_rows[:, head * 2 * dim : (head + 1) * 2 * dim]
        q, gate = both[:, :dim], both[:, dim:]
        shared = head // (heads // kv_heads)
        k, v = (r[:, shared * dim : (shared + 1) * dim] for r in (k_rows, v_rows))
        q = rope(rms_norm(q, q_factor, eps), positions, theta, rotary)
        k = rope(rms_norm(k, k_factor, eps), positions, theta, rotary)
        outs.append(attend(q, k, v, visible) * torch.sigmoid(gate))
    return torch.cat(outs, dim=-1) @ t[f"{stem}.o_proj.weight"].T


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def expert_weights(t: Tensors, stem: str, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and down of one expert, stored on its own or fused with the gate rows above the up rows."""
    if f"{stem}.gate_up_proj" in t:
        both = t[f"{stem}.gate_up_proj"][expert]
        half = len(both) // 2
        return both[:half], both[half:], t[f"{stem}.down_proj"][expert]
    gate, up, down = (t[f"{stem}.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return gate, up, down


def mlp(t: Tensors, stem: str, x: Tensor, config: Config) -> Tensor:
    """A dense SwiGLU, or top-k experts with weights that sum to 1 plus a shared expert behind a sigmoid."""
    if "num_experts" not in config:
        return swiglu(x, *(t[f"{stem}.{name}_proj.weight"] for name in ("gate", "up", "down")))
    out = torch.zeros_like(x)
    for row, token in enumerate(x):
        p = torch.softmax(t[f"{stem}.gate.weight"] @ token, dim=0)
        chosen = p.argsort(descending=True)[: config["num_experts_per_tok"]]
        for expert in chosen.tolist():
            weight = p[expert] / p[chosen].sum()
            out[row] += weight * swiglu(token, *expert_weights(t, f"{stem}.experts", expert))
    shared = swiglu(x, *(t[f"{stem}.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
    return out + shared * torch.sigmoid(x @ t[f"{stem}.shared_expert_gate.weight"].T)


def mtp_head(
    t: Tensors,
    config: Config,
    hidden: Tensor,
    following: Tensor,
    positions: Tensor,
    *,
    hidden_first: bool = False,
    factor: Any = one_plus,
) -> Tensor:
    """[T, H] after mtp.norm. Row t joins the trunk's post-norm hidden of token t with the embedding of token t+1.

    The keywords step into known traps, to show that a comparison would notice.
    """
    eps = config["rms_norm_eps"]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, factor(t[f"mtp.{name}.weight"]), eps)

    embedded = norm(t["model.embed_tokens.weight"][following], "pre_fc_norm_embedding")
    seen = norm(hidden, "pre_fc_norm_hidden")
    joined = [seen, embedded] if hidden_first else [embedded, seen]
    x = torch.cat(joined, dim=-1) @ t["mtp.fc.weight"].T
    layer = "mtp.layers.0"
    x = x + gated_attention(t, f"{layer}.self_attn", norm(x, "layers.0.input_layernorm"), positions, config)
    x = x + mlp(t, f"{layer}.mlp", norm(x, "layers.0.post_attention_layernorm"), config)
    return norm(x, "norm")


def mtp_drafts(
    t: Tensors, config: Config, hidden: Tensor, following: Tensor, count: int, step: int = 1
) -> tuple[list[int], Tensor]:
    """`count` greedy drafts after a prompt, and the head's output each was read from [count, H].

    The first comes from the prompt's last row; then the output is fed back as hidden, with the draft's embedding,
    `step` (1 unless a test wants a mistake) positions on. Everything is recomputed from the start each time.
    """
    positions = torch.arange(len(hidden))
    drafts, outputs = [], []
    for _ in range(count):
        out = mtp_head(t, config, hidden, following, positions)[-1:]
        outputs.append(out)
        drafts.append(int((out @ t["lm_head.weight"].T).argmax()))
        hidden = torch.cat([hidden, out])
        following = torch.cat([following, torch.tensor(drafts[-1:])])
        positions = torch.cat([positions, positions[-1:] + step])
    return drafts, torch.cat(outputs)


def dflash_block(
    t: Tensors,
    config: Config,
    taps: list[Tensor],
    block: Tensor,
    *,
    causal: dict[str, bool],
    factor: Any = itself,
    norm_context: bool = False,
    gap: int = 0,
) -> Tensor:
    """[B, H] after the drafter's final norm for `block` [B, H], the embeddings of [last token, mask, mask, ...].

    `taps` are the trunk's residual streams [n, H] after each of target_layer_ids, in that order; the block stands at
    positions n, n+1, ... `causal` says per kind of layer whether a row of the block is kept from seeing later rows.
    The other keywords step into known traps, to show that a comparison would notice.
    """
    eps, dim = config["rms_norm_eps"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    theta = config["rope_parameters"]["rope_theta"]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, factor(t[f"{name}.weight"]), eps)

    context = norm(torch.cat(taps, dim=-1) @ t["fc.weight"].T, "hidden_norm")
    n, size = len(context), len(block)
    rows_at = torch.arange(n, n + size) + gap
    keys_at = torch.cat([torch.arange(n), rows_at])
    x = block
    for index, kind in enumerate(config["layer_types"]):
        layer = f"layers.{index}"
        visible = torch.ones(size, n + size, dtype=torch.bool)
        if causal[kind]:
            visible &= keys_at[None, :] <= rows_at[:, None]
        if kind == "sliding_attention":
            visible &= rows_at[:, None] - keys_at[None, :] < config["sliding_window"]
        own = norm(x, f"{layer}.input_layernorm")
        seen = norm(context, f"{layer}.input_layernorm") if norm_context else context
        source = torch.cat([seen, own])  # the context goes in as it is, the same for every layer
        q_rows = own @ t[f"{layer}.self_attn.q_proj.weight"].T
        k_rows, v_rows = (source @ t[f"{layer}.self_attn.{name}_proj.weight"].T for name in "kv")
        outs = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            q = norm(q_rows[:, head * dim : (head + 1) * dim], f"{layer}.self_attn.q_norm")
            k = norm(k_rows[:, shared * dim : (shared + 1) * dim], f"{layer}.self_attn.k_norm")
            v = v_rows[:, shared * dim : (shared + 1) * dim]
            q, k = rope(q, rows_at, theta, dim), rope(k, keys_at, theta, dim)
            outs.append(attend(q, k, v, visible))
        x = x + torch.cat(outs, dim=-1) @ t[f"{layer}.self_attn.o_proj.weight"].T
        mlp_weights = (t[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + swiglu(norm(x, f"{layer}.post_attention_layernorm"), *mlp_weights)
    return norm(x, "norm")
