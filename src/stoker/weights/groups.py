"""Which part of the network a tensor belongs to, by its published name. No torch."""

from stoker.weights.names import is_mtp, is_rotary_table, is_vision

ROUTED, SHARED, ROUTER = "routed experts", "shared experts", "router"
ATTENTION, DELTANET, DENSE = "attention", "DeltaNet", "dense MLP"
HEAD, EMBEDDING, NORMS = "head", "embedding", "norms"
MTP, VISION, OTHER = "MTP", "vision", "other"

# In the order they are shown: what a step reads first, what it never reads last.
GROUPS = (ROUTED, SHARED, DENSE, DELTANET, ATTENTION, HEAD, ROUTER, NORMS, EMBEDDING, MTP, VISION, OTHER)

_PARTS = (
    (".mlp.experts.", ROUTED),
    (".mlp.shared_expert.", SHARED),
    (".mlp.shared_expert_gate.", ROUTER),
    (".mlp.gate.", ROUTER),
    (".mlp.", DENSE),
    (".linear_attn.", DELTANET),
    (".self_attn.", ATTENTION),
    ("lm_head.", HEAD),
    ("embed_tokens.", EMBEDDING),
    ("layernorm.", NORMS),
)


def group_of(name: str) -> str:
    """The group of a tensor or of a module. The whole MTP head is one group, whatever its parts are."""
    if is_mtp(name):
        return MTP
    if is_vision(name):
        return VISION
    if is_rotary_table(name):
        return OTHER
    dotted = f"{name}."  # so that "mlp.gate" and "mlp.gate.weight" match alike, and "mlp.gate_proj" does not
    for part, group in _PARTS:
        if part in dotted:
            return group
    return NORMS if dotted.startswith(("norm.", "model.norm.")) or ".norm." in dotted else OTHER
