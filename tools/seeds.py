"""Writes docs/seeds.md: every figure of the five documents this project started from, beside what the planner says.

    python -m tools.seeds docs/seeds.md

data/seeds.csv has the figures. `how` says how one is predicted: a kind and `name=value` words, read by `predicted`.
A figure nobody can predict from bytes (an acceptance rate, a start-up time, a score) says so.
"""

import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.errors import RequestError
from stoker.plan.acceptance import acceptance
from stoker.plan.advice import verdicts
from stoker.plan.answer import parse_draft
from stoker.plan.cases import SHORT_CONTEXT, SHORT_PROMPT
from stoker.plan.catalog import DATA, GIB, Box, boxes, find_box, find_model, find_scheme
from stoker.plan.evidence import MIXED
from stoker.plan.memory import Ask, budget
from stoker.plan.speed import Speed, first_token_s, predict, prefill_tokens_per_s
from stoker.plan.vllm_pool import Pool, pool_of
from stoker.sizes.memory import KV_ITEM
from stoker.sizes.step import Draft
from stoker.sizes.weights import WeightBytes
from stoker.weights.names import MTP, SHARED, VISION

CLOSE = 0.15  # an error up to which a figure counts as reproduced
TITLES = {
    "000": "The 122B on one Spark, and the boxes that fit it (June 2026)",
    "001": "A 122B model on a single DGX Spark, measured (April 2026)",
    "002": "Qwen 3.5 122B hits 40 tok/s (May 2026)",
    "003": "28.3 to 51 tok/s, the forum thread (April 2026)",
    "004": "Spark results and model comparison (May 2026)",
}
INTRODUCTION = """
Written by `make seeds` from `src/stoker/plan/data/seeds.csv`; do not edit. Nothing here was run on the hardware it is
about: *predicted* is what the planner computes from shapes, bytes and a fit to published rows (docs/plan.md), with the
range of four in five rows and the physical limit, before `stoker plan` corrects it by rows like the case at hand: these
figures are among those rows, and would be compared with themselves. Rows of these documents are among those the fit
saw; how well it does on sources it did not see is in docs/plan.md.

*Reproduced*: within 15 %, or exact where bytes are counted. *Contradicted*: by arithmetic, by another source, or (then
it says so) by a prediction that misses a measurement, which stands. *Cannot be run here*: needs the box, and bytes do
not decide it; data of boxes is taken over, not found out.
"""
VERDICTS = {
    "reproduced": "reproduced",
    "contradicted": "contradicted",
    "missed": "contradicted by our prediction; the measurement stands",
    "cannot": "cannot be run here",
}
Words = dict[str, str]


@dataclass(frozen=True)
class Figure:
    document: str
    figure: str
    published: str
    value: str  # a number, a range LOW..HIGH, or empty
    how: str
    verdict: str  # where it is not to be found by comparing: contradicted or cannot
    remark: str


@dataclass(frozen=True)
class Line:
    figure: Figure
    predicted: str
    error: float | None  # to the nearer end of a published range
    verdict: str


def figures() -> list[Figure]:
    with (DATA / "seeds.csv").open(encoding="utf-8", newline="") as file:
        return [Figure(**row) for row in csv.DictReader(file)]


def lines() -> list[Line]:
    return [_line(figure) for figure in figures()]


def _line(figure: Figure) -> Line:
    number, shown = predicted(figure.how) if figure.how else (None, "–")
    error = _error(number, figure.value)
    if figure.verdict:
        verdict = VERDICTS[figure.verdict]
    elif figure.how.startswith("box "):
        verdict = f"{VERDICTS['cannot']}: taken over"
    elif (agrees := _agrees(figure.how, number, shown)) is not None:
        verdict = VERDICTS["reproduced" if agrees else "missed"]
    elif error is None:
        verdict = VERDICTS["cannot"]
    else:
        verdict = VERDICTS["reproduced" if abs(error) <= CLOSE else "missed"]
    return Line(figure, shown, error, verdict)


def _agrees(how: str, number: float | None, shown: str) -> bool | None:
    """Where a figure is a claim (expect=fits, expect=good, expect=below_1), whether the planner says so too."""
    wanted = next((word.removeprefix("expect=").replace("_", " ") for word in how.split() if "expect=" in word), None)
    if wanted is None:
        return None
    return number is not None and number < 1.0 if wanted == "below 1" else shown.startswith(wanted)


def _error(number: float | None, published: str) -> float | None:
    if number is None or not published:
        return None
    low, _, high = published.partition("..")
    nearest = min(max(number, float(low)), float(high or low))
    return number / nearest - 1 if nearest else None


def predicted(how: str) -> tuple[float | None, str]:
    """The number, and how it is shown."""
    kind, *rest = how.split()
    words = dict(word.split("=", 1) for word in rest)
    if kind not in KINDS:
        raise RequestError(f"seeds.csv: {kind!r} is no way to predict a figure; known: {', '.join(KINDS)}.")
    return KINDS[kind](words)


def _parts(words: Words) -> tuple[Box, WeightBytes, Draft]:
    model = find_model(words.get("model", "122b"))
    return (
        find_box(words.get("box", "spark")),
        WeightBytes.of(model, find_scheme(words.get("weights", model.default_weights))),
        parse_draft(words.get("draft", "none")),
    )


def _predict(words: Words) -> Speed:
    box, weighed, draft = _parts(words)
    kind = words.get("kind", MIXED)
    asked = float(words["accept"]) if "accept" in words else None
    return predict(
        find_model(words.get("model", "122b")), weighed, box, draft,
        accepted=acceptance(draft, kind, asked).tokens_per_step, kind=kind,
        context=int(words.get("context", SHORT_CONTEXT)), users=int(words.get("users", 1)),
        kv_item=KV_ITEM[words.get("kv", "bf16")], engine=words.get("engine", "vLLM"), backend=words.get("backend", ""),
    )  # fmt: skip


def _speed(words: Words) -> tuple[float, str]:
    s = _predict(words)
    number = s.per_user if words.get("per") == "user" else s.tokens_per_s
    low, high = number * s.low_factor, min(number * s.high_factor, s.limit)
    if "output" in words:  # end to end: the prompt, as one step, and then the answer
        first = _predict({**words, "draft": f"lookup:{SHORT_PROMPT - 1}", "accept": "1"}).step_s
        answer = float(words["output"])
        number = answer / (first + answer / number)
    return number, f"≈ {number:.1f} ({low:.1f}–{high:.1f}, limit {s.limit:.0f})"


def _steps(words: Words) -> tuple[float, str]:
    number = 1.0 / _predict(words).step_s
    return number, f"≈ {number:.1f} steps/s"


def _ratio(words: Words) -> tuple[float, str]:
    """Of two speeds, or of the bytes two plans read: words of the second begin with a colon."""
    first = {k: v for k, v in words.items() if not k.startswith(":")}
    second = {**first, **{k[1:]: v for k, v in words.items() if k.startswith(":")}}
    if words.get("of") == "bytes":
        number = _predict(first).reads.total / _predict(second).reads.total
    else:
        number = _predict(first).tokens_per_s / _predict(second).tokens_per_s
    return number, f"≈ {number:.2f}"


def _first(words: Words) -> tuple[float, str]:
    box, weighed, _ = _parts(words)
    model = find_model(words.get("model", "122b"))
    number = first_token_s(model, weighed, box, int(words["prompt"]), cached=int(words.get("cached", 0)))
    return number, f"≈ {number:.2f} s"


def _prefill(words: Words) -> tuple[float, str]:
    box, _, _ = _parts(words)
    number = prefill_tokens_per_s(find_model(words.get("model", "122b")), box, "vLLM", int(words["prompt"]))
    return number, f"≈ {number:,.0f} tok/s"


def _weights(words: Words) -> tuple[float, str]:
    """Bytes on disk or per device; `less` leaves groups out."""
    _, weighed, _ = _parts(words)
    total = weighed.total
    for group in words.get("less", "").split(","):
        total -= weighed.groups.get({"mtp": MTP, "vision": VISION}.get(group, ""), 0)
    if words.get("only") == "mtp":
        total = weighed.groups[MTP]
    total //= int(words.get("devices", 1))
    unit = words.get("unit", "GiB")
    number = total / (GIB if unit == "GiB" else 1e9)
    return number, f"{number:.2f} {unit} ({total:,} bytes)"


def _pool(words: Words) -> tuple[float, str]:
    model = find_model("122b")
    share = float(words.get("utilization", "0.90"))
    ask = Ask(131072, 4, Draft("mtp", 2), "fp8", "vLLM")
    planned = budget(model, WeightBytes.of(model, find_scheme("nvfp4")), find_box("spark"), ask, share)
    pool: Pool = planned.pool if planned.pool else pool_of(model, 0, context=1, depth=0, kv_item=1.0, mtp=False)
    if "gib" in words:
        pool = pool_of(model, int(float(words["gib"]) * GIB), context=131072, depth=2, kv_item=1.0, mtp=True)
    answers: dict[str, tuple[float, str]] = {
        "tokens": (float(pool.tokens), f"{pool.tokens:,} ({pool.blocks} blocks of {pool.block_tokens:,})"),
        "concurrency": (pool.concurrency, f"{pool.concurrency:.2f}×"),
        "gib": (pool.bytes / GIB, f"{pool.bytes / GIB:.2f} GiB"),
    }
    return answers[words["what"]]


def _box(words: Words) -> tuple[float, str]:
    box = find_box(words["key"])
    number = float(getattr(box, words["field"]))
    return number, f"{number:g} (in boxes.toml)"


def _model(words: Words) -> tuple[float, str]:
    model = find_model(words.get("model", "122b"))
    drafter = model.drafter.parameters / 1e9 if model.drafter else 0.0
    answers = {
        "parameters": model.parameters / 1e9,
        "active": model.active_parameters / 1e9,
        "drafter": drafter,
        "positions": float(model.max_positions),
        "linear": float(model.layer_types.count("linear_attention")),
        "layers": float(model.layers),
        "shared_tensors": float(sum(w.count for w in model.weights if w.group == SHARED)),
        "mtp_tensors": float(_mtp_tensors(words)),
    }
    number = answers[words["what"]]
    return number, f"{number:,.2f}".rstrip("0").rstrip(".")


def _mtp_tensors(words: Words) -> int:
    """As Qwen3.5 publishes them: gate, up and down of every expert apart."""
    model = find_model(words.get("model", "122b"))
    own = [w for w in model.weights if w.group == MTP]
    return sum(
        3 * model.experts if "gate_up_proj" in w.name else 0 if "experts.down_proj" in w.name else 1 for w in own
    )


def _fits(words: Words) -> tuple[None, str]:
    box, weighed, draft = _parts(words)
    if "card" in words:  # a card of so many GB; only its memory matters
        box = replace(find_box("rtx-5090"), visible_gib=float(words["card"]) * 1e9 / GIB)
    ask = Ask(int(words.get("context", 8192)), 1, draft, "bf16", words.get("engine", "vLLM"))
    planned = budget(find_model(words.get("model", "122b")), weighed, box, ask)
    free = planned.free_bytes / GIB
    return None, f"fits, {free:.1f} GiB left" if planned.fits else f"does not fit, {-free:.1f} GiB missing"


def _verdict(words: Words) -> tuple[None, str]:
    model, weighed = find_model("122b"), WeightBytes.of(find_model("122b"), find_scheme("nvfp4"))
    judged = verdicts(model, weighed, find_box("spark"), Ask(131072, 4, Draft("mtp", 2), "fp8", "vLLM"))
    found = judged[int(words["number"]) - 1]
    return None, f"{found.grade}: {found.because}"


def _arithmetic(words: Words) -> tuple[float, str]:
    """A quotient, product or sum of published numbers: value=a/b."""
    text = words["value"]
    for sign, apply in (("/", lambda a, b: a / b), ("x", lambda a, b: a * b), ("+", lambda a, b: a + b)):
        if sign in text:
            numbers = [float(part) for part in text.split(sign)]
            number = numbers[0]
            for other in numbers[1:]:
                number = apply(number, other)
            return number, f"{number:,.4g} = {text.replace('x', ' × ').replace('/', ' / ').replace('+', ' + ')}"
    raise RequestError(f"seeds.csv: {text!r} is no quotient, product or sum.")


KINDS: dict[str, Callable[[Words], tuple[float | None, str]]] = {
    "speed": _speed, "steps": _steps, "ratio": _ratio, "first": _first, "prefill": _prefill, "weights": _weights,
    "pool": _pool, "box": _box, "model": _model, "fits": _fits, "verdict": _verdict, "arithmetic": _arithmetic,
}  # fmt: skip

CENTS_PER_KWH = 30.0
YEARS = 3.0


def costs() -> list[str]:
    """Energy and wear of a million tokens of agent text, predicted, for the boxes that hold the 122B."""
    rows = []
    model = find_model("122b")
    for box in boxes():
        amd = box.architecture.startswith(("gfx", "metal"))
        weights, draft = ("ud-q4_k", "none") if amd else ("int4+fp8+int8head", "dflash:12")
        engine = "llama.cpp" if amd else "vLLM"
        ask = Ask(32_768, 1, parse_draft(draft), "bf16", engine)
        if not budget(model, WeightBytes.of(model, find_scheme(weights)), box, ask).fits:
            rows.append(f"| {box.name} | {weights} | – | does not fit | | |")
            continue
        s = _predict({"box": box.key, "weights": weights, "draft": draft, "kind": "agent", "context": "32768",
                      "engine": engine})  # fmt: skip
        kwh = box.power_w / s.tokens_per_s / 3.6
        wear = None if box.price_usd is None else box.price_usd / (YEARS * 365 * 86_400 * s.tokens_per_s / 1e6)
        rows.append(
            f"| {box.name} | {weights}, {draft} | ≈ {s.tokens_per_s:.0f} | {box.power_w:.0f} W | {kwh:.2f} kWh, "
            f"${kwh * CENTS_PER_KWH / 100:.2f} | {'–' if wear is None else f'${wear:.2f}'} |"
        )
    return rows


def page() -> str:
    found = lines()
    count = {
        name: sum(line.verdict.startswith(name) for line in found) for name in ("reproduced", "contradicted", "cannot")
    }
    text = [
        "# Every figure of the five documents",
        "",
        *INTRODUCTION.strip().splitlines(),
        "",
        f"{len(found)} figures: {count['reproduced']} reproduced, {count['contradicted']} contradicted, "
        f"{count['cannot']} cannot be run here.",
    ]
    for document, title in TITLES.items():
        text += [
            "",
            f"## {document}: {title}",
            "",
            "| figure | published | predicted | error | |",
            "|---|---|---|---|---|",
        ]
        for line in (line for line in found if line.figure.document == document):
            error = "" if line.error is None else f"{line.error:+.0%}" if abs(line.error) >= 0.005 else "0 %"
            remark = f": {line.figure.remark}" if line.figure.remark else ""
            figure = line.figure
            text.append(
                f"| {figure.figure} | {figure.published} | {line.predicted} | {error} | {line.verdict}{remark} |"
            )
    text += [
        "",
        "## Cost of a million tokens of agent text, 122B, one at a time",
        "",
        f"Predicted speed at 32K of context; power as in boxes.toml; ${CENTS_PER_KWH / 100:.2f} a kWh; the price over "
        f"{YEARS:g} years of use without pause. No document states a cost per million tokens.",
        "",
        "| box | recipe | tok/s | power | energy | wear |",
        "|---|---|---|---|---|---|",
        *costs(),
    ]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/seeds.md")
    target.write_text(page(), encoding="utf-8")
    print(f"Wrote {target}.")
