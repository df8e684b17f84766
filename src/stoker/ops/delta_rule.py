"""The gated delta rule as pure functions: token by token (step family) and in chunks of 64 (prefill family), in fp32.

Per token and value head, on a state S [K, V]:  S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q.
"""

import torch
from torch import Tensor

from stoker.ops.family import CHUNK
from stoker.ops.norm import l2_norm


def delta_rule_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [T, HK, K], v [T, HV, V], g and beta [T, HV], state [B, HV, K, V] -> out [T, HV, V] and the next state.

    `rows` [B, L] names the i-th token of each sequence, T where a sequence is shorter.
    """
    tokens = q.shape[0]
    q, k, v, g, beta = (x[rows] for x in _padded(q, k, v, g, beta))  # [B, L, ...]
    s = state
    outputs = []
    for i in range(rows.shape[1]):
        s = s * torch.exp(g[:, i])[..., None, None]
        read = torch.matmul(k[:, i, :, None], s)  # S^T k as [B, HV, 1, V]
        change = beta[:, i, :, None, None] * (v[:, i, :, None] - read)
        s = s + k[:, i, :, :, None] * change
        outputs.append(torch.matmul(q[:, i, :, None], s)[:, :, 0])
    return _scatter(torch.stack(outputs, dim=1), rows, tokens), s


def delta_rule_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """As delta_rule_steps, with `rows` [B, C, 64]: token p of a sequence lies in chunk p // 64 at place p % 64.

    Within a chunk the updates d solve a unit lower-triangular system (I + A) D = beta (V - decayed K S), where
    A[i, j] = beta_i exp(G_i - G_j) k_i.k_j for j < i and G is the running sum of g.
    """
    tokens = q.shape[0]
    q, k, v, g, beta = (x[rows] for x in _padded(q, k, v, g, beta))  # [B, C, 64, ...]
    q, k, v, g, beta = (x.transpose(2, 3).contiguous() for x in (q, k, v, g, beta))  # [B, C, HV, 64, ...]
    running = g.cumsum(-1)  # G [B, C, HV, 64]
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = torch.exp((running[..., :, None] - running[..., None, :]).masked_fill(upper, -torch.inf))
    k_beta, since_start = k * beta[..., None], torch.exp(running)[..., None]
    system = torch.matmul(k_beta, k.transpose(-1, -2)) * decay
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat([v * beta[..., None], k_beta * since_start], dim=-1),
        upper=False,
        unitriangular=True,
    )
    own, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * decay
    q_decayed = q * since_start
    k_to_end = (k * torch.exp(running[..., -1:] - running)[..., None]).transpose(-1, -2)

    s = state
    outputs = []
    for c in range(rows.shape[1]):
        change = own[:, c] - torch.matmul(from_state[:, c], s)  # d of all 64 tokens
        outputs.append(torch.matmul(q_decayed[:, c], s) + torch.matmul(scores[:, c], change))
        s = s * since_start[:, c, :, -1:] + torch.matmul(k_to_end[:, c], change)
    return _scatter(torch.stack(outputs, dim=1).transpose(2, 3), rows, tokens), s


def _padded(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Normalises q and k, spreads key heads over value heads, and adds a row T that leaves a state as it is."""
    spread = v.shape[1] // k.shape[1]
    q = l2_norm(q) * q.shape[-1] ** -0.5
    k = l2_norm(k)
    q, k = q.repeat_interleave(spread, dim=1), k.repeat_interleave(spread, dim=1)
    return tuple(torch.cat([x.float(), x.new_zeros(1, *x.shape[1:]).float()]) for x in (q, k, v, g, beta))


def _scatter(values: Tensor, rows: Tensor, tokens: int) -> Tensor:
    """Undoes the gather by `rows`: values [*rows.shape, HV, V] -> [T, HV, V]."""
    out = values.new_empty(tokens + 1, *values.shape[-2:])
    out[rows.flatten()] = values.reshape(-1, *values.shape[-2:])
    return out[:tokens]
