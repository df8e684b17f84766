"""How a request wants its tokens chosen, checked when it is made. No torch."""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral

from stoker.errors import RequestError

MAX_LOGPROBS = 20
# settings that a model's generation_config.json and a server's operator give defaults for
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LARGEST = 1e6  # of temperature, penalties and bias, and one over it the smallest: fp32 holds what they make of a logit


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. Penalties, bias and filters act in the order of `sampler.py`."""

    max_tokens: int = 128
    min_tokens: int = 0  # stop ids are barred until this many tokens are out
    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on tokens of prompt and output
    presence_penalty: float = 0.0  # on tokens of the output
    frequency_penalty: float = 0.0  # on tokens of the output, per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # stop strings; one that ends within min_tokens is ordinary text
    logprobs: int | None = None  # of the chosen token and the n likeliest, before penalties and filters
    prompt_logprobs: int | None = None  # the same of every prompt token but the first

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "seed"):
            self._expect(name, are_whole([getattr(self, name)]), "a whole number")
        for name in ("logprobs", "prompt_logprobs"):
            most = getattr(self, name)
            self._expect(name, most is None or are_whole([most]), "a whole number or None")
            self._expect(name, most is None or 0 <= most <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        self._expect("max_tokens", self.max_tokens >= 1, "at least 1")
        self._expect("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens ({self.max_tokens})")
        divisor = self.temperature == 0.0 or _is_factor(self.temperature)
        self._expect("temperature", divisor, "0 (greedy) or 0.000001 to 1000000")
        self._expect("top_k", 0 <= self.top_k < 1 << 31, "0 (all tokens) or a positive number of at most 31 bits")
        self._expect("top_p", 0.0 < self.top_p <= 1.0, "more than 0 and at most 1")
        self._expect("min_p", 0.0 <= self.min_p < 1.0, "at least 0 and less than 1")
        self._expect("repetition_penalty", _is_factor(self.repetition_penalty), "0.000001 to 1000000")
        self._expect("presence_penalty", abs(self.presence_penalty) <= LARGEST, "-1000000 to 1000000")
        self._expect("frequency_penalty", abs(self.frequency_penalty) <= LARGEST, "-1000000 to 1000000")
        biases = self.logit_bias.values()
        self._expect("logit_bias", all(abs(bias) <= LARGEST for bias in biases), "numbers of -1000000 to 1000000")
        texts = not isinstance(self.stop, str) and all(isinstance(text, str) and text for text in self.stop)
        self._expect("stop", texts, "a tuple of strings that are not empty")
        self._expect("seed", -(1 << 63) <= self.seed < 1 << 63, "a number that fits 64 bits")

    @cached_property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def shapes(self) -> bool:
        """Whether scores are changed before temperature and filters."""
        return self.penalizes or bool(self.logit_bias) or bool(self.stop_ids and self.min_tokens)

    @cached_property
    def bias_arrays(self) -> "tuple[array[int], array[float]]":
        """Token ids (int64) and what is added to each (fp32): made once, since a step should not loop over them."""
        return array("q", self.logit_bias), array("f", self.logit_bias.values())

    @cached_property
    def stop_array(self) -> "array[int]":
        """The stop ids as int64."""
        return array("q", self.stop_ids)

    @cached_property
    def stop_set(self) -> frozenset[int]:
        return frozenset(self.stop_ids)

    @property
    def filters(self) -> bool:
        """Whether only some of the likeliest tokens may be chosen."""
        return self.top_k > 0 or self.top_p < 1.0

    def _expect(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise RequestError(f"{name} is {getattr(self, name)}, expected {expected}.")


def is_usable(value: object) -> bool:
    """Whether a default out of a file or an option is a number; its range is checked where a request uses it."""
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) < 1e9


def are_whole(values: Iterable[object]) -> bool:
    """Integers of Python or NumPy, not truth values."""
    return all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in set(map(type, values)))


def _is_factor(value: float) -> bool:
    return 1 / LARGEST <= value <= LARGEST
