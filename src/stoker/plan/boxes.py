"""Boxes that no table has: several of one kind, and any box by its numbers."""

import re
from dataclasses import replace

from stoker.errors import RequestError
from stoker.plan.catalog import GIB, Box

MOST = 16  # of one box
NETWORK_GB_S = 25.0  # between boxes of one memory, where nothing is stated: what two Sparks have
BUS_GB_S = 32.0  # between cards
ACHIEVABLE = 0.85  # of a bandwidth on paper
CARD_FROM_GB_S = 700.0  # a memory faster than that is taken for a card's own
TFLOPS_PER_GB_S = 0.1  # assumed arithmetic; boxes of the table have 0.03 to 0.46
SYSTEM_GIB, DRIVER_SHARE = 5.0, 0.03
UNITS = {
    "mem": {"gb": 1e9, "gib": GIB, "g": 1e9, "": 1e9, "tb": 1e12},
    "bw": {"gb/s": 1.0, "gbs": 1.0, "": 1.0, "tb/s": 1e3, "tbs": 1e3},
}
KEYS = ("mem", "bw", "tflops", "n", "unified", "price", "name")


def times(count: int, box: Box) -> Box:
    """So many of them: weights are split over all, each reads its share."""
    if not 1 <= count <= MOST:
        raise RequestError(f"{count} x {box.key} was asked for; the planner takes 1 to {MOST} of a box.")
    if count == 1:
        return box
    link = box.link_gb_s or (NETWORK_GB_S if box.unified else BUS_GB_S)
    return replace(
        box,
        key=f"{count}x{box.key}",
        name=f"{count}x {box.name}",
        devices=count * box.devices,
        memory_gb=count * box.memory_gb,
        visible_gib=count * box.visible_gib,
        usable_gib=count * box.usable_gib,
        reserve_gib=count * box.reserve_gib,
        power_w=count * box.power_w,
        power_idle_w=count * box.power_idle_w,
        price_usd=None if box.price_usd is None else count * box.price_usd,
        price_source=f"{count} times {box.price_source}" if box.price_source else "",
        source=f"{count} times: {box.source}",
        link_gb_s=link,
        aliases=(),
        base=box.base or box.key,
        count=count * box.count,
    )


def by_numbers(text: str) -> Box:
    """mem=128GB,bw=273GB/s, and what else is known: tflops=125, n=2, unified=yes, price=4699, name=..."""
    given: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        given[key.strip().lower()] = value.strip()
    unknown = [key for key in given if key not in KEYS]
    if unknown or not {"mem", "bw"} <= given.keys():
        lacking = f"{unknown[0]!r} is not among them" if unknown else "mem and bw are needed"
        raise RequestError(
            f"--box {text} describes a box by {', '.join(KEYS)}, and {lacking}; write mem=128GB,bw=273GB/s."
        )
    memory, bandwidth = _amount(text, "mem", given["mem"]) / GIB, _amount(text, "bw", given["bw"])
    unified = _yes(text, given["unified"]) if "unified" in given else bandwidth < CARD_FROM_GB_S
    tflops = _number(text, given["tflops"]) if "tflops" in given else TFLOPS_PER_GB_S * bandwidth
    reserve = min(SYSTEM_GIB, 0.2 * memory) if unified else DRIVER_SHARE * memory
    said = "memory and bandwidth as you state them; " + ("" if "tflops" in given else "arithmetic assumed low; ")
    box = Box(
        key="custom",
        name=given.get("name") or f"a box of {memory * GIB / 1e9:.0f} GB at {bandwidth:.0f} GB/s",
        architecture="unknown",
        unified=unified,
        devices=1,
        memory_gb=round(memory * GIB / 1e9, 1),
        visible_gib=memory,
        usable_gib=memory - reserve,
        reserve_gib=reserve,
        bandwidth_gb_s=bandwidth,
        achievable_gb_s=ACHIEVABLE * bandwidth,
        tflops_bf16=tflops,
        price_usd=_number(text, given["price"]) if "price" in given else None,
        price_source="as you state it" if "price" in given else "",
        power_w=0.0,
        power_idle_w=0.0,
        date="now",
        source=f"{said}{'one memory for all' if unified else 'a card'} assumed" if "unified" not in given else said,
    )
    return times(int(_number(text, given.get("n", "1"))), box)


def _amount(text: str, key: str, value: str) -> float:
    found = re.fullmatch(r"([\d.]+)\s*([a-z/]*)", value.lower())
    if not found or found[2] not in UNITS[key]:
        example = "128GB" if key == "mem" else "273GB/s"
        raise RequestError(f"--box {text}: {key}={value} is no amount; write {key}={example}.")
    return _number(text, found[1]) * UNITS[key][found[2]]


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise RequestError(f"--box {text}: {value!r} is no number above zero.")
    return number


def _yes(text: str, value: str) -> bool:
    if value.lower() not in ("yes", "no", "true", "false", "1", "0"):
        raise RequestError(f"--box {text}: unified={value} should be yes or no.")
    return value.lower() in ("yes", "true", "1")
