"""A DGX Spark on paper: bytes a step of Qwen3.5-122B-A10B reads over the bandwidth the box delivers, plus a fixed time.

Two kinds of numbers are fitted, and the rows they come from are no evidence for them: the fixed time of a step (from
plain decoding at 28.2 tokens/s) and, per kind of text, how many experts its tokens choose among (from the DFlash-12
rows). Every other published row is a check. Times from here are predictions, never measurements.
"""

from dataclasses import dataclass, replace

GB = 1e9
BANDWIDTH = 227 * GB  # bytes/s that people measure on the box, of 273 on paper

# Shapes of Qwen3.5-122B-A10B
HIDDEN, LAYERS, DELTA_LAYERS, FULL_LAYERS = 3072, 48, 36, 12
EXPERTS, TOP_K, EXPERT_WIDTH, VOCAB = 256, 8, 1024, 248_320
BF16, FP8, INT8 = 2.0, 1.0, 1.0
INT4 = 0.5 + (2.0 + 0.5) / 128  # a weight, and its share of an fp16 scale and a 4-bit zero point per 128

EXPERT = 3 * HIDDEN * EXPERT_WIDTH  # weights of one routed expert, and of the shared one
ATTENTION = HIDDEN * (32 * 256 * 2 + 2 * 2 * 256) + 32 * 256 * HIDDEN  # q with its gate, k, v; o
DELTANET = HIDDEN * (12_288 + 8_192 + 2 * 64) + 8_192 * HIDDEN  # q k v, z, a and b; out
ROUTER = HIDDEN * EXPERTS
HEAD = VOCAB * HIDDEN
STATE = 64 * 128 * 128 * 4 * DELTA_LAYERS  # fp32 bytes of the recurrent state
KV_PER_TOKEN = FULL_LAYERS * 2 * 2 * 256 * BF16
MTP_KV_PER_TOKEN = KV_PER_TOKEN / FULL_LAYERS

MTP_DENSE = 2 * HIDDEN * HIDDEN + ATTENTION + EXPERT + ROUTER  # weights of the layer without routed experts
DFLASH_LAYER = HIDDEN * (4_096 + 2 * 1_024) + 4_096 * HIDDEN + 3 * HIDDEN * 9_216
DFLASH = 6 * DFLASH_LAYER + 8 * HIDDEN * HIDDEN  # and fc over eight taps
DFLASH_OBSERVE = 6 * 2 * HIDDEN * 1_024 + 8 * HIDDEN * HIDDEN  # what committed tokens read of it
DFLASH_KV_PER_TOKEN, DFLASH_WINDOW = 2 * 1_024 * BF16, 4_096  # per layer; five of six slide


@dataclass(frozen=True)
class Weights:
    """Bytes per weight of the parts that recipes differ in."""

    shared: float = BF16
    head: float = BF16
    mtp: float = BF16
    dflash: float = BF16
    draft_vocab: int = VOCAB  # tokens that drafters guess among


PLAIN = Weights()
HYBRID = Weights(shared=FP8, head=INT8)


@dataclass(frozen=True)
class Spark:
    """`fixed_s` of every step is no reading: launches, host work, what bandwidth does not explain."""

    fixed_s: float
    weights: Weights = PLAIN
    context: int = 0  # tokens
    bandwidth: float = BANDWIDTH

    @property
    def fixed_bytes(self) -> float:
        """What a verify step reads whatever it verifies."""
        weights = self.weights
        return (
            (DELTA_LAYERS * DELTANET + FULL_LAYERS * ATTENTION) * INT4
            + LAYERS * (EXPERT * weights.shared + ROUTER * BF16)
            + HEAD * weights.head
            + 2 * STATE
            + self.context * KV_PER_TOKEN
        )

    @property
    def expert_bytes(self) -> float:
        """One distinct expert more in every layer."""
        return LAYERS * EXPERT * INT4

    @property
    def draft_head_bytes(self) -> float:
        return self.weights.draft_vocab * HIDDEN * self.weights.head

    @property
    def mtp_layer_bytes(self) -> float:
        return (MTP_DENSE + TOP_K * EXPERT) * self.weights.mtp + self.context * MTP_KV_PER_TOKEN

    @property
    def mtp_pass_bytes(self) -> float:
        """Layer and head for one drafted token."""
        return self.mtp_layer_bytes + self.draft_head_bytes

    @property
    def dflash_bytes(self) -> float:
        """One block, however deep."""
        cached = self.context + 5 * min(self.context, DFLASH_WINDOW)
        return DFLASH * self.weights.dflash + self.draft_head_bytes + cached * DFLASH_KV_PER_TOKEN

    def verify_s(self, distinct: float, requests: int = 1) -> float:
        """A verify step that touches that many experts per layer; every request has a state and a context to read."""
        own = 2 * STATE + self.context * KV_PER_TOKEN
        return self.fixed_s + (self.fixed_bytes + (requests - 1) * own + distinct * self.expert_bytes) / self.bandwidth

    def draft_s(self, drafter: str, depth: int) -> float:
        if not depth or drafter == "lookup":
            return 0.0
        return (depth * self.mtp_pass_bytes if drafter == "mtp" else self.dflash_bytes) / self.bandwidth

    def tokens_per_s(self, drafter: str, depth: int, accepted: float, pool: float) -> float:
        """`accepted` tokens are emitted per step."""
        return accepted / (self.verify_s(distinct(1 + depth, pool)) + self.draft_s(drafter, depth))


def distinct(tokens: float, pool: float) -> float:
    """Experts per layer that `tokens` tokens touch, each choosing 8 of `pool` by itself."""
    return pool * (1.0 - (1.0 - TOP_K / pool) ** tokens)


@dataclass(frozen=True)
class Row:
    """A published measurement on one DGX Spark, one request at a time."""

    tokens_per_s: float
    drafter: str  # "", "mtp" or "dflash"
    depth: int
    accepted: float  # tokens per step
    weights: Weights
    text: str  # whose pool of experts applies
    context: int = 0
    scope: str = "decode"  # or "end to end", which includes prefill
    fits: str = ""  # the parameter this row was used to fit; a row without one is a check
    required: bool = False  # one of the six rows the simulation must meet within 10 %


LONG = 100_000  # tokens of context of the agent rows
PUBLISHED = (
    Row(28.2, "", 0, 1.0, PLAIN, "prose", fits="fixed time", required=True),
    Row(30.4, "", 0, 1.0, replace(PLAIN, shared=FP8), "prose"),
    Row(32.7, "", 0, 1.0, replace(PLAIN, head=INT8), "prose"),
    Row(36.0, "", 0, 1.0, HYBRID, "prose", required=True),
    Row(33.7, "mtp", 2, 2.24, PLAIN, "prose"),
    Row(40.5, "mtp", 2, 2.77, PLAIN, "code"),
    Row(39.9, "mtp", 2, 2.88, PLAIN, "agent", context=LONG),
    Row(51.6, "mtp", 2, 2.6, HYBRID, "mixed", scope="end to end", required=True),
    Row(33.2, "dflash", 12, 2.3, PLAIN, "prose", fits="experts of prose", required=True),
    Row(54.5, "dflash", 12, 5.4, PLAIN, "code", fits="experts of code", required=True),
    Row(81.0, "dflash", 12, 8.66, PLAIN, "agent", context=LONG, fits="experts of agent turns", required=True),
    Row(59.0, "dflash", 12, 6.4, HYBRID, "mixed", scope="end to end"),
)


@dataclass(frozen=True)
class Fitted:
    fixed_s: float
    pools: dict[str, float]  # experts per layer that tokens of a text choose among

    def predict(self, row: Row) -> float:
        box = Spark(self.fixed_s, row.weights, row.context)
        return box.tokens_per_s(row.drafter, row.depth, row.accepted, self.pools[row.text])


def fit() -> Fitted:
    """The fixed time from the plain row, each pool from its DFlash row; "mixed" is the mean of prose and code."""
    plain = next(row for row in PUBLISHED if row.fits == "fixed time")
    fixed_s = 1.0 / plain.tokens_per_s - Spark(0.0, plain.weights).verify_s(TOP_K)
    pools: dict[str, float] = {}
    for row in PUBLISHED:
        if row.fits.startswith("experts"):
            low, high = float(TOP_K), float(EXPERTS)
            for _ in range(60):
                pool = (low + high) / 2
                fast = Fitted(fixed_s, {row.text: pool}).predict(row) > row.tokens_per_s
                low, high = (pool, high) if fast else (low, pool)
            pools[row.text] = low
    return Fitted(fixed_s, pools | {"mixed": (pools["prose"] + pools["code"]) / 2})
