"""Numbers from 1 to 9999 as words in Hungarian, German, French, Spanish and Polish."""

from stoker.check.words import listed

_HU = ("", "egy", "kettő", "három", "négy", "öt", "hat", "hét", "nyolc", "kilenc")
_HU_TENS = ("", "tizen", "huszon", "harminc", "negyven", "ötven", "hatvan", "hetven", "nyolcvan", "kilencven")
_DE = listed(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn "
    "sechzehn siebzehn achtzehn neunzehn"
)
_DE_TENS = ("", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")
_FR = listed(
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize "
    "dix-sept dix-huit dix-neuf"
)
_FR_TENS = ("", "", "vingt", "trente", "quarante", "cinquante", "soixante", "soixante", "quatre-vingt", "quatre-vingt")
_ES = listed(
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince "
    "dieciséis diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro "
    "veinticinco veintiséis veintisiete veintiocho veintinueve"
)
_ES_TENS = ("", "", "veinte", "treinta", "cuarenta", "cincuenta", "sesenta", "setenta", "ochenta", "noventa")
_ES_HUNDREDS = listed(
    "- ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos ochocientos novecientos"
)
_PL = listed(
    "zero jeden dwa trzy cztery pięć sześć siedem osiem dziewięć dziesięć jedenaście dwanaście "
    "trzynaście czternaście piętnaście szesnaście siedemnaście osiemnaście dziewiętnaście"
)
_PL_TENS = listed(
    "- - dwadzieścia trzydzieści czterdzieści pięćdziesiąt sześćdziesiąt siedemdziesiąt osiemdziesiąt dziewięćdziesiąt"
)
_PL_HUNDREDS = listed("- sto dwieście trzysta czterysta pięćset sześćset siedemset osiemset dziewięćset")


def in_words(number: int, language: str) -> str:
    if not 0 < number < 10_000:
        raise ValueError(f"{number} is not from 1 to 9,999")
    return {"hu": _hungarian, "de": _german, "fr": _french, "es": _spanish, "pl": _polish}[language](number)


def _hungarian(number: int) -> str:
    def below(rest: int) -> str:
        hundreds, rest = divmod(rest, 100)
        tens, ones = divmod(rest, 10)
        said = "" if not hundreds else ("" if hundreds == 1 else _joined(hundreds)) + "száz"
        if rest in (10, 20):
            return said + {10: "tíz", 20: "húsz"}[rest]
        return said + _HU_TENS[tens] + _HU[ones]

    def _joined(digit: int) -> str:
        return "két" if digit == 2 else _HU[digit]

    thousands, rest = divmod(number, 1000)
    if not thousands:
        return below(rest)
    said = ("" if thousands == 1 else _joined(thousands)) + "ezer"
    return said if not rest else f"{said}-{below(rest)}" if number > 2000 else said + below(rest)


def _german(number: int) -> str:
    thousands, rest = divmod(number, 1000)
    hundreds, rest = divmod(rest, 100)
    said = (_DE[thousands] + "tausend" if thousands else "") + (_DE[hundreds] + "hundert" if hundreds else "")
    if rest == 1:
        return said + "eins"
    if rest < 20:
        return said + (_DE[rest] if rest else "")
    tens, ones = divmod(rest, 10)
    return said + (f"{_DE[ones]}und" if ones else "") + _DE_TENS[tens]


def _french(number: int) -> str:
    thousands, rest = divmod(number, 1000)
    hundreds, rest = divmod(rest, 100)
    said = []
    if thousands:
        said += ([] if thousands == 1 else [_FR[thousands]]) + ["mille"]
    if hundreds:
        said += ([] if hundreds == 1 else [_FR[hundreds]]) + ["cents" if hundreds > 1 and not rest else "cent"]
    if rest and rest < 20:
        said.append(_FR[rest])
    elif rest:
        tens = rest // 10
        ones = rest - 10 * (tens - 1 if tens in (7, 9) else tens)
        if rest == 80:
            said.append("quatre-vingts")
        elif ones == 0:
            said.append(_FR_TENS[tens])
        elif ones in (1, 11) and tens < 8:
            said.append(f"{_FR_TENS[tens]} et {_FR[ones]}")
        else:
            said.append(f"{_FR_TENS[tens]}-{_FR[ones]}")
    return " ".join(said)


def _spanish(number: int) -> str:
    thousands, rest = divmod(number, 1000)
    said = ([] if thousands == 1 else [_ES[thousands]]) + ["mil"] if thousands else []
    hundreds, below = divmod(rest, 100)
    if rest == 100:
        return " ".join([*said, "cien"])
    if hundreds:
        said.append(_ES_HUNDREDS[hundreds])
    if below and below < 30:
        said.append(_ES[below])
    elif below:
        tens, ones = divmod(below, 10)
        said.append(_ES_TENS[tens] + (f" y {_ES[ones]}" if ones else ""))
    return " ".join(said)


def _polish(number: int) -> str:
    thousands, rest = divmod(number, 1000)
    said = []
    if thousands == 1:
        said.append("tysiąc")
    elif thousands:
        said.append(f"{_PL[thousands]} {'tysiące' if thousands < 5 else 'tysięcy'}")
    hundreds, below = divmod(rest, 100)
    if hundreds:
        said.append(_PL_HUNDREDS[hundreds])
    if below and below < 20:
        said.append(_PL[below])
    elif below:
        tens, ones = divmod(below, 10)
        said += [_PL_TENS[tens]] + ([_PL[ones]] if ones else [])
    return " ".join(said)
