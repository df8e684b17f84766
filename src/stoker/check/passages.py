"""Texts on which two servers' predictions are compared: five kinds, put together anew for every seed.

Nobody answers them; each server says, token by token, what it would have expected. So they need no right answer, only
to be texts of the kinds that people work with. Names are ordinary ones: where a coined name could be anything, the
likeliest twenty tokens hold little of what a model expects, and twenty are all that servers list.
"""

import json
from collections.abc import Callable
from random import Random

from stoker.bench import texts

PER_KIND = 20
CHARACTERS = 700  # of a text, at least: 150 to 300 tokens, depending on the tokenizer

_GERMAN = (
    "In {place} wurde die Pumpe Nummer {number} nach {days} Tagen geprüft, weil {name} ein Geräusch gehört hatte. ",
    "{name} schrieb dem Lager, dass im Protokoll {number} eine Unterschrift fehlt und nachgetragen werden muss. ",
    "Der Filter soll alle {days} Tage gewechselt werden, sonst bleibt die Anlage in {place} stehen. ",
    "Die neue Pumpe kostet {cost} Euro; den Einbau übernimmt {name} noch in dieser Woche. ",
    "Zwischen {place} und dem Werk lagen {number} Kisten, von denen drei besonders vorsichtig zu tragen waren. ",
    "Am Ende des Monats zählte {name} noch einmal nach, und diesmal stimmte die Summe von {cost} Euro. ",
)
_FRENCH = (
    "À {place}, la machine numéro {number} a été contrôlée au bout de {days} jours, car {name} entendait un bruit. ",
    "{name} a écrit au dépôt qu'il manquait une signature au procès-verbal {number} et qu'il fallait l'ajouter. ",
    "Le filtre doit être changé tous les {days} jours, sinon l'installation de {place} s'arrête. ",
    "La nouvelle pompe coûte {cost} euros ; {name} se charge de la monter avant la fin de la semaine. ",
    "Le camion de {place} transportait {number} colis, dont trois étaient fragiles. ",
    "À la fin du mois, {name} a recompté, et cette fois le total de {cost} euros était juste. ",
)
_SPANISH = (
    "En {place} revisaron la máquina número {number} al cabo de {days} días, porque {name} había oído un ruido. ",
    "{name} escribió al almacén que en el acta {number} falta una firma y que hay que añadirla. ",
    "El filtro se cambia cada {days} días; de lo contrario, la instalación de {place} se detiene. ",
    "La bomba nueva cuesta {cost} euros, y {name} se encarga de montarla esta misma semana. ",
    "El camión que iba a {place} llevaba {number} paquetes, tres de ellos frágiles. ",
    "A fin de mes {name} volvió a contar, y esta vez la suma de {cost} euros era correcta. ",
)
_POLISH = (
    "W mieście {place} maszynę numer {number} sprawdzono po {days} dniach, bo {name} usłyszał dziwny dźwięk. ",
    "{name} napisał do magazynu, że w protokole {number} brakuje podpisu i trzeba go uzupełnić. ",
    "Filtr należy wymieniać co {days} dni, w przeciwnym razie instalacja w {place} stanie. ",
    "Nowa pompa kosztuje {cost} euro, a {name} zamontuje ją jeszcze w tym tygodniu. ",
    "Ciężarówka jadąca do {place} wiozła {number} paczek, w tym trzy kruche. ",
    "Pod koniec miesiąca {name} policzył wszystko jeszcze raz i tym razem suma {cost} euro się zgadzała. ",
)
_PLACES = ("Berlin", "Paris", "Madrid", "London", "Vienna", "Rome", "Prague", "Lisbon")
_NAMES = ("Anna", "David", "Maria", "Peter", "Laura", "Thomas", "Eva", "Martin", "Julia", "Robert", "Sarah", "Daniel")
_THINGS = ("pump", "filter", "valve", "printer", "battery", "sensor", "ladder", "lamp", "chair", "keyboard")
_NARRATIVE = (
    "{name} had kept the old timetable, although no train had stopped in {place} for {days} years. ",
    "The letter was short: the house could be had for {cost} euros, and the well was dry. ",
    "What surprised {other} was not the noise but how quickly everybody got used to it. ",
    "By the time they reached {place} the rain had turned the road into a river, and nobody spoke. ",
    "There are two ways to read such a map, and {name} had chosen the wrong one for {days} days. ",
    '"You could have asked," said {other}, and put the lamp back on the table between them. ',
    "A good carpenter measures twice; a tired one measures once and cuts {number} boards too short. ",
    "In the end it was the smallest part, a washer that costs less than a stamp, which stopped the mill. ",
    "Most accounts agree on the year, few on the reason, and none on who left the door open. ",
    "{name} counted the steps down to the harbour, lost count at {days}, and began again. ",
)


def passages(seed: str, per_kind: int = PER_KIND) -> dict[str, list[str]]:
    """Texts by kind. A seed gives the same texts everywhere."""
    return {
        kind: [make(Random(f"{seed}/passages/{kind}/{place}"), place) for place in range(per_kind)]
        for kind, make in KINDS.items()
    }


def _json(rng: Random, place: int) -> str:
    """Every other one records with the JSON made of them, or requests with the tool calls that answer them."""
    text = ""
    while len(text) < CHARACTERS:
        text += _call(rng) if place % 2 else _record(rng)
    return text


def _record(rng: Random) -> str:
    found = {
        "name": rng.choice(_NAMES),
        "city": rng.choice(_PLACES),
        "date": f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        "item": rng.choice(_THINGS),
        "quantity": rng.randint(1, 40),
        "price": rng.randint(2, 900),
    }
    said = "Name: {name}\nCity: {city}\nDate: {date}\nItem: {item}\nQuantity: {quantity}\nPrice: {price} EUR\n"
    return f"{said.format(**found)}\n{json.dumps(found)}\n\n"


def _call(rng: Random) -> str:
    city, thing, person, number = rng.choice(_PLACES), rng.choice(_THINGS), rng.choice(_NAMES), rng.randint(2, 40)
    asked, called, arguments = rng.choice(
        (
            (f"What will the weather be in {city}?", "get_weather", {"city": city, "unit": "celsius"}),
            (f"Order {number} of the {thing} for {person}.", "create_order", {"item": thing, "quantity": number}),
            (f"Send {person} a message that the {thing} is ready.", "send_message", {"to": person, "text": thing}),
            (f"How many of the {thing} are left in {city}?", "get_stock", {"item": thing, "city": city}),
            (f"Set a timer for {number} minutes.", "set_timer", {"minutes": number}),
        )
    )
    call = json.dumps({"name": called, "arguments": arguments})
    return f"user: {asked}\nassistant: <tool_call>\n{call}\n</tool_call>\n"


def _code(rng: Random, _: int) -> str:
    return _filled(texts.code, rng)


def _prose(rng: Random, place: int) -> str:
    return _filled(texts.prose, rng) if place % 2 else _told(_NARRATIVE, rng)


def _hungarian(rng: Random, _: int) -> str:
    return _filled(texts.hungarian, rng)


def _others(rng: Random, place: int) -> str:
    return _told((_GERMAN, _FRENCH, _SPANISH, _POLISH)[place % 4], rng)


def _told(forms: tuple[str, ...], rng: Random) -> str:
    """Every form once, in any order, before one comes again."""
    text = ""
    while len(text) < CHARACTERS:
        for form in rng.sample(forms, len(forms)):
            text += form.format(
                place=rng.choice(_PLACES),
                name=rng.choice(_NAMES),
                other=rng.choice(_NAMES),
                number=rng.randint(100, 9999),
                days=rng.randint(2, 90),
                cost=rng.randint(12, 4800),
            )
    return text


def _filled(make: Callable[[Random], str], rng: Random) -> str:
    text = ""
    while len(text) < CHARACTERS:
        text += make(rng)
    return text


KINDS: dict[str, Callable[[Random, int], str]] = {
    "JSON and tool calls": _json,
    "code": _code,
    "prose": _prose,
    "Hungarian": _hungarian,
    "other languages": _others,
}
