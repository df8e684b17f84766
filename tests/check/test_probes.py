"""The same question beside others, with the same seed again, without drafts: changes are counted, harm is a concern."""

import asyncio
from typing import Any

import pytest

from stoker.bench.journal import Journal
from stoker.bench.target import Target
from stoker.check import sanity
from stoker.check.checkers import Reply
from stoker.check.items import Item
from stoker.check.probes import ASKED, BESIDE, DRAFTS, SEED, choose, probes
from stoker.check.record import Asked, Judged, Sanity
from stoker.check.run import Runner
from stoker.check.suites import arithmetic, invoices, long_context, tools
from tests.check.mock import KnowingServer

ITEMS = [*arithmetic.items("1", 12), *tools.items("1", 5)]


class Fickle(KnowingServer):
    """Its answers may depend on what else runs, on chance, and on drafts; it may have a switch for drafts."""

    def __init__(
        self, *, beside: str = "", chance: bool = False, drafts: bool = False, switch: bool = False, undrafted: str = ""
    ) -> None:
        super().__init__(ITEMS)
        self.beside, self.chance, self.drafts, self.switch, self.undrafted = beside, chance, drafts, switch, undrafted
        self.running_now = self.most = self.count = 0

    async def answer(self, item: Item, body: dict[str, Any]) -> tuple[str, list[dict[str, str]]]:
        self.running_now += 1
        self.most = max(self.most, self.running_now)
        await asyncio.sleep(0.05 if self.running_now > 1 or self.most > 1 else 0.005)
        text, calls = await super().answer(item, body)
        if self.running_now > 1:
            text += self.beside
        if self.chance and body["temperature"] > 0:
            self.count += 1
            text += f" {self.count}"
        if self._off(body):
            text += self.undrafted
        self.running_now -= 1
        return text, calls

    def told(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.drafts:
            return {}
        return {"metrics": {"speculative_decoding": {"num_draft_tokens": 0 if self._off(body) else 5}}}

    def _off(self, body: dict[str, Any]) -> bool:
        return self.switch and body.get("draft") is False


def probed(server: Fickle) -> dict[str, Sanity]:
    async def go() -> list[Sanity]:
        async with server.running(), Target(server.url, name="A") as target:
            runner = Runner([target], ITEMS, Journal(None, {}, Asked))
            return await probes(runner, ITEMS)

    return {each.name: each for each in asyncio.run(go())}


def test_a_steady_server_changes_nothing():
    server = Fickle(drafts=True, switch=True)
    found = probed(server)
    assert list(found) == [BESIDE, SEED, DRAFTS]
    assert all(each.counts == {"A": 0} and each.of == {"A": ASKED} for each in found.values())
    assert not any(each.concern for each in found.values())
    assert server.most == ASKED, "all were asked at once"
    assert {body["seed"] for body in server.asked if body["temperature"] > 0} == {26}


def test_answers_that_change_beside_others_are_a_concern_where_they_are_spoilt():
    spoilt = probed(Fickle(beside=" <|im_end|>"))[BESIDE]
    assert spoilt.counts["A"] >= ASKED - 1
    assert spoilt.concern
    assert "became worse on A" in spoilt.note
    other = probed(Fickle(beside="\n"))[BESIDE]
    assert other.counts["A"] >= ASKED - 1
    assert not other.concern


def test_a_probe_of_which_most_questions_fail_is_a_concern() -> None:
    server = Fickle()
    server.fails = lambda _: True
    for found in (probed(server)[name] for name in (BESIDE, SEED)):
        assert found.concern
        assert f"{ASKED} of {ASKED} questions failed" in found.note


def test_a_seed_that_reproduces_nothing_is_a_concern():
    found = probed(Fickle(chance=True))[SEED]
    assert found.counts == {"A": ASKED}
    assert found.concern


@pytest.mark.parametrize(
    ("server", "of", "said"),
    [
        (Fickle(), 0, "does not tell of drafts"),
        (Fickle(drafts=True), 0, "has no switch for drafts: 40 tokens were drafted all the same"),
        (Fickle(drafts=True, switch=True), ASKED, ""),
    ],
)
def test_drafts_are_switched_off_where_the_servers_own_counts_show_it(server, of, said):
    found = probed(server)[DRAFTS]
    assert found.of == {"A": of}
    assert said in found.note
    assert not found.concern


def test_answers_that_differ_without_drafts_are_a_concern():
    found = probed(Fickle(drafts=True, switch=True, undrafted="!"))[DRAFTS]
    assert found.counts == {"A": ASKED}
    assert found.concern


def test_questions_are_short_and_of_every_suite():
    chosen = choose([*invoices.items("1", 9), *long_context.items("1", 4), *ITEMS])
    assert [item.suite for item in chosen] == ["invoices", "arithmetic", "tools"] * 2 + ["invoices", "arithmetic"]


def test_a_problem_is_a_concern_if_chance_does_not_explain_it():
    def answers(on_a: int, on_b: int) -> list[Asked]:
        def judged(has: bool) -> Judged:
            return Judged(Reply(text="x"), 1.0, "", ["looping"] if has else [])

        return [
            Asked(str(n), "s", "", "", "", None, {"A": judged(n < on_a), "B": judged(n >= 100 - on_b)})
            for n in range(100)
        ]

    assert sanity.summary(answers(12, 0))[0].concern
    assert not sanity.summary(answers(4, 0))[0].concern
    assert not sanity.summary(answers(12, 9))[0].concern
    assert not sanity.summary(answers(0, 12))[0].concern
