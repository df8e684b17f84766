"""Notes to be written as JSON under keys from an open space: nothing can be recited, everything must be copied."""

import json
import random

from training.data import names, records, words
from training.data.sample import Chat, Split, assistant, user
from training.data.styles import line_style

REQUESTS = [
    "Write as JSON with {}.",
    "Give me JSON for {}.",
    "Return {} as a JSON object.",
    "Answer with JSON only. Keys: {}.",
    "Read the note and fill in these keys: {}.",
    "Which values does the note hold for {}? Answer in JSON.",
    "Extract {} as JSON.",
    "Írd ki JSON formában. Kulcsok: {}.",
    "Gib das als JSON mit diesen Schlüsseln aus: {}.",
]
JOINS = [": ", " = ", " is ", " - ", "; ", " was ", " → ", " "]


def make(split: Split, index: int) -> Chat:
    rng = words.rng_for("coined notes", split, index)
    shown = names.several(rng, split, rng.randint(2, 8))
    values = {name: records.value(rng) for name in shown}
    wanted = shown[:] if rng.random() < 0.4 else words.some(rng, shown, 1, len(shown))
    spell = names.key_spelling(rng)
    answer = json.dumps({spell(name): values[name] for name in wanted}, ensure_ascii=False)
    request = rng.choice(REQUESTS).format(", ".join(map(spell, wanted)))
    # most notes name things as people do, the others as the keys are written
    label = names.label_spelling(rng) if rng.random() < 0.75 else spell
    text = _note(rng, {label(name): records.spoken_value(value) for name, value in values.items()})
    parts = [request, text] if rng.random() < 0.8 else [text, request]
    return Chat([user("\n\n".join(parts)), assistant(answer)])


def _note(rng: random.Random, shown: dict[str, str]) -> str:
    kind = rng.random()
    if kind < 0.4:
        line = line_style(rng)
        lines = [line(label, value) for label, value in shown.items()]
    elif kind < 0.5:
        return " ".join(f"The {label} is {value}." for label, value in shown.items())
    else:
        join = rng.choice(JOINS)
        lines = [f"{label}{join}{value}" for label, value in shown.items()]
        if rng.random() < 0.4:
            return rng.choice([", ", "; ", " | ", " / "]).join(lines)
    return "\n".join(lines)
