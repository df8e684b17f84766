"""Random choices that a number repeats, and texts of all sorts."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
WORDS = (
    "train", "Győr", "tomorrow", "weather", "list", "please", "def main():", "日本語", "naïve", "Привет", "مرحبا", "42",
    "3.14", "{}", "null", "SELECT *", "\n", "  ", "\t", "🙂", "👩‍👩‍👧", "ﬁ", "e\u0301", "\u202e", "\ufeff", "\u2028",
)  # fmt: skip
MARKUP = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=get_train>", "<parameter=city>", "</parameter>",
    "</function>", "<tool_response>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "{{ 1 }}", "{% for %}", "[DONE]",
)  # fmt: skip
CONTROLS = ("\x00", "\x01", "\x07", "\x1b[31m", "\x7f", "\x85", "\ufffe", "\uffff", "\U0010ffff", "\r\n", "\x0b")


class Raw(str):
    """JSON text that stands as it is."""


class Draw(random.Random):
    def chance(self, share: float) -> bool:
        return self.random() < share

    def weighted(self, *choices: tuple[float, T]) -> T:
        return self.choices([choice for _, choice in choices], [weight for weight, _ in choices])[0]

    def some(self, share: float, options: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Each of the options with that chance."""
        return {name: make() for name, make in options.items() if self.chance(share)}

    def several(self, most: int, make: Callable[[], T], least: int = 0) -> list[T]:
        return [make() for _ in range(self.randint(least, most))]

    def text(self, most: int = 8) -> str:
        """Mostly words; now and then markup, control characters, nothing, or very much."""
        kind = self.weighted((84, "words"), (8, "markup"), (4, "controls"), (3, "empty"), (1, "long"))
        if kind == "empty":
            return ""
        if kind == "long":
            return self.choice(WORDS) * self.choice((500, 3000, 20_000))
        pool: Sequence[str] = {"words": WORDS, "markup": (*MARKUP, *WORDS), "controls": (*CONTROLS, *WORDS)}[kind]
        return " ".join(self.choice(pool) for _ in range(self.randint(1, most)))

    def name(self) -> str:
        return self.choice(("get_train", "search", "run_shell", "a.b", "x", "write-file", "ns::f", "book_seats"))

    def identifier(self) -> str:
        return f"{self.choice(('call', 'fc', 'msg', 'rs', 'toolu'))}_{self.getrandbits(64):x}"

    def tokens(self, most: int) -> list[int]:
        """Of the demo model's 4,608; seldom with one beyond them."""
        found = self.several(most, lambda: self.randrange(4608), least=1)
        return [*found, self.choice((4608, -1, 2**31))] if self.chance(0.05) else found
