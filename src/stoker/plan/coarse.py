"""A model known only by its parameter counts, for measured rows whose shapes nobody published: enough to check that the
arithmetic stays sane on strangers, not enough to plan with."""

from stoker.plan.evidence import Row
from stoker.plan.shapes import Model, Weight
from stoker.weights.groups import DENSE

TYPICAL_LAYERS = 40


def from_counts(row: Row) -> Model | None:
    """Reads its active parameters once per token; no KV cache, no drafts."""
    if not row.active_b:
        return None
    return Model(
        name=row.model, family="unknown", hidden_size=1, layer_types=("unknown",) * TYPICAL_LAYERS, num_heads=1,
        num_kv_heads=1, head_dim=1, vocab_size=1, max_positions=1 << 20, experts=0, top_k=0, sliding_window=0,
        mtp_layers=0, delta=None,
        weights=(Weight("all", DENSE, DENSE, (round(row.active_b * 1e9 / 4096), 4096)),),
    )  # fmt: skip
