"""Short questions and answers from a small table of facts, and questions about a sentence just read."""

import random

from training.data import words
from training.data.sample import Chat, Split, assistant, user

# country, capital, language, continent, Hungarian name of the country
COUNTRIES = [
    ("France", "Paris", "French", "Europe", "Franciaország"), ("Germany", "Berlin", "German", "Europe", "Németország"),
    ("Italy", "Rome", "Italian", "Europe", "Olaszország"), ("Spain", "Madrid", "Spanish", "Europe", "Spanyolország"),
    ("Hungary", "Budapest", "Hungarian", "Europe", "Magyarország"),
    ("Austria", "Vienna", "German", "Europe", "Ausztria"),
    ("Poland", "Warsaw", "Polish", "Europe", "Lengyelország"),
    ("Portugal", "Lisbon", "Portuguese", "Europe", "Portugália"),
    ("Greece", "Athens", "Greek", "Europe", "Görögország"), ("Norway", "Oslo", "Norwegian", "Europe", "Norvégia"),
    ("Finland", "Helsinki", "Finnish", "Europe", "Finnország"), ("Ireland", "Dublin", "English", "Europe", "Írország"),
    ("Japan", "Tokyo", "Japanese", "Asia", "Japán"), ("China", "Beijing", "Chinese", "Asia", "Kína"),
    ("Egypt", "Cairo", "Arabic", "Africa", "Egyiptom"), ("Kenya", "Nairobi", "Swahili", "Africa", "Kenya"),
    ("Peru", "Lima", "Spanish", "South America", "Peru"), ("Canada", "Ottawa", "English", "North America", "Kanada"),
    ("Australia", "Canberra", "English", "Australia", "Ausztrália"),
    ("Turkey", "Ankara", "Turkish", "Asia", "Törökország"),
]  # fmt: skip
OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "young"), ("light", "dark"), ("full", "empty"),
    ("open", "closed"), ("early", "late"), ("high", "low"), ("loud", "quiet"), ("dry", "wet"), ("long", "short"),
]  # fmt: skip


def make(split: Split, index: int) -> Chat:
    rng = words.rng_for("questions", split, index)
    kind = rng.random()
    question, answer = _fact(rng) if kind < 0.3 else _everyday(rng) if kind < 0.5 else _reading(rng)
    return Chat([user(question), assistant(answer)])


def _fact(rng: random.Random) -> tuple[str, str]:
    country, capital, language, continent, magyar = rng.choice(COUNTRIES)
    return rng.choice(
        [
            (f"What is the capital of {country}?", f"The capital of {country} is {capital}."),
            (f"Which country has the capital {capital}?", f"{capital} is the capital of {country}."),
            (f"Which language is spoken in {country}?", f"People in {country} speak {language}."),
            (f"On which continent is {country}?", f"{country} is in {continent}."),
            (f"Mi a fővárosa ennek az országnak: {magyar}?", f"{magyar} fővárosa: {capital}."),
        ]
    )


def _everyday(rng: random.Random) -> tuple[str, str]:
    place = rng.randint(0, 6)
    one, other = rng.choice(OPPOSITES)
    items = [rng.choice(words.NOUNS) for _ in range(rng.randint(3, 6))]
    return rng.choice(
        [
            (f"Which day comes after {words.WEEKDAYS[place]}?", f"{words.WEEKDAYS[(place + 1) % 7]}."),
            (f"Which month comes after {words.MONTHS[place]}?", f"{words.MONTHS[place + 1]}."),
            (f"What is the opposite of {one}?", f"The opposite of {one} is {other}."),
            (f"Sort these words: {', '.join(items)}.", f"{', '.join(sorted(items))}."),
            (f"How many words are in this list: {', '.join(items)}?", f"There are {len(items)} words."),
            (f"Repeat after me: {' '.join(items)}", " ".join(items)),
            (f"What is the last word of: {' '.join(items)}?", f"The last word is {items[-1]}."),
        ]
    )


def _reading(rng: random.Random) -> tuple[str, str]:
    name, other = words.usually(rng, words.FIRST_NAMES), words.usually(rng, words.FIRST_NAMES)
    city = words.city(rng)
    thing, color, time = (
        rng.choice(words.NOUNS),
        rng.choice(["red", "blue", "green", "white", "black"]),
        words.clock(rng),
    )
    text = f"{name} lives in {city} and works with {other}. At {time} {name} bought a {color} {thing}."
    return rng.choice(
        [
            (f"{text} Where does {name} live?", f"{name} lives in {city}."),
            (f"{text} What did {name} buy?", f"{name} bought a {color} {thing}."),
            (f"{text} When did {name} buy the {thing}?", f"At {time}."),
            (f"{text} Who works with {name}?", f"{other} works with {name}."),
            (f"{text} What color is the {thing}?", f"The {thing} is {color}."),
            (f"{text}\n\nSummarise in a few words.", f"{name} from {city} bought a {color} {thing}."),
        ]
    )
