"""Invoices and the JSON that says the same: 320 training layouts and 24 that training never sees."""

import json
import random
from dataclasses import dataclass
from typing import Any

from training.data import words
from training.data.invoice_parts import CURRENCIES, DATES, HELD_KEYS, KEYS, MONEY, Layout, layout
from training.data.sample import Chat, Split, assistant, user

TRAIN_LAYOUTS = tuple(f"L{i:03d}" for i in range(320))
UNSEEN_LAYOUTS = tuple(f"H{i:02d}" for i in range(24))

REQUESTS = [
    "Extract the invoice as JSON with these keys: {keys}.",
    "Read this invoice and answer with JSON only. Keys: {keys}.",
    "Return a JSON object with {keys} for the following invoice.",
    "Which values does this invoice hold for {keys}? Answer in JSON.",
    "Turn the invoice below into JSON ({keys}).",
    "Írd ki a számla adatait JSON formában. Kulcsok: {keys}.",
    "Gib die Rechnung als JSON mit diesen Schlüsseln aus: {keys}.",
]


@dataclass(frozen=True)
class Invoice:
    fields: dict[str, str]  # as printed
    currency: str
    symbol: str
    items: list[tuple[str, int, int]]  # description, quantity, price in cents
    net: int
    tax: int

    @property
    def total(self) -> int:
        return self.net + self.tax


def make(split: Split, index: int) -> Chat:
    rng = words.rng_for("invoice", split, index)
    held_out = split == "unseen"
    shape = layout(rng.choice(UNSEEN_LAYOUTS if held_out else TRAIN_LAYOUTS), held_out)
    invoice = draw(rng, shape)
    keys = {field: rng.choice(options) for field, options in (HELD_KEYS if held_out else KEYS).items()}
    answer, described = answer_for(rng, invoice, shape, keys)
    return posed(rng, rng.choice(REQUESTS).format(keys=described), invoice, shape, answer)


def posed(rng: random.Random, request: str, invoice: Invoice, shape: Layout, answer: dict[str, Any]) -> Chat:
    """Request and printed invoice in either order, and the answer as JSON."""
    text = render(rng, invoice, shape)
    prompt = f"{request}\n\n{text}" if rng.random() < 0.8 else f"{text}\n\n{request}"
    indent = 2 if rng.random() < 0.25 else None
    if indent:
        prompt += "\n\nIndent the JSON."
    return Chat([user(prompt), assistant(json.dumps(answer, ensure_ascii=False, indent=indent))])


def draw(rng: random.Random, shape: Layout) -> Invoice:
    date = DATES[shape.date]
    fields = {
        "number": words.code(rng),
        "date": date(*words.day(rng)),
        "due": date(*words.day(rng)),
        "vendor": words.company(rng),
        "customer": words.person(rng) if rng.random() < 0.5 else words.company(rng),
        "address": words.address(rng),
        "tax_id": f"{rng.choice(['HU', 'DE', 'FR', 'GB', 'AT', ''])}{rng.randint(10_000_000, 99_999_999)}",
        "order": words.code(rng),
    }
    currency = rng.choice(sorted(CURRENCIES))
    items = [(words.product(rng), rng.randint(1, 40), rng.randint(50, 90_000)) for _ in range(rng.randint(1, 4))]
    net = sum(quantity * price for _, quantity, price in items)
    tax = net * rng.choice([5, 7, 10, 18, 19, 20, 27]) // 100
    return Invoice(fields, currency, rng.choice(CURRENCIES[currency]), items, net, tax)


def render(rng: random.Random, invoice: Invoice, shape: Layout) -> str:
    def money(cents: int) -> str:
        text = MONEY[shape.money](cents)
        return f"{invoice.symbol} {text}" if shape.symbol_first else f"{text} {invoice.symbol}"

    bare = MONEY[shape.money]
    header = [shape.line(shape.labels[field], invoice.fields[field]) for field in shape.fields]
    rows = [
        shape.row(place, name, str(quantity), bare(price), bare(quantity * price))
        for place, (name, quantity, price) in enumerate(invoice.items, start=1)
    ]
    sums = [
        shape.line(shape.labels[field], money(cents))
        for field, cents in (("net", invoice.net), ("tax", invoice.tax), ("total", invoice.total))
    ]
    blocks = [[shape.heading], header, rows, sums]
    if rng.random() < 0.2:  # something to skip over
        blocks.insert(
            rng.randint(1, 4), [rng.choice(["Thank you for your order.", "Köszönjük a vásárlást!", "Page 1/1"])]
        )
    return "\n\n".join("\n".join(block) for block in blocks)


def answer_for(rng: random.Random, invoice: Invoice, shape: Layout, keys: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Some of the fields, under their keys; amounts as plain numbers, everything else as printed."""
    chosen = [field for field in shape.fields if rng.random() < 0.8] or list(shape.fields[:1])
    chosen += [field for field in ("currency", "net", "tax") if rng.random() < 0.5] + ["total"]
    values: dict[str, Any] = {
        **invoice.fields,
        "currency": invoice.currency,
        "net": invoice.net / 100,
        "tax": invoice.tax / 100,
        "total": invoice.total / 100,
    }
    used: dict[str, str] = {}
    for field in chosen:  # two fields may not share a key
        used.setdefault(keys[field], field)
    answer = {key: values[field] for key, field in used.items()}
    described = ", ".join(answer)
    if rng.random() < 0.6 and keys["items"] not in answer:
        parts = [part for part in ("description", "quantity", "price", "amount") if rng.random() < 0.7] or [
            "description"
        ]
        rows = [
            {"description": name, "quantity": quantity, "price": price / 100, "amount": quantity * price / 100}
            for name, quantity, price in invoice.items
        ]
        answer[keys["items"]] = [{keys[part]: row[part] for part in parts} for row in rows]
        described += f", {keys['items']} ({', '.join(keys[part] for part in parts)})"
    return answer, described
