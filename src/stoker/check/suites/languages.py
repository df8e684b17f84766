"""Hungarian and four other languages: reading, number words, and answers in the right language."""

from random import Random

from stoker.check.items import Item, user
from stoker.check.suites.number_words import in_words
from stoker.check.words import code, name

NAME = "languages"
LANGUAGES = ("hu", "de", "hu", "fr", "hu", "es", "hu", "pl")  # every other item is Hungarian
KINDS = ("number words", "reading", "answer in it")
READ = {
    "hu": (
        "{a} {n} dobozt vitt a raktárba, {b} pedig {m} dobozt hozott el onnan. A raktár kódja {k}, az irodáé {j}.",
        (
            ("Mi a raktár kódja? Csak a kódot írd le.", "k"),
            ("Ki vitt dobozokat a raktárba? Csak a nevet írd le.", "a"),
            ("Mennyivel több dobozt vitt {a}, mint amennyit {b} elhozott? Csak a számot írd le.", "d"),
        ),
    ),
    "de": (
        "{a} brachte {n} Kisten ins Lager, {b} holte {m} Kisten von dort ab. Der Code des Lagers ist {k}, der "
        "des Büros {j}.",
        (
            ("Wie lautet der Code des Lagers? Nenne nur den Code.", "k"),
            ("Wer brachte Kisten ins Lager? Nenne nur den Namen.", "a"),
            ("Wie viele Kisten mehr brachte {a}, als {b} abholte? Nenne nur die Zahl.", "d"),
        ),
    ),
    "fr": (
        "{a} a apporté {n} caisses au dépôt, {b} en a retiré {m}. Le code du dépôt est {k}, celui du bureau {j}.",
        (
            ("Quel est le code du dépôt ? Donne seulement le code.", "k"),
            ("Qui a apporté des caisses au dépôt ? Donne seulement le nom.", "a"),
            (
                "Combien de caisses de plus {a} a-t-il apportées que {b} n'en a retirées ? Donne seulement le nombre.",
                "d",
            ),
        ),
    ),
    "es": (
        "{a} llevó {n} cajas al almacén y {b} retiró {m}. El código del almacén es {k} y el de la oficina {j}.",
        (
            ("¿Cuál es el código del almacén? Da solo el código.", "k"),
            ("¿Quién llevó cajas al almacén? Da solo el nombre.", "a"),
            ("¿Cuántas cajas más llevó {a} de las que retiró {b}? Da solo el número.", "d"),
        ),
    ),
    "pl": (
        "{a} zawiózł do magazynu {n} skrzyń, a {b} zabrał stamtąd {m}. Kod magazynu to {k}, a kod biura {j}.",
        (
            ("Jaki jest kod magazynu? Podaj tylko kod.", "k"),
            ("Kto zawiózł skrzynie do magazynu? Podaj tylko imię.", "a"),
            ("O ile więcej skrzyń zawiózł {a}, niż zabrał {b}? Podaj tylko liczbę.", "d"),
        ),
    ),
}
NUMBER = {
    "hu": "Írd le számjegyekkel: {words}. Csak a számot írd le.",
    "de": "Schreibe mit Ziffern: {words}. Nenne nur die Zahl.",
    "fr": "Écris en chiffres : {words}. Donne seulement le nombre.",
    "es": "Escribe en cifras: {words}. Da solo el número.",
    "pl": "Zapisz cyframi: {words}. Podaj tylko liczbę.",
}
WRITE = {
    "hu": (
        "Magyarul, két mondatban válaszolj: {topic}",
        (
            "miért kell télen felkészíteni a házat?",
            "mire jó egy karbantartási napló?",
            "hogyan kell üveget csomagolni?",
        ),
    ),
    "de": (
        "Antworte auf Deutsch in zwei Sätzen: {topic}",
        (
            "Warum muss man ein Haus auf den Winter vorbereiten?",
            "Wozu dient ein Wartungsbuch?",
            "Wie verpackt man Glas?",
        ),
    ),
    "fr": (
        "Réponds en français, en deux phrases : {topic}",
        (
            "pourquoi faut-il préparer une maison à l'hiver ?",
            "à quoi sert un carnet d'entretien ?",
            "comment emballer du verre ?",
        ),
    ),
    "es": (
        "Responde en español, en dos frases: {topic}",
        (
            "¿por qué hay que preparar la casa para el invierno?",
            "¿para qué sirve un cuaderno de mantenimiento?",
            "¿cómo se embala el vidrio?",
        ),
    ),
    "pl": (
        "Odpowiedz po polsku, w dwóch zdaniach: {topic}",
        ("dlaczego trzeba przygotować dom do zimy?", "do czego służy dziennik konserwacji?", "jak zapakować szkło?"),
    ),
}


def items(seed: str, count: int) -> list[Item]:
    found = []
    for place in range(count):
        rng = Random(f"{seed}/{NAME}/{place}")
        language, kind = LANGUAGES[place % len(LANGUAGES)], KINDS[place // len(LANGUAGES) % len(KINDS)]
        checker, most, cost = "contains", 64, 12
        if kind == "number words":
            number = rng.randint(101, 9999)
            asked, expect = NUMBER[language].format(words=in_words(number, language)), str(number)
            checker = "number"
        elif kind == "reading":
            asked, expect, checker = _reading(rng, language)
        else:
            head, topics = WRITE[language]
            asked, expect = f"{name(rng)}: {head.format(topic=rng.choice(topics))}", language
            checker, most, cost = "language", 200, 75
        found.append(
            Item(
                id=f"{NAME}-{place}",
                suite=NAME,
                kind=f"{language}, {kind}",
                messages=user(asked),
                checker=checker,
                expect=int(expect) if checker == "number" else expect,
                max_tokens=most,
                answer_tokens=cost,
                language=language if kind == "answer in it" else "",
            )
        )
    return found


def _reading(rng: Random, language: str) -> tuple[str, str, str]:
    text, questions = READ[language]
    few, more = rng.randint(11, 90), rng.randint(3, 99)
    values = {
        "a": name(rng),
        "b": name(rng),
        "n": few + more,
        "m": few,
        "k": code(rng, "###-LL"),
        "j": code(rng, "###-LL"),
        "d": more,
    }
    asked, wanted = rng.choice(questions)
    return f"{text}\n\n{asked}".format(**values), str(values[wanted]), "number" if wanted == "d" else "contains"
