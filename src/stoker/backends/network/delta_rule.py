"""The gated delta rule as pure functions over anchored chunks of tokens, in fp32: 64 in prefill, 16 in steps.

Per token and value head, on a state S [K, V]:  S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q.
Within a chunk the updates d solve a unit lower-triangular system (I + A) D = beta (V - decayed K S), where
A[i, j] = beta_i exp(G_i - G_j) k_i.k_j for j < i and G is the running sum of g.

A place of a chunk without a token has g = beta = 0: it leaves the state as it is and adds exact zeros to the others, so
a token's bits depend on the tokens before it and on where the chunk begins, not on how much of it is filled.
"""

from functools import lru_cache

import torch
from torch import Tensor

from stoker.backends.family import CHUNK
from stoker.backends.network.norm import l2_norm


def delta_rule_chunk(
    qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, advance: bool
) -> tuple[Tensor, Tensor | None]:
    """One chunk of L places for N sequences and heads: qk [N, 2 L, K] normalised queries, then keys, v [N, L, V], g and
    beta [N, L], state [N, K, V] -> outputs [N, L, V] and, if asked to `advance`, the state after the chunk."""
    places = v.shape[1]
    running = g.cumsum(-1)  # G
    lower, identity = _triangle(places, v.device)
    decay = torch.exp(running.unsqueeze(2) - running.unsqueeze(1) + lower)
    since_start = torch.exp(running).unsqueeze(2)
    beta = beta.unsqueeze(2)
    k = qk.narrow(1, places, places)
    against = torch.bmm(qk, k.transpose(1, 2))
    from_state = torch.bmm(qk, state)
    system = against.narrow(1, places, places) * decay * beta
    inverse = torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False, unitriangular=True)
    wanted = (v - since_start * from_state.narrow(1, places, places)) * beta
    change = torch.bmm(inverse, wanted)  # d of every place
    out = torch.bmm(against.narrow(1, 0, places) * decay, change)
    out = out.addcmul_(since_start, from_state.narrow(1, 0, places))
    if not advance:
        return out, None
    to_end = torch.exp(running[:, -1:] - running).unsqueeze(2)
    return out, torch.bmm((k * to_end).transpose(1, 2), change).addcmul_(state, since_start[:, -1:])


@lru_cache
def _triangle(places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """0 on and below the diagonal and -inf above it, and the identity."""
    with torch.inference_mode(False):
        above = torch.full((places, places), -torch.inf, device=device).triu(1)
        return above, torch.eye(places, device=device)


def delta_rule_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Prefill: q, k [T, HK, K], v [T, HV, V], g and beta [T, HV], state [B, HV, K, V] -> out [T, HV, V], next state.

    `rows` [B, C, 64] names the token at each place: token p of a sequence lies in chunk p // 64 at place p % 64, T
    stands for none. What does not depend on the state is computed for all chunks at once.
    """
    tokens = q.shape[0]
    q, k, v, g, beta = (x[rows] for x in _padded(q, k, v, g, beta))  # [B, C, 64, ...]
    q, k, v, g, beta = (x.transpose(2, 3).contiguous() for x in (q, k, v, g, beta))  # [B, C, HV, 64, ...]
    running = g.cumsum(-1)  # G [B, C, HV, 64]
    lower, _ = _triangle(CHUNK, q.device)
    decay = torch.exp(running[..., :, None] - running[..., None, :] + lower)
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
