"""Ranges from a hub that cuts, lies, is busy, is closed, or has changed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.weights.hub import ATTEMPTS, Hub, HubError, parse_repository
from tests.support.stand_in_hub import COMMIT, Fault, StandInHub

DATA = bytes(range(256)) * 40
FILE = "model.safetensors"


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandInHub]:
    (tmp_path / FILE).write_bytes(DATA)
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    with StandInHub(tmp_path).running() as hub:
        yield hub


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))


def hub_of(stand_in: StandInHub, slept: list[float] | None = None, token: str | bool = False) -> Hub:
    naps: list[float] = [] if slept is None else slept
    return Hub(stand_in.repository, "main", endpoint=stand_in.endpoint, token=token, sleep=naps.append)


def test_a_branch_is_pinned_to_its_commit_and_files_are_listed(stand_in: StandInHub) -> None:
    hub = hub_of(stand_in)
    assert set(hub.pin()) == {FILE, "config.json"}
    assert hub.revision == COMMIT
    assert hub.json_file("config.json") == {"model_type": "x"}
    assert f"/resolve/{COMMIT}/config.json" in stand_in.requests[-1][0]


def test_only_the_range_asked_for_is_sent(stand_in: StandInHub) -> None:
    hub = hub_of(stand_in)
    hub.pin()
    file = hub.stat(FILE)
    assert file.size == len(DATA)
    assert hub.read(file, 100, 1100) == DATA[100:1100]
    assert stand_in.sent == 1 + 1000
    assert stand_in.requests[-1][1] == "bytes=100-1099"


def test_a_cut_connection_is_taken_up_where_it_broke(stand_in: StandInHub) -> None:
    slept: list[float] = []
    hub = hub_of(stand_in, slept)
    hub.pin()
    file = hub.stat(FILE)
    stand_in.faults += [Fault(FILE, keep=300), Fault(FILE, keep=0), Fault(FILE, keep=200)]
    assert hub.read(file, 0, 1000) == DATA[:1000]
    ranges = [asked for path, asked, _ in stand_in.requests if path.endswith(FILE)][1:]
    assert ranges == ["bytes=0-999", "bytes=300-999", "bytes=300-999", "bytes=500-999"]
    assert slept == [1.0, 2.0, 1.0]  # the wait starts afresh after every byte of progress


def test_more_than_one_answer_may_hold_is_asked_for_in_parts(
    stand_in: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.weights.hub.LARGEST_RANGE", 400)
    hub = hub_of(stand_in)
    hub.pin()
    file = hub.stat(FILE)
    stand_in.faults += [Fault(FILE), Fault(FILE, keep=100)]
    assert hub.read(file, 0, 1000) == DATA[:1000]
    ranges = [asked for path, asked, _ in stand_in.requests if path.endswith(FILE)][1:]
    assert ranges == ["bytes=0-399", "bytes=400-799", "bytes=500-899", "bytes=900-999"]


def test_a_server_that_never_recovers_is_given_up_with_a_sentence(stand_in: StandInHub) -> None:
    slept: list[float] = []
    hub = hub_of(stand_in, slept)
    hub.pin()
    stand_in.faults += [Fault(FILE, status=503)] * ATTEMPTS
    with pytest.raises(HubError, match=r"status 503, 6 times in a row; run the same command later"):
        hub.stat(FILE)
    assert slept == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_429_waits_as_long_as_the_server_asks(stand_in: StandInHub) -> None:
    slept: list[float] = []
    hub = hub_of(stand_in, slept)
    stand_in.faults += [Fault("api", status=429, headers={"Retry-After": "17"})]
    hub.pin()
    assert slept == [17.0]
    stand_in.faults += [Fault("api", status=429, headers={"Retry-After": "Thu, 01 Jan 2026 00:00:00 GMT"})]
    hub.pin()
    assert slept == [17.0, 0.0]


def test_a_server_that_asks_for_hours_is_left_alone(stand_in: StandInHub) -> None:
    hub = hub_of(stand_in)
    stand_in.faults += [Fault("api", status=429, headers={"Retry-After": "7200"})]
    with pytest.raises(HubError, match=r"asks to wait 7,200 s"):
        hub.pin()


@pytest.mark.parametrize("status", [401, 403])
def test_a_closed_repository_names_the_login(stand_in: StandInHub, status: int) -> None:
    stand_in.faults += [Fault("api", status=status)]
    with pytest.raises(HubError, match=rf"status {status}, no token was given.*hf auth login"):
        hub_of(stand_in).pin()
    stand_in.faults += [Fault("api", status=status)]
    with pytest.raises(HubError, match=r"the token was not accepted.*hf auth login"):
        hub_of(stand_in, token="wrong").pin()


def test_a_token_opens_a_closed_repository_and_is_shown_to_no_other_host(stand_in: StandInHub) -> None:
    stand_in.token, stand_in.redirect = "secret", True
    hub = hub_of(stand_in, token="secret")
    hub.pin()
    assert hub.read(hub.stat(FILE), 5, 50) == DATA[5:50]
    on_cdn = [authorization for path, _, authorization in stand_in.requests if path.startswith("/cdn/")]
    assert on_cdn == [None, None]


def test_404_asks_to_check_the_name(stand_in: StandInHub) -> None:
    hub = hub_of(stand_in)
    hub.pin()
    with pytest.raises(HubError, match=r"has no owner/model/absent\.json"):
        hub.json_file("absent.json")
    with pytest.raises(HubError, match=r"has no owner/other@main"):
        Hub("owner/other", "main", endpoint=stand_in.endpoint, token=False).pin()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(FILE, status=416), r"shorter than its own header says \(status 416\)"),
        (Fault(FILE, whole=True), r"with the whole file.*does not serve ranges"),
        (Fault(FILE, shift=8), r"asked for bytes 10-99 of model.safetensors and answered bytes 18-107"),
        (Fault(FILE, short=3), r"asked for bytes 10-99 .* answered bytes 10-99/10240 with 87 bytes"),
        (Fault(FILE, etag='"other"'), r"changed while it was read"),
    ],
)
def test_answers_that_do_not_add_up_are_refused(stand_in: StandInHub, fault: Fault, message: str) -> None:
    hub = hub_of(stand_in)
    hub.pin()
    file = hub.stat(FILE)
    stand_in.faults.append(fault)
    with pytest.raises(HubError, match=message):
        hub.read(file, 10, 100)


def test_a_file_that_shrank_is_refused(stand_in: StandInHub) -> None:
    hub = hub_of(stand_in)
    hub.pin()
    file = hub.stat(FILE)
    (stand_in.directory / FILE).write_bytes(DATA[:5000])
    with pytest.raises(HubError, match=r"size 10,240 .* 5,000"):
        hub.read(file, 0, 100)


def test_a_hub_that_is_not_there_is_a_sentence() -> None:
    hub = Hub("owner/model", "main", endpoint="http://127.0.0.1:9", token=False, sleep=lambda seconds: None)
    with pytest.raises(HubError, match="cannot be reached"):
        hub.pin()


def test_names_of_repositories() -> None:
    assert parse_repository("hf:Qwen/Qwen3.5-122B-A10B-FP8") == ("Qwen/Qwen3.5-122B-A10B-FP8", "main")
    assert parse_repository("hf:a/b@refs/pr/3") == ("a/b", "refs/pr/3")
    for text in ("hf:model", "hf:a/b/c", "hf:a/b@", "hf:../b", "hf:a/b?x", "hf:"):
        with pytest.raises(HubError, match="names no repository"):
            parse_repository(text)


def run_with(environment: dict[str, str], home: Path) -> str:
    """What a process with this environment says of a hub: huggingface_hub reads its settings once, when imported."""
    program = """
from stoker.weights.hub import Hub, HubError
hub = Hub("owner/model", "main", sleep=lambda seconds: None)
assert "secret" not in repr(hub)
try:
    print(sorted(hub.pin()), hub.json_file("config.json"))
except HubError as error:
    print(error)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=kept | {"HF_HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_endpoint_token_cache_and_offline_mode_come_from_the_environment(stand_in: StandInHub, tmp_path: Path) -> None:
    stand_in.token, home = "secret", tmp_path / "home"
    home.mkdir()
    there = {"HF_ENDPOINT": stand_in.endpoint}
    assert f"{stand_in.endpoint} refused owner/model@main (status 401, no token was given)" in run_with(there, home)
    assert "the token was not accepted" in run_with(there | {"HF_TOKEN": "wrong"}, home)
    assert "{'model_type': 'x'}" in run_with(there | {"HF_TOKEN": "secret"}, home)
    assert list(home.glob("hub/models--owner--model/snapshots/*/config.json"))
    (home / "token").write_text("secret")  # as `hf auth login` leaves it
    assert "{'model_type': 'x'}" in run_with(there, home)
    asked = len(stand_in.requests)
    assert "HF_HUB_OFFLINE is set, so owner/model@main cannot be fetched" in run_with(
        there | {"HF_HUB_OFFLINE": "1"}, home
    )
    assert len(stand_in.requests) == asked
