"""What tools are composed of: kinds of argument with ways to say them, things tools act on, and verbs.

A tool is a verb, a thing and some arguments, so hundreds of different ones exist. HELD_* verbs, things and argument
names are kept out of training.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.data import words

LANGUAGES = ["English", "German", "French", "Spanish", "Italian", "Hungarian", "Polish", "Dutch"]
COLORS = ["red", "blue", "green", "black", "white", "yellow", "orange", "grey"]
LEVELS = ["low", "medium", "high", "urgent"]
UNITS = ["celsius", "fahrenheit", "kelvin"]


@dataclass(frozen=True)
class Kind:
    """One kind of argument: JSON type, names it goes by, how to draw a value, how to say it in a sentence."""

    type: str
    names: tuple[str, ...]
    held_names: tuple[str, ...]
    draw: Callable[[random.Random], Any]
    says: tuple[str, ...]  # English
    says_hu: tuple[str, ...]
    about: str  # the schema's description
    options: tuple[str, ...] = ()  # enum


def _people(rng: random.Random) -> list[str]:
    return [words.person(rng) for _ in range(rng.randint(2, 3))]


def _amount(rng: random.Random) -> float:
    return rng.randint(100, 99_999) / 100


KINDS: dict[str, Kind] = {
    "city": Kind(
        "string", ("city", "location", "place", "town"), ("municipality", "locality"),
        words.city, ("in {}", "for {}", "at {}"), ("hely: {}", "város: {}"), "Name of the city",
    ),
    "person": Kind(
        "string", ("name", "person", "customer", "contact"), ("individual", "addressee"),
        words.person, ("for {}", "with {}", "under the name {}"), ("név: {}", "kinek: {}"), "Full name",
    ),
    "email": Kind(
        "string", ("email", "to", "address", "recipient"), ("mailbox", "deliver_to"),
        words.email, ("to {}", "at {}", "with e-mail {}"), ("e-mail: {}", "címzett: {}"), "E-mail address",
    ),
    "date": Kind(
        "string", ("date", "day", "on", "when"), ("calendar_day", "due_on"),
        words.iso_date, ("on {}", "for {}", "dated {}"), ("dátum: {}", "nap: {}"), "Date, YYYY-MM-DD",
    ),
    "time": Kind(
        "string", ("time", "start", "at", "hour"), ("clock_time", "begins_at"),
        words.clock, ("at {}", "starting {}", "from {}"), ("időpont: {}", "kezdés: {}"), "Time, HH:MM",
    ),
    "count": Kind(
        "integer", ("count", "quantity", "limit", "number"), ("how_many", "max_entries"),
        lambda r: r.randint(1, 60), ("with a count of {}", "{} of them", "number {}"), ("darab: {}", "mennyiség: {}"),
        "How many",
    ),
    "amount": Kind(
        "number", ("amount", "price", "value", "sum"), ("cost", "charge"),
        _amount, ("for {} in total", "with amount {}", "worth {}"), ("összeg: {}", "érték: {}"), "Amount of money",
    ),
    "id": Kind(
        "string", ("id", "code", "reference", "ticket"), ("identifier", "handle"),
        words.code, ("with id {}", "number {}", "reference {}"), ("azonosító: {}", "szám: {}"), "Identifier",
    ),
    "title": Kind(
        "string", ("title", "subject", "query", "text"), ("headline", "keywords"),
        words.phrase, ("about {}", 'titled "{}"', 'saying "{}"'), ("téma: {}", "cím: {}"), "Free text",
    ),
    "language": Kind(
        "string", ("language", "lang", "locale"), ("tongue", "speech"),
        lambda r: r.choice(LANGUAGES), ("in {}", "using {}"), ("nyelv: {}",), "Language",
    ),
    "color": Kind(
        "string", ("color", "colour", "shade"), ("tint", "paint"),
        lambda r: r.choice(COLORS), ("in {}", "colored {}"), ("szín: {}",), "Color", tuple(COLORS),
    ),
    "level": Kind(
        "string", ("priority", "level", "urgency"), ("severity", "importance"),
        lambda r: r.choice(LEVELS), ("with {} priority", "as {}"), ("fontosság: {}",), "Priority", tuple(LEVELS),
    ),
    "unit": Kind(
        "string", ("unit", "units", "scale"), ("measure", "system"),
        lambda r: r.choice(UNITS), ("in {}", "measured in {}"), ("mértékegység: {}",), "Unit", tuple(UNITS),
    ),
    "flag": Kind(
        "boolean", ("notify", "public", "repeat", "confirm"), ("silent", "draft_only"),
        lambda r: r.random() < 0.5, ("{name} set to {}", "{name}: {}"), ("{name}: {}",), "Yes or no",
    ),
    "people": Kind(
        "array", ("attendees", "members", "guests", "names"), ("participants", "crew"),
        _people, ("with {}", "for {}"), ("résztvevők: {}",), "List of names",
    ),
    "phone": Kind(
        "string", ("phone", "number", "mobile"), ("telephone", "line"),
        words.phone, ("at {}", "on phone {}"), ("telefon: {}",), "Phone number",
    ),
}  # fmt: skip

# thing -> kinds of argument its tools may take, and facts a tool may answer with
THINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "weather": (("city", "date", "unit"), ("temperature", "humidity", "wind")),
    "meeting": (("title", "date", "time", "people", "flag"), ("room", "meeting_id")),
    "email": (("email", "title", "level", "flag"), ("message_id", "status")),
    "invoice": (("id", "person", "amount", "date"), ("total", "status", "due")),
    "order": (("id", "person", "count", "date"), ("status", "items", "shipped")),
    "ticket": (("id", "title", "level", "person"), ("status", "owner")),
    "flight": (("city", "date", "count", "person"), ("gate", "price", "seat")),
    "hotel": (("city", "date", "count", "amount"), ("price", "rooms")),
    "contact": (("person", "email", "phone"), ("contact_id", "status")),
    "reminder": (("title", "date", "time", "flag"), ("reminder_id", "status")),
    "product": (("title", "count", "amount", "color"), ("stock", "price")),
    "payment": (("person", "amount", "date", "id"), ("payment_id", "fee")),
    "translation": (("title", "language"), ("result",)),
    "document": (("title", "language", "person", "flag"), ("pages", "document_id")),
    "task": (("title", "person", "date", "level"), ("task_id", "status")),
    "room": (("city", "date", "time", "count"), ("room", "floor")),
    "restaurant": (("city", "time", "count", "person"), ("table", "rating")),
    "train": (("city", "date", "time"), ("platform", "price", "duration")),
    "package": (("id", "person", "city"), ("status", "weight")),
    "song": (("title", "person", "count"), ("length", "album")),
    "user": (("person", "email", "flag"), ("user_id", "role")),
    "light": (("color", "level", "time"), ("state", "power")),
    "account": (("id", "person", "amount"), ("balance", "status")),
    "event": (("title", "city", "date", "people"), ("event_id", "seats")),
    "stock": (("id", "date", "count"), ("price", "change")),
    "report": (("title", "date", "language", "email"), ("pages", "status")),
}
HELD_THINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "parcel_locker": (("city", "id", "phone"), ("compartment", "expires")),
    "museum_pass": (("city", "date", "count"), ("pass_number", "cost")),
    "bike_rental": (("city", "time", "count", "color"), ("bikes", "station")),
    "vaccine_slot": (("person", "date", "time", "phone"), ("slot", "clinic")),
    "podcast": (("title", "language", "count"), ("episode", "minutes")),
    "greenhouse": (("level", "time", "unit"), ("soil", "valve")),
}
VERBS = {
    "get": ("Get", "Show me", "What is"),
    "create": ("Create", "Make", "Set up"),
    "update": ("Update", "Change"),
    "delete": ("Delete", "Remove"),
    "search": ("Search", "Look up"),
    "send": ("Send", "Please send"),
    "book": ("Book", "Reserve"),
    "cancel": ("Cancel", "Call off"),
    "check": ("Check", "Have a look at"),
    "list": ("List", "Give me all of"),
}
VERBS_HU = {
    "get": "Kérem ezt", "create": "Hozd létre ezt", "update": "Frissítsd ezt", "delete": "Töröld ezt",
    "search": "Keresd meg ezt", "send": "Küldd el ezt", "book": "Foglald le ezt", "cancel": "Mondd le ezt",
    "check": "Ellenőrizd ezt", "list": "Sorold fel ezt",
}  # fmt: skip
HELD_VERBS = {
    "inspect": ("Inspect", "Examine"),
    "renew": ("Renew", "Extend"),
    "assign": ("Assign", "Hand over"),
}
HELD_VERBS_HU = {"inspect": "Vizsgáld meg ezt", "renew": "Hosszabbítsd meg ezt", "assign": "Rendeld hozzá ezt"}
