"""Filler text of any length; a seed always gives the same words, and other seeds give other words.

Sentences are put together from parts, so that a hundred thousand tokens hold facts instead of one page over and over.
"""

import re
from collections.abc import Callable, Iterator
from random import Random

_NAMES = [
    "Ágnes",
    "Boris",
    "Chiara",
    "Dániel",
    "Emeka",
    "Farida",
    "Greta",
    "Hiro",
    "Ilona",
    "Jonas",
    "Katalin",
    "Leon",
    "Mira",
    "Noor",
    "Olga",
    "Pavel",
    "Rosa",
    "Tamás",
]
_PLACES = [
    "Kőszeg",
    "Lisbon",
    "Tartu",
    "Ghent",
    "Pécs",
    "Oulu",
    "Graz",
    "Nantes",
    "Split",
    "Cork",
    "Brno",
    "Turin",
    "Malmö",
    "Vigo",
    "Eger",
    "Linz",
    "Porto",
    "Bergen",
]
_THINGS = [
    "pump",
    "filter",
    "valve",
    "conveyor",
    "scanner",
    "router",
    "battery",
    "sensor",
    "gearbox",
    "compressor",
    "ladder",
    "printer",
    "thermostat",
    "relay",
    "hoist",
    "fuse",
    "boiler",
    "turbine",
    "lathe",
    "welder",
]
_STATES = [
    "replaced",
    "inspected",
    "cleaned",
    "calibrated",
    "refused",
    "returned",
    "repaired",
    "labelled",
    "tested",
    "shipped",
    "rejected",
    "stored",
]
_REASONS = (
    "the seal had hardened",
    "its readings drifted by a tenth",
    "the supplier changed the alloy",
    "dust had settled on the contacts",
    "nobody had signed the previous sheet",
    "the noise came back after a day",
    "a spare had arrived too early",
    "the manual named another torque",
    "frost had cracked the housing",
    "two labels had been swapped",
)


def prose(rng: Random) -> str:
    """A sentence or two of an ordinary record, with numbers in it."""
    name, other = rng.choice(_NAMES), rng.choice(_NAMES)
    thing, part = rng.choice(_THINGS), rng.choice(_THINGS)
    place, state, reason = rng.choice(_PLACES), rng.choice(_STATES), rng.choice(_REASONS)
    number, cost, days = rng.randint(100, 9999), rng.randint(12, 4800), rng.randint(2, 90)
    forms = (
        f"In {place} the {thing} number {number} was {state} on day {days}, because {reason}. ",
        f"{name} asked {other} whether the {part} behind the {thing} could wait {days} days; no, as {reason}. ",
        f"Record {number}: one {thing}, {state} in {place}, {cost} euros, checked by {name}. ",
        f"When {reason}, {name} wrote to {place} for another {part} and was quoted {cost} euros and {days} days. ",
        f"The {thing} from {place} ran {number} hours before {other} had it {state}. ",
        f"After {days} days without a fault the {thing} in {place} was {state} all the same, since {reason}. ",
        f"{other} keeps {days} of these in {place}; each {part} costs {cost} euros less than the {thing} it protects. ",
        f"Nobody in {place} remembers who {state} the {part}, but the sheet says {name}, number {number}. ",
    )
    return rng.choice(forms)


def hungarian(rng: Random) -> str:
    name, place = rng.choice(_NAMES), rng.choice(_PLACES)
    number, cost, days = rng.randint(100, 9999), rng.randint(2, 900) * 100, rng.randint(2, 90)
    forms = (
        f"A(z) {number}. számú gépet {name} {days} nap után vizsgálta meg, és {cost} forintért megjavította. ",
        f"{place} városában a raktár {days} napig zárva volt, ezért a szállítmány késve indult el. ",
        f"{name} azt írta, hogy a(z) {number}. jegyzőkönyvből hiányzik egy aláírás, és pótolni kell. ",
        f"Az új szivattyú ára {cost} forint, a beszerelést {name} vállalta {days} napon belül. ",
        f"A {place} felé tartó teherautó {number} csomagot vitt, köztük három törékenyet. ",
        f"Az ellenőrzés szerint a szűrőt {days} naponta kell cserélni, különben a gép leáll. ",
    )
    return rng.choice(forms)


def code(rng: Random) -> str:
    """A small Python function."""
    thing, part, state = rng.choice(_THINGS), rng.choice(_THINGS), rng.choice(_STATES)
    limit, factor = rng.randint(2, 400), rng.randint(2, 9)
    forms = (
        f"def {state}_{thing}s(rows, limit={limit}):\n"
        f'    """Rows whose {thing} was {state} fewer than `limit` times."""\n'
        f'    return [row for row in rows if row["{thing}"] == "{state}" and row["count"] < limit]\n\n\n',
        f"def {thing}_cost(hours, {part}_price):\n"
        f"    if hours < 0:\n"
        f'        raise ValueError(f"hours is {{hours}}, and must not be negative")\n'
        f"    return round({part}_price * {factor} + hours * {limit} / 60, 2)\n\n\n",
        f"class {thing.title()}Log:\n"
        f"    def __init__(self, path):\n"
        f"        self.path, self.entries = path, []\n\n"
        f"    def add_{part}(self, number, when):\n"
        f'        self.entries.append({{"number": number + {limit}, "when": when, "state": "{state}"}})\n'
        f"        return len(self.entries) % {factor} == 0\n\n\n",
        f"{thing.upper()}_LIMITS = {{\n"
        + "".join(f'    "{place.lower()}": {rng.randint(1, 999)},\n' for place in rng.sample(_PLACES, 4))
        + "}\n\n\n",
    )
    return rng.choice(forms)


def log(rng: Random) -> str:
    """A line of what a command prints."""
    when = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
    thing, state = rng.choice(_THINGS), rng.choice(_STATES)
    forms = (
        f"{when} INFO {thing}.service: {state} {rng.randint(1, 9999)} items in {rng.randint(1, 900)} ms\n",
        f"{when} WARN {thing}.service: retry {rng.randint(1, 9)} of 9, {rng.choice(_REASONS)}\n",
        f"tests/{thing}/test_{state}.py::test_{rng.choice(_THINGS)} PASSED [{rng.randint(0, 100):3}%]\n",
        f"-rw-r--r-- 1 agent agent {rng.randint(100, 99999):6} src/{thing}/{state}.py\n",
        f"src/{thing}/{state}.py:{rng.randint(1, 900)}: {rng.choice(_REASONS)}\n",
    )
    return rng.choice(forms)


def invoice(rng: Random) -> str:
    """A Hungarian invoice, as document pipelines get them."""
    lines, total = [], 0
    for place in range(1, rng.randint(3, 6)):
        pieces, price = rng.randint(1, 30), rng.randint(5, 400) * 100
        total += pieces * price
        lines.append(f"{place}. {rng.choice(_THINGS)}  {pieces} db x {price} Ft = {pieces * price} Ft")
    tax = total * 27 // 100
    head = (
        f"SZÁMLA  Sorszám: {rng.choice('ABCD')}-{rng.randint(1000, 99999)}\n"
        f"Kelt: 2026. {rng.randint(1, 12):02}. {rng.randint(1, 28):02}.\n"
        f"Eladó: {rng.choice(_PLACES)} {rng.choice(_THINGS).title()} Kft.\n"
        f"Adószám: {rng.randint(10**7, 10**8 - 1)}-2-13\n"
        f"Vevő: {rng.choice(_NAMES)} Bt., {rng.choice(_PLACES)}\n"
    )
    return head + "\n".join(lines) + f"\nNettó: {total} Ft\nÁFA 27%: {tax} Ft\nFizetendő: {total + tax} Ft\n"


class Material:
    """Words of one kind, generated on demand."""

    def __init__(self, make: Callable[[Random], str], seed: int | str) -> None:
        self._words: list[str] = []
        self._more = self._made(make, Random(seed))

    def first(self, count: int) -> str:
        while len(self._words) < count:
            self._words += re.findall(r"\S+\s*", next(self._more))
        return "".join(self._words[:count])

    @staticmethod
    def _made(make: Callable[[Random], str], rng: Random) -> Iterator[str]:
        while True:
            yield make(rng)
