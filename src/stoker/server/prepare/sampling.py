"""The sampling settings of a request, with the model's defaults for what it leaves open."""

import secrets
from dataclasses import replace

from stoker.errors import RequestError
from stoker.sampling.settings import SAMPLED, Sampling
from stoker.server.errors import ApiError, api_error
from stoker.server.model import ServedModel
from stoker.server.schemas.common import SamplingBody

MOST_CHOICES = 64
MOST_STOPS, LONGEST_STOP = 16, 1024  # stop strings, and characters of one
MOST_TOKEN_IDS = 4096  # of logit_bias, and of stop_token_ids
UNSUPPORTED = {
    "use_beam_search": "beam search is not supported; sample with n instead",
    "include_stop_str_in_output": "stop strings are always left out of the answer",
}


def sampling_of(request: SamplingBody, model: ServedModel, max_tokens: int, logprobs: int | None = None) -> Sampling:
    """Raises ApiError 400 for invalid values. A request without a seed gets a random one."""
    refuse_unsupported(request)
    _check_sizes(request)
    given = {name: model.defaults.get(name) for name in SAMPLED}
    given |= {name: getattr(request, name) for name in given if getattr(request, name) is not None}
    top_k = given["top_k"]
    try:
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            temperature=1.0 if given["temperature"] is None else float(given["temperature"]),
            top_p=1.0 if given["top_p"] is None else float(given["top_p"]),
            top_k=0 if top_k in (None, -1) else top_k,
            min_p=given["min_p"] or 0.0,
            repetition_penalty=1.0 if given["repetition_penalty"] is None else float(given["repetition_penalty"]),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=_bias(request.logit_bias),
            seed=secrets.randbits(62) if request.seed is None else request.seed,
            stop_ids=(() if request.ignore_eos else model.stop_ids) + tuple(request.stop_token_ids or ()),
            stop=_stops(request.stop),
            logprobs=logprobs,
        )
    except RequestError as error:
        raise api_error(error) from error


def choice_count(request: SamplingBody) -> int:
    count = 1 if request.n is None else request.n
    if not 1 <= count <= MOST_CHOICES:
        raise ApiError(400, f"n is {count}, expected 1 to {MOST_CHOICES}.", param="n")
    if request.best_of is not None and request.best_of != count:
        raise ApiError(400, f"best_of is {request.best_of} and n is {count}; only answers asked for are made.")
    return count


def choice_samplings(sampling: Sampling, count: int) -> list[Sampling]:
    """The settings of each choice, which differ in the seed only."""
    top = 1 << 63
    return [replace(sampling, seed=(sampling.seed + index + top) % (2 * top) - top) for index in range(count)]


def refuse_unsupported(request: SamplingBody) -> None:
    for name, reason in UNSUPPORTED.items():
        if getattr(request, name):
            raise ApiError(400, f"{name} was asked for, but {reason}.", param=name)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MOST_STOPS:
        raise ApiError(400, f"stop has {len(stops)} strings, and at most {MOST_STOPS} are looked for.", param="stop")
    longest = max(map(len, stops), default=0)
    if longest > LONGEST_STOP:
        raise ApiError(400, f"a stop string has {longest:,} characters, at most {LONGEST_STOP:,} may be.", param="stop")
    return stops


def _check_sizes(request: SamplingBody) -> None:
    """Limits lists that are read for every token."""
    for name in ("logit_bias", "stop_token_ids"):
        count = len(getattr(request, name) or ())
        if count > MOST_TOKEN_IDS:
            raise ApiError(400, f"{name} has {count:,} entries, and at most {MOST_TOKEN_IDS:,} are taken.", param=name)


def _bias(bias: dict[str, float] | None) -> dict[int, float]:
    try:
        found = {int(token): value for token, value in (bias or {}).items()}
    except ValueError as error:
        raise ApiError(400, f"logit_bias has a key that is no token id: {error}.", param="logit_bias") from error
    beyond = next((value for value in found.values() if not -100.0 <= value <= 100.0), None)
    if beyond is not None:
        raise ApiError(400, f"logit_bias is {beyond} for a token, expected -100 to 100.", param="logit_bias")
    return found
