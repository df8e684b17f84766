"""Invoices whose labels and JSON keys come from an open space, between ordinary ones.

Either the labels are coined and a key is the same name in another spelling (or shares a word with it), or the labels
are ordinary and the request says which key stands for which label.
"""

import random
from dataclasses import replace
from typing import Any

from training.data import invoices, names, words
from training.data.invoice_parts import KEYS, Layout, layout
from training.data.names import Name, Spelling
from training.data.sample import Chat, Split
from training.data.styles import line_style, row_style

SUMS = ("net", "tax", "total")
PARTS = ("description", "quantity", "price", "amount")
# what has no label on the paper
UNLABELLED = {"currency": "the currency", "items": "the list of items", **{part: f"the {part}" for part in PARTS}}
PAIRS = [
    "{key} for {label}",
    "{key} = {label}",
    "{key}: {label}",
    "{label} as {key}",
    "{label} -> {key}",
    "{key} ({label})",
]
PAIR_REQUESTS = [
    "Extract the invoice as JSON. Use these keys: {keys}.",
    "Read this invoice and answer with JSON only. Keys and what they stand for: {keys}.",
    "Turn this invoice into JSON, writing {keys}.",
    "Írd ki a számla adatait JSON formában, ezekkel a kulcsokkal: {keys}.",
]


def make(split: Split, index: int) -> Chat:
    rng = words.rng_for("coined invoice", split, index)
    return _coined_labels(rng, split) if rng.random() < 0.65 else _explained_keys(rng, split)


def _coined_labels(rng: random.Random, split: Split) -> Chat:
    shape = _layout(rng)
    share = rng.choice([0.3, 0.6, 1.0])
    fields = [field for field in (*shape.fields, *SUMS) if rng.random() < share]
    named = dict(zip(fields, names.several(rng, split, len(fields)), strict=True))
    label, key = names.label_spelling(rng), names.key_spelling(rng)
    shape = replace(shape, labels=shape.labels | {field: label(name) for field, name in named.items()})
    related = rng.random() < 0.3
    keys = _ordinary_keys(rng) | {
        field: key(_related(rng, split, name, list(named.values())) if related else name)
        for field, name in named.items()
    }
    if rng.random() < 0.3:  # no label matches this key: it stands between header and sums, where the currency is asked
        keys["currency"] = _unused(rng, split, key, keys)
    invoice = invoices.draw(rng, shape)
    answer, described = invoices.answer_for(rng, invoice, shape, keys)
    rows = answer.get(keys["items"])
    if isinstance(rows, list) and len(rows[0]) == len(PARTS) and rng.random() < 0.7:
        renamed: dict[str, str] = {}
        for part in ("items", *PARTS):  # all four columns are asked for, so their order says which is which
            renamed[part] = _unused(rng, split, key, keys | renamed)
        answer.pop(keys["items"])
        described = ", ".join([*answer, f"{renamed['items']} ({', '.join(renamed[part] for part in PARTS)})"])
        answer[renamed["items"]] = [{renamed[part]: row[keys[part]] for part in PARTS} for row in rows]
    request = rng.choice(invoices.REQUESTS).format(keys=described)
    return invoices.posed(rng, request, invoice, shape, answer)


def _unused(rng: random.Random, split: Split, key: Spelling, keys: dict[str, str]) -> str:
    """A coined key that no other field has."""
    while (made := key(names.name(rng, split))) in keys.values():
        pass
    return made


def _explained_keys(rng: random.Random, split: Split) -> Chat:
    shape = _layout(rng)
    key = names.key_spelling(rng)
    keys = {field: key(name) for field, name in zip(KEYS, names.several(rng, split, len(KEYS)), strict=True)}
    if rng.random() < 0.4:  # ordinary keys may stay; what they stand for is said all the same
        keys |= {field: chosen for field, chosen in _ordinary_keys(rng).items() if rng.random() < 0.4}
    invoice = invoices.draw(rng, shape)
    answer, _ = invoices.answer_for(rng, invoice, shape, keys)
    request = rng.choice(PAIR_REQUESTS).format(keys=_pairs(rng, answer, shape, keys))
    return invoices.posed(rng, request, invoice, shape, answer)


def _pairs(rng: random.Random, answer: dict[str, Any], shape: Layout, keys: dict[str, str]) -> str:
    """The keys of the answer in its order, each with the label it stands for."""
    form = rng.choice(PAIRS)
    fields = {key: field for field, key in reversed(keys.items())}

    def pair(key: str) -> str:
        field = fields[key]
        return form.replace("{key}", key).replace("{label}", shape.labels.get(field) or UNLABELLED[field])

    said = [pair(key) for key in answer]
    rows = answer.get(keys["items"])
    if isinstance(rows, list):
        parts = [part for part in PARTS if keys[part] in rows[0]]
        said.append(
            f"in it {', '.join(form.replace('{key}', keys[p]).replace('{label}', UNLABELLED[p]) for p in parts)}"
        )
    return ", ".join(said)


def _layout(rng: random.Random) -> Layout:
    """A layout that need not be one of the 320, more often than not with styles put together at random."""
    shape = layout(f"coined {rng.randint(0, 10**9)}", held_out=False)
    if rng.random() < 0.6:
        shape = replace(shape, line=line_style(rng), row=row_style(rng))
    return shape


def _ordinary_keys(rng: random.Random) -> dict[str, str]:
    return {field: rng.choice(options) for field, options in KEYS.items()}


def _related(rng: random.Random, split: Split, name: Name, others: list[Name]) -> Name:
    """Another name that shares a word with this one and with none of the others; now and then a stranger, to be found
    by the kind of its value and by its neighbours, since keys are listed in the order of the paper."""
    if rng.random() < 0.1:
        return names.name(rng, split)
    taken = {word for other in others if other != name for word in other}
    own = [word for word in name if word not in taken]
    if not own or rng.random() < 0.4:
        return name
    kept = rng.choice(own)
    if len(name) > 1 and rng.random() < 0.5:
        return (kept,)
    while (added := names.name(rng, split)[-1]) in {*taken, kept}:
        pass
    return (kept, added) if rng.random() < 0.5 else (added, kept)
