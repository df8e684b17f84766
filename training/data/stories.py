"""Small stories and plain sentences from templates, in English and Hungarian: simple prose that a model of this
size can learn to write."""

import random

from training.data import words
from training.data.sample import Chat, Sample, Split, Text, assistant, user

# city, "in the city", "to the city"
PLACES_HU = [
    ("Budapest", "Budapesten", "Budapestre"), ("Szeged", "Szegeden", "Szegedre"), ("Pécs", "Pécsett", "Pécsre"),
    ("Debrecen", "Debrecenben", "Debrecenbe"), ("Győr", "Győrben", "Győrbe"), ("Eger", "Egerben", "Egerbe"),
    ("Miskolc", "Miskolcon", "Miskolcra"), ("Sopron", "Sopronban", "Sopronba"), ("Tihany", "Tihanyban", "Tihanyba"),
]  # fmt: skip
NAMES_HU = words.listed(
    """
    Zsófia Péter Katalin László Eszter Gábor Réka Tamás Dóra Zoltán Judit István Márton Ágnes András
    """
)
# thing, its accusative
THINGS_HU = [
    ("kenyér", "kenyeret"), ("könyv", "könyvet"), ("alma", "almát"), ("virág", "virágot"), ("lámpa", "lámpát"),
    ("térkép", "térképet"), ("kabát", "kabátot"), ("óra", "órát"), ("levél", "levelet"), ("kosár", "kosarat"),
]  # fmt: skip
ADJECTIVES_HU = words.listed(
    """
    régi új kicsi nagy piros kék zöld sárga szép nehéz könnyű fényes barna fehér
    """
)
SEASONS_HU = ["Tavasszal", "Nyáron", "Ősszel", "Télen", "Egy hideg reggelen", "Egy meleg délután", "Vasárnap"]
ENDS_HU = [
    "Aztán hazament.",
    "Este fáradtan aludt el.",
    "A barátai nagyon örültek.",
    "Soha nem felejtette el ezt a napot.",
]
ANIMALS = ["fox", "bear", "mouse", "owl", "rabbit", "cat", "dog", "horse", "duck", "hedgehog", "squirrel", "goat"]


def make(split: Split, index: int) -> Sample:
    rng = words.rng_for("stories", split, index)
    if rng.random() < 0.5:
        story = hungarian(rng)
        return Text(story) if rng.random() < 0.6 else Chat([user("Írj egy rövid történetet."), assistant(story)])
    animal = rng.choice(ANIMALS)
    story = english(rng, animal)
    if rng.random() < 0.5:
        return Text(story)
    request = rng.choice(["Tell me a short story about {}.", "Write a little story with {} in it."])
    return Chat([user(request.format(words.a(animal))), assistant(story)])


def english(rng: random.Random, animal: str) -> str:
    adjective, place, thing = rng.choice(words.ADJECTIVES), rng.choice(words.NOUNS), rng.choice(words.NOUNS)
    name, friend = rng.choice(words.FIRST_NAMES), rng.choice(ANIMALS)
    opening = rng.choice(
        [
            f"Once there was {words.a(adjective)} {animal} named {name}, who lived near {words.a(place)}.",
            f"{name} the {animal} was {adjective} and lived by the {place}.",
            f"In a house beside the {place} lived {name}, {words.a(adjective)} {animal}.",
        ]
    )
    middle = words.in_order(
        rng,
        [
            f"One morning {name} found {words.a(thing)} in the grass.",
            f"{words.a(friend).capitalize()} came along and asked about the {thing}.",
            f'"What {words.a(rng.choice(words.ADJECTIVES))} {thing}," said the {friend}.',
            f"It rained all day, so {name} stayed inside and read a book.",
            f"{name} looked for the {thing} under the bed and behind the door.",
            "They walked together over the hill until the sun went down.",
            f"{name} shared some bread with the {friend}.",
        ],
        2,
        5,
    )
    ending = rng.choice(
        [
            f"From that day on the {animal} and the {friend} were friends.",
            f"{name} slept well that night.",
            f"In the end the {thing} stayed by the {place}, and everyone was happy.",
        ]
    )
    return " ".join([opening, *middle, ending])


def hungarian(rng: random.Random) -> str:
    name, friend = rng.choice(NAMES_HU), rng.choice(NAMES_HU)
    _, living, _ = rng.choice(PLACES_HU)
    _, being, going = rng.choice(PLACES_HU)
    _, thing = rng.choice(THINGS_HU)
    adjective = rng.choice(ADJECTIVES_HU)
    opening = rng.choice(
        [f"{name} {living} él, és egy iskolában dolgozik.", f"Élt egyszer {living} egy ember, {name}."]
    )
    middle = words.in_order(
        rng,
        [
            f"{rng.choice(SEASONS_HU)} elutazott {going}.",
            f"A piacon vett egy {adjective} {thing}.",
            f"{being} találkozott egy régi barátjával, akit úgy hívtak: {friend}.",
            "Sokáig beszélgettek a folyó partján.",
            "Megnézték a templomot, aztán leültek egy kávéra.",
            f"{friend} azt mondta: gyere máskor is!",
            "Esett az eső, ezért a vonat késett.",
        ],
        2,
        5,
    )
    return " ".join([opening, *middle, rng.choice(ENDS_HU)])
