"""Names from an open space: keys, labels, tools and arguments that have to be copied because nobody could know them.

A name is one to three words, ordinary or coined, and can be spelled as code spells it or as people say it. None of
its words is part of a name that the other generators hold out of training.
"""

import random
from collections.abc import Callable, Iterable, Iterator

from training.data import invoice_parts, records, tool_parts, words
from training.data.sample import Split

Name = tuple[str, ...]
Spelling = Callable[[Name], str]

SMALL_WORDS = frozenset(["of", "on", "to", "by", "at", "no", "how", "many", "over", "only", "for"])


def _held_names() -> Iterator[str]:
    for labels in (*invoice_parts.HELD_LABELS.values(), invoice_parts.HELD_KEYS):
        yield from (name for names in labels.values() for name in names)
    yield from records.HELD_KEYS
    for thing, (_, facts) in tool_parts.HELD_THINGS.items():
        yield from (thing, *facts)
    for verb, ways in tool_parts.HELD_VERBS.items():
        yield from (verb, *ways)
    for kind in tool_parts.KINDS.values():
        yield from kind.held_names


HELD_NAMES = frozenset(words.spoken(name) for name in _held_names())
HELD_WORDS = frozenset(word for name in HELD_NAMES for word in name.split()) - SMALL_WORDS

VERBS = words.listed(
    """
    add adjust archive arrange attach backup block borrow browse build calibrate carry clear clone close collect
    combine compare compile connect copy count decline deploy detach disable download draw duplicate edit enable
    export fetch filter find finish flush follow format freeze gather grant group hide import install invite join
    launch load merge monitor mount move mute open pack pause pin plan play print publish push queue read rebuild
    refresh register release rename repair replace reset restart restore resume review rotate run save scan schedule
    share skip sort split start stop store submit subscribe suspend swap sync tag test track transfer trim unlock upload
    validate verify wake watch wipe
    """
)
# another way to say a verb, so that a request does not always repeat the tool's name
ALSO_SAID = {
    "add": "put in", "adjust": "fine-tune", "arrange": "set out", "attach": "fasten",
    "block": "shut out", "build": "put together", "clear": "empty", "clone": "make a twin of", "close": "shut",
    "collect": "pick up", "compare": "weigh up", "connect": "hook up", "copy": "make a copy of", "count": "tally",
    "decline": "turn down", "disable": "switch off", "enable": "switch on", "fetch": "bring me", "find": "look for",
    "finish": "wrap up", "gather": "bring together", "hide": "conceal", "install": "set going", "invite": "ask in",
    "launch": "kick off", "mount": "put up", "move": "shift", "mute": "hush", "pause": "put on hold",
    "print": "put on paper", "publish": "make known", "rebuild": "make anew", "rename": "give a new name to",
    "repair": "fix", "replace": "change out", "restart": "start over", "restore": "bring back", "review": "go over",
    "run": "carry out", "save": "keep", "share": "give out", "skip": "leave out", "stop": "halt",
    "submit": "turn in", "swap": "trade", "track": "keep an eye on", "unlock": "free", "verify": "make sure of",
    "watch": "look after", "wipe": "rub out",
}  # fmt: skip
NOUNS = words.listed(
    """
    agenda album alarm altitude angle antenna archive area backup badge barrel battery beacon belt bonus border branch
    bridge budget buffer bundle button cabinet cable campaign canal cargo carpet category channel chapter
    circuit claim class coach column comment container contract copy counter coupon course cover curve customs cycle
    dashboard deck degree delivery density depth desk device diagram diameter dish district dock driver duration
    edition emblem exam expiry factory family fan farm feature fee festival file filter fleet folder font forecast
    format frame freight frequency fuel function garage gallery gear grade grid group guard guide height hinge hobby
    host humidity image index insurance interval journal journey kernel kitchen lab layer lease lecture lens lesson
    library licence limit list loan lodge machine manager manual margin mask material menu message metal mileage mission
    mode module motor muscle neighbour network nickname notebook offer office origin outlet owner panel parking partner
    password patent patient pattern period permit pipe plan player playlist plot policy port portion poster prize
    profile project proof pump puzzle queue quota race radius range recipe refund relay rent repair reserve route rule
    salary sample scene schedule school score screen script season seat section sensor server session shade shape
    shelter shift shop sketch skill sleeve snapshot socket sponsor stage stamp status storage strategy stream studio
    style subscription suburb surface survey switch symbol table target team template terminal texture theatre theme
    threshold timer topic tour track trail trip trophy trunk turbine tutor uniform vehicle venue version volume voucher
    warehouse warranty weight width wing workshop zone
    """
)


def _part(ordinary: Iterable[str], split: Split) -> list[str]:
    """The words of a split: every eighth is kept for `unseen`."""
    free = [word for word in ordinary if word not in HELD_WORDS]
    return [word for place, word in enumerate(free) if (place % 8 == 0) == (split == "unseen")]


SPLIT_VERBS: dict[Split, list[str]] = {split: _part(VERBS, split) for split in ("train", "known", "unseen")}
SPLIT_NOUNS: dict[Split, list[str]] = {
    split: _part([*NOUNS, *(noun for noun in words.NOUNS if noun not in NOUNS)], split)
    for split in ("train", "known", "unseen")
}
ADJECTIVES = [word for word in words.ADJECTIVES if word not in HELD_WORDS]


def coined(rng: random.Random) -> str:
    while (word := words.coined(rng).lower()) in HELD_WORDS:
        pass
    return word


def verb(rng: random.Random, split: Split) -> str:
    return coined(rng) if rng.random() < 0.2 else rng.choice(SPLIT_VERBS[split])


def name(rng: random.Random, split: Split) -> Name:
    """One to three different words, the last a noun or coined."""
    nouns = SPLIT_NOUNS[split]
    last = coined(rng) if rng.random() < 0.3 else rng.choice(nouns)
    before = [
        coined(rng) if rng.random() < 0.2 else rng.choice(rng.choice([ADJECTIVES, nouns]))
        for _ in range(rng.choices([0, 1, 2], [3, 5, 1])[0])
    ]
    return tuple(dict.fromkeys([*before, last]))


def several(rng: random.Random, split: Split, count: int) -> list[Name]:
    """Different names; now and then two share a word and are told apart by the other one."""
    found: dict[str, Name] = {}
    while len(found) < count:
        made = name(rng, split)
        if found and rng.random() < 0.15:
            made = (rng.choice(list(found.values()))[0], made[-1])
        if len(set(made)) == len(made):
            found.setdefault("".join(made), made)
    return list(found.values())


def snake(name: Name) -> str:
    return "_".join(name)


def camel(name: Name) -> str:
    return name[0] + "".join(word.capitalize() for word in name[1:])


def kebab(name: Name) -> str:
    return "-".join(name)


def said(name: Name) -> str:
    return " ".join(name)


def sentence(name: Name) -> str:
    return " ".join(name).capitalize()


def title(name: Name) -> str:
    return " ".join(word.capitalize() for word in name)


def key_spelling(rng: random.Random) -> Spelling:
    """How a document's keys are written."""
    return rng.choices([snake, camel, kebab], [6, 3, 1])[0]


def label_spelling(rng: random.Random) -> Spelling:
    """How a document's labels are written."""
    return rng.choice([said, sentence, sentence, title])
