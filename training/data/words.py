"""Names, places and things the generators draw from, and the seeding rule that makes every document reproducible."""

import random
import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def rng_for(*parts: object) -> random.Random:
    """A generator that depends on nothing but its name; random.Random hashes strings the same way everywhere."""
    return random.Random(":".join(str(part) for part in parts))


def listed(text: str) -> list[str]:
    """Words of a block of text."""
    return text.split()


def some(rng: random.Random, items: Sequence[T], low: int, high: int) -> list[T]:
    """Between `low` and `high` different items, in random order."""
    return rng.sample(list(items), min(len(items), rng.randint(low, high)))


def in_order(rng: random.Random, items: Sequence[T], low: int, high: int) -> list[T]:
    """As `some`, but in the order of the list."""
    return [items[i] for i in sorted(some(rng, range(len(items)), low, high))]


FIRST_NAMES = listed(
    """
    Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Kate Leo Maria Noah Olivia Paul Rosa Sam Tessa Victor
    Alice Oscar Nina Hugo Laura Martin Sofia Peter Julia Thomas Irene George Helen Frank Diana Carl Bella Arthur
    Zsófia Péter Katalin László Eszter Gábor Réka Tamás Dóra Zoltán Judit István Borbála Márton Ágnes András
    """
)
LAST_NAMES = listed(
    """
    Adams Baker Clark Dixon Evans Fisher Grant Hughes Irving Jensen Keller Lambert Morris Nolan Owens Parker Quinn
    Reed Schmidt Turner Ulrich Vogel Weber Young Ziegler Becker Fournier Moreau Rossi Novak Larsen Costa Nagy Kovács
    Szabó Tóth Horváth Varga Kiss Molnár Németh Farkas Balogh Papp Takács Juhász Lakatos Mészáros Oláh Simon
    """
)
CITIES = listed(
    """
    Berlin Paris Madrid Rome Vienna Prague Lisbon Dublin Oslo Helsinki Warsaw Athens Zurich Hamburg Lyon Porto
    Seville Milan Geneva Bergen Krakow Utrecht Ghent Boston Denver Chicago Toronto Sydney Tokyo Seoul Austin
    Portland Nairobi Lima Budapest Szeged Debrecen Pécs Győr Eger Miskolc Sopron Kecskemét
    """
)
STREETS = listed(
    """
    Main Oak Park Mill River Lake Hill Garden Station Church Market Bridge King Queen North South Harbor Forest
    Kossuth Petőfi Rákóczi Bartók Arany Deák Dózsa Jókai
    """
)
COMPANY_WORDS = listed(
    """
    Nord Alpha Blue Crown Delta Eagle First Green Horizon Iron Jupiter Kestrel Lumen Maple Nova Orion Pioneer Quartz
    Ridge Silver Titan Union Vista Willow Zenith Atlas Beacon Cobalt Danube Ember Falcon Granite Harvest Duna Tisza
    Mátra Bükk Balaton
    """
)
COMPANY_TRADES = listed(
    """
    Trading Logistics Systems Foods Textiles Energy Media Tools Paper Steel Software Printing Optics Furniture
    Motors Supplies Consulting Electric Garden Pharma Travel Design
    """
)
COMPANY_FORMS = ["Ltd", "Inc", "GmbH", "LLC", "SA", "BV", "Kft.", "Zrt.", "Bt.", "AG", "& Co", "Group"]
PRODUCTS = """desk lamp|office chair|paper clips|USB cable|steel bolts|printer ink|copper wire|wooden shelf|coffee beans
hard drive|keyboard|wireless mouse|monitor stand|notebook|ballpoint pen|safety gloves|drill bits|LED panel|water filter
garden hose|paint roller|battery pack|phone case|tape measure|desk fan|air filter|cutting board|ceramic mug|rain jacket
wool blanket|travel bag|bike light|toner cartridge|shipping box|label roll|power strip|network switch|webcam|headset
consulting hours|site inspection|annual licence|hosting fee|translation|courier service|floor cleaning|map printing
asztali lámpa|irodai szék|papírlap|nyomtató festék|rézkábel|kávébab|füzet|golyóstoll|vízszűrő|festőhenger|szállítási díj
tanácsadás|fordítás|takarítás|szőnyeg|polc|bögre""".replace("\n", "|").split("|")
NOUNS = listed(
    """
    apple anchor arrow basket bell bird book bottle box brush bucket cabin camera candle castle chain clock cloud
    coin compass crane curtain door drum engine feather fence field flag flower forest fountain gate glass glove
    harbor hat hill horse island jacket kettle key kite ladder lake lantern leaf letter lock map market meadow
    mirror moon mountain needle orchard owl paddle painting path pebble pencil piano pillow pine planet plate pocket
    pond rail ribbon ring river road roof rope saddle sail seed shell ship shovel signal spoon spring stone storm
    stove table tent thread tower train tunnel valley violin wagon wall wheel window winter
    """
)
ADJECTIVES = listed(
    """
    old new small large quiet bright dark green red blue yellow warm cold slow quick gentle heavy light narrow wide
    round tall short empty full clean dusty broken silver golden wooden hidden busy calm brave curious honest lazy
    patient proud shy tired young
    """
)
MONTHS = listed(
    """
    January February March April May June July August September October November December
    """
)
MONTHS_HU = listed(
    """
    január február március április május június július augusztus szeptember október november december
    """
)
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
DOMAINS = ["example.com", "example.org", "example.net", "mail.example", "post.example", "firma.example", "box.example"]


def coined(rng: random.Random) -> str:
    """A name nobody bears, so that names must be copied and cannot be guessed from their first letters."""
    syllables = [rng.choice("bcdfghjklmnprstvz") + rng.choice(["a", "e", "i", "o", "u", "ar", "el", "in", "or", "us"])]
    syllables += [rng.choice("bdgklmnrstvz") + rng.choice(["a", "e", "o", "an", "en", "ik", "ov", "um"]) for _ in "ab"]
    return "".join(syllables[: rng.randint(2, 3)]).capitalize()


def usually(rng: random.Random, names: Sequence[str]) -> str:
    """One of these names, now and then a coined one."""
    return coined(rng) if rng.random() < 0.2 else rng.choice(names)


def city(rng: random.Random) -> str:
    return usually(rng, CITIES)


def product(rng: random.Random) -> str:
    return f"{coined(rng)} {rng.choice(NOUNS)}" if rng.random() < 0.2 else rng.choice(PRODUCTS)


def person(rng: random.Random) -> str:
    return f"{usually(rng, FIRST_NAMES)} {usually(rng, LAST_NAMES)}"


def company(rng: random.Random) -> str:
    words = [usually(rng, COMPANY_WORDS), rng.choice(COMPANY_TRADES)]
    if rng.random() < 0.3:
        words = [rng.choice(LAST_NAMES), rng.choice(["&", "und", "és", "+"]), rng.choice(LAST_NAMES)]
    return " ".join([*words, rng.choice(COMPANY_FORMS)])


def address(rng: random.Random) -> str:
    number, code = rng.randint(1, 240), rng.randint(1000, 99999)
    street, town = usually(rng, STREETS), city(rng)
    forms = [
        f"{number} {street} Street, {town}",
        f"{street} Road {number}, {code} {town}",
        f"{code} {town}, {street} utca {number}.",
        f"{street}str. {number}, {code} {town}",
    ]
    return rng.choice(forms)


def plain(text: str) -> str:
    """Without accents, for e-mail addresses and identifiers."""
    return text.translate(str.maketrans("áéíóöőúüűÁÉÍÓÖŐÚÜŰ", "aeiooouuuAEIOOOUUU"))


def email(rng: random.Random) -> str:
    first, last = plain(rng.choice(FIRST_NAMES)).lower(), plain(rng.choice(LAST_NAMES)).lower()
    name = rng.choice([f"{first}.{last}", f"{first}{rng.randint(1, 99)}", f"{first[0]}{last}", f"{last}_{first}"])
    return f"{name}@{rng.choice(DOMAINS)}"


def phone(rng: random.Random) -> str:
    return f"+{rng.choice([1, 36, 44, 49, 33])} {rng.randint(10, 99)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}"


def code(rng: random.Random) -> str:
    """An identifier such as AB-20417: what invoices, orders and tickets are called."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 7)))
    year = rng.randint(2019, 2027)
    forms = [f"{letters}-{digits}", f"{letters}{digits}", f"{year}/{digits}", f"{letters}-{year}-{digits}", digits]
    return rng.choice(forms)


def day(rng: random.Random) -> tuple[int, int, int]:
    return rng.randint(2018, 2028), rng.randint(1, 12), rng.randint(1, 28)


def iso_date(rng: random.Random) -> str:
    return "{:04d}-{:02d}-{:02d}".format(*day(rng))


def clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice([0, 5, 10, 15, 20, 30, 40, 45, 50]):02d}"


def phrase(rng: random.Random) -> str:
    """Two to four plain words: a title, a subject, a search."""
    words = [rng.choice(ADJECTIVES), usually(rng, NOUNS)]
    if rng.random() < 0.5:
        words = [*words, rng.choice(["and", "of", "near", "with"]), rng.choice(NOUNS)]
    return " ".join(words)


def a(noun: str) -> str:
    """The noun or adjective with its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def spoken(name: str) -> str:
    """A name from code as its words: shelf_width, shelfWidth and shelf-width are all "shelf width"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[_-]", " ", name).lower()
