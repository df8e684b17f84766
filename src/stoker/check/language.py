"""Which of six languages a text is in, by its commonest words and its letters."""

import re

_WORDS = {
    "en": "the and of to in is that it for with as are be on this was by you not or from which have they can",
    "hu": (
        "a az és hogy nem is egy van ez meg azt de csak el már mint kell ki vagy lehet amely így minden után fel mert"
    ),
    "de": (
        "der die und das in den von zu ist mit sich des auf für nicht ein eine dem es im auch als wird man "
        "werden oder damit"
    ),
    "fr": "le la les de des et en un une est que pour dans il qui par sur pas ce se au avec du plus sont on ne ou",
    "es": "el la los las de y en un una es que para por se con no su al lo como más del sus pero o son hay",
    "pl": "i w na z do się nie jest to że o po za od przez dla oraz jak aby są być lub co może należy czy ze",
}
WORDS = {language: frozenset(words.split()) for language, words in _WORDS.items()}
LETTERS = {"hu": "őűáéíóöüú", "de": "äöüß", "fr": "àâçèêëîïôùûœé", "es": "ñ¿¡áéíóú", "pl": "ąćęłńśźżó", "en": ""}
LEAST = 4  # words; shorter texts tell nothing
SHARE = 0.12  # of words that must be among the language's commonest


def language_of(text: str) -> str:
    """Its code, or nothing if the text is too short or in none of the six."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    if len(words) < LEAST:
        return ""
    signs = "".join(words)
    scores = {}
    for language, common in WORDS.items():
        share = sum(word in common for word in words) / len(words)
        letters = sum(signs.count(letter) for letter in LETTERS[language]) / len(signs)
        alien = sum(signs.count(letter) for letter in _all_letters(language)) / len(signs)
        scores[language] = share + 2 * letters - 6 * alien if share >= SHARE else 0.0
    best = max(scores, key=lambda language: scores[language])
    return best if scores[best] > 0 else ""


def _all_letters(language: str) -> str:
    """Letters of the others that this one has not."""
    return "".join(sorted(set("".join(LETTERS.values())) - set(LETTERS[language]) - set("¿¡")))
