"""JSON records, notes turned into JSON under keys never listed twice alike, and log lines."""

import json
import random
from typing import Any

from training.data import words
from training.data.sample import Chat, Sample, Split, Text, assistant, user

# keys of records that training never contains
HELD_KEYS = ["wingspan", "berth", "alloy", "tenant", "curfew", "grain_size", "torque", "postmark", "shelf_mark", "tide"]
KEYS = words.listed(
    """
    id name title city date time price count color owner status code weight height width email phone size version
    score rank level source target street zip country unit note tag kind length speed pressure voltage brand model
    year author pages rating discount region team room floor gate seat platform duration distance temperature
    """
)
SERVICES = ["auth", "billing", "search", "mailer", "gateway", "storage", "scheduler", "worker", "cache", "metrics"]
LEVELS = ["INFO", "INFO", "INFO", "DEBUG", "WARNING", "ERROR"]
EVENTS = [
    "request {code} finished in {n} ms",
    "user {email} signed in",
    "retrying job {code}, attempt {n}",
    "disk usage at {n} percent",
    "connection to {word}-{n} lost",
    "cache miss for key {word}:{n}",
    "wrote {n} rows to table {word}",
    "payment {code} accepted",
    "timeout after {n} ms while calling {word}",
    "loaded configuration {word}.json",
]


def make(split: Split, index: int) -> Sample:
    rng = words.rng_for("records", split, index)
    if rng.random() < 0.5:
        return note(rng, split)
    first = record(rng, split)
    if rng.random() < 0.5:  # rows of one table share their keys
        more = [{key: _like(rng, example) for key, example in first.items()} for _ in range(rng.randint(2, 6))]
        return Text("\n".join(json.dumps(row, ensure_ascii=False) for row in [first, *more]))
    return Text(json.dumps(first, ensure_ascii=False, indent=rng.choice([2, 4])))


def record(rng: random.Random, split: Split) -> dict[str, Any]:
    keys = words.some(rng, HELD_KEYS if split == "unseen" else KEYS, 3, 8)
    values = {key: value(rng) for key in keys}
    if rng.random() < 0.2:
        values[keys[-1]] = {key: value(rng) for key in words.some(rng, KEYS, 1, 3) if split != "unseen"}
    return values


def note(rng: random.Random, split: Split) -> Chat:
    """Lines of "key: value" in words, to be written as JSON: copying, whatever the keys are."""
    keys = words.some(rng, HELD_KEYS if split == "unseen" else KEYS, 2, 7)
    values = {key: value(rng) for key in keys}
    join = rng.choice([": ", " = ", " is ", " - ", "; "])
    lines = [f"{key.replace('_', ' ')}{join}{spoken_value(said)}" for key, said in values.items()]
    if rng.random() < 0.5:
        rng.shuffle(lines)
    wanted = list(values) if rng.random() < 0.6 else words.some(rng, list(values), 1, len(values))
    answer = json.dumps({key: values[key] for key in wanted}, ensure_ascii=False)
    request = rng.choice(["Write as JSON with {}.", "Give me JSON for {}.", "Return {} as a JSON object."])
    text = rng.choice(["\n", ", "]).join(lines)
    return Chat([user(request.format(", ".join(wanted)) + "\n\n" + text), assistant(answer)])


def log(split: Split, index: int) -> Text:
    """Ten to thirty lines of one service, in one of five formats."""
    rng = words.rng_for("log", split, index)
    form, service = rng.randint(0, 4), rng.choice(SERVICES)
    year, month, date = words.day(rng)
    second = rng.randint(0, 80_000)
    lines = []
    for _ in range(rng.randint(10, 30)):
        second += rng.choice([0, 1, 1, 2, 5, 30])
        stamp = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        level = rng.choice(LEVELS)
        event = rng.choice(EVENTS).format(
            code=words.code(rng), n=rng.randint(1, 2000), email=words.email(rng), word=rng.choice(words.NOUNS)
        )
        lines.append(
            [
                f"{year}-{month:02d}-{date:02d} {stamp} {level} [{service}] {event}",
                f"{words.MONTHS[month - 1][:3]} {date:02d} {stamp} {service}[{100 + form}]: {event}",
                f'{{"time": "{stamp}", "level": "{level.lower()}", "service": "{service}", "message": "{event}"}}',
                f"[{stamp}] {level:<7} {service}: {event}",
                f'level={level.lower()} ts={year}-{month:02d}-{date:02d}T{stamp}Z service={service} msg="{event}"',
            ][form]
        )
    return Text("\n".join(lines))


def value(rng: random.Random) -> Any:
    draws = [words.person, words.iso_date, _code, words.phrase, words.email, words.clock]
    kind = rng.randint(0, 9)
    if kind < 6:
        return draws[kind](rng)
    return [rng.randint(0, 9999), rng.randint(1, 99_999) / 100, words.city(rng), rng.random() < 0.5][kind - 6]


def _code(rng: random.Random) -> str:
    """Never digits alone: a reader could not tell it from a number."""
    drawn = words.code(rng)
    return f"N{drawn}" if drawn.isdigit() else drawn


def _like(rng: random.Random, example: Any) -> Any:
    """Another value of the same type."""
    while True:
        other = value(rng)
        if isinstance(example, dict) or type(other) is type(example):
            return other


def spoken_value(said: Any) -> str:
    return ("yes" if said else "no") if isinstance(said, bool) else str(said)
