"""Fetching a model from a hub that cuts, lies, is busy, closed or gone, and onto disks that are full."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from stoker.demo import EMBEDDED
from stoker.errors import StokerError
from stoker.up.fetch import Fetched, FetchError, FetchProgress, fetch, select
from stoker.up.hashes import blocks
from stoker.weights.hub import HubError
from tests.support.services import wait
from tests.support.stand_in_hub import COMMIT, Fault, StandInHub, sha256

HF = "hf:owner/model"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DATA = {ONE: os.urandom(3_000_000), TWO: os.urandom(1_000_000)}
INDEX = {"weight_map": {"a": ONE, "b": TWO}}
READ = {"config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja", ONE, TWO}


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandInHub]:
    folder = tmp_path / "hub"
    (folder / "original").mkdir(parents=True)
    for name, data in DATA.items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for other in ("pytorch_model.bin", "README.md", "original/model.safetensors"):
        (folder / other).write_text("not for us")
    with StandInHub(folder).running() as hub:
        yield hub


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("stoker.up.download.SPARE", 0)


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does, which is read once, when huggingface_hub is imported."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def cache(tmp_path: Path, stand_in: StandInHub, monkeypatch: pytest.MonkeyPatch) -> Path:
    point_at(stand_in.endpoint, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a fetch would wait between attempts; it does not."""
    found: list[float] = []
    monkeypatch.setattr("stoker.up.download.Download._wait", lambda self, seconds: found.append(seconds))
    return found


def get(
    source: str = HF, revision: str | None = "main", into: Path | None = None, **sha256: str
) -> tuple[Fetched, list[FetchProgress]]:
    told: list[FetchProgress] = []
    return fetch(source, revision, {ONE: sha256["one"]} if sha256 else {}, into, told.append), told


def storage(cache: Path) -> Path:
    return cache / "models--owner--model"


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def unfinished(cache: Path) -> list[Path]:
    """Whatever lies beside whole blobs."""
    return [path for path in (storage(cache) / "blobs").glob("*") if "." in path.name]


def assert_only_whole_files(cache: Path, but: int = 0) -> None:
    """Everything under a final name has the content that belongs to it; `but` unfinished files may wait."""
    for name in DATA:
        blob = storage(cache) / "blobs" / sha256(DATA[name])
        assert not blob.exists() or blob.read_bytes() == DATA[name]
    assert len(unfinished(cache)) == but
    for path in (storage(cache) / "snapshots").rglob("*.safetensors"):
        assert path.read_bytes() == DATA[path.name]


def test_only_what_an_engine_reads_is_fetched_and_found_where_other_tools_look(stand_in, cache):
    fetched, told = get()
    assert files_in(fetched.path) == READ
    assert (fetched.revision, fetched.bytes) == (COMMIT, sum(path.stat().st_size for path in fetched.path.iterdir()))
    assert_only_whole_files(cache)
    assert (told[0].step, told[-1].step, told[-1].done) == ("listing", "fetching", fetched.bytes)
    assert huggingface_hub.try_to_load_from_cache("owner/model", ONE) == str(fetched.path / ONE)
    (found,) = huggingface_hub.scan_cache_dir(cache).repos
    assert (found.repo_id, [revision.commit_hash for revision in found.revisions]) == ("owner/model", [COMMIT])
    assert not huggingface_hub.scan_cache_dir(cache).warnings


def test_again_nothing_is_sent_and_nothing_read(stand_in, cache, monkeypatch):
    first, _ = get()
    stand_in.requests.clear()
    stand_in.sent_by_file.clear()
    monkeypatch.setattr("stoker.up.hashes.blocks", None)
    again, told = get()
    assert again == first
    assert told[-1].step == "checking"
    assert [path.partition("?")[0] for path, _, _ in stand_in.requests] == ["/api/models/owner/model/revision/main"]


def test_other_tools_find_what_was_fetched_and_what_they_fetched_is_used(stand_in, cache):
    there = huggingface_hub.snapshot_download("owner/model", allow_patterns=["*.json", ONE])
    stand_in.sent_by_file.clear()
    fetched, _ = get()
    assert str(fetched.path) == there
    assert set(stand_in.sent_by_file) & READ == {TWO, "chat_template.jinja"}
    read = ["*.safetensors", "*.json", "*.jinja"]
    assert there == huggingface_hub.snapshot_download(
        "owner/model", local_files_only=True, allow_patterns=read, ignore_patterns=["original/*"]
    )


def test_what_arrived_is_not_read_back(stand_in, cache, monkeypatch):
    read: list[str] = []

    def noted(path: Path) -> Iterator[memoryview]:
        read.append(path.name)
        return blocks(path)

    monkeypatch.setattr("stoker.up.hashes.blocks", noted)
    get()
    assert not set(read) & {sha256(data) for data in DATA.values()}
    assert read  # small files, which huggingface_hub wrote


def test_what_was_asked_for_comes_too_and_weights_that_are_there_twice_do_not():
    names = ["model.safetensors", "consolidated.safetensors", "model.bin", "drafter/model.safetensors", "code.py"]
    assert select(names) == ["model.safetensors", "drafter/model.safetensors"]
    assert select(names[1:]) == ["consolidated.safetensors", "drafter/model.safetensors"]  # the only weights
    assert "code.py" in select(names, also=["*.py"])


def test_cuts_are_taken_up_where_they_were(stand_in, cache, waits):
    stand_in.faults += [Fault(ONE), Fault(ONE, keep=1_000_000), Fault(ONE, keep=0), Fault(ONE, keep=1_500_000)]
    fetched, _ = get()
    assert (fetched.path / ONE).read_bytes() == DATA[ONE]
    assert stand_in.sent_by_file[ONE] == len(DATA[ONE]) + 1  # one byte tells that the file is the listed one
    assert waits == [1.0, 2.0, 1.0]


def test_a_busy_hub_is_given_the_time_it_asks_for(stand_in, cache, waits):
    stand_in.faults += [
        Fault("api", status=429, headers={"Retry-After": "17"}),
        Fault(ONE, status=503),
        Fault(ONE, status=429, headers={"Retry-After": "5"}),
        Fault(ONE, status=500),
    ]
    fetched, _ = get()
    assert waits == [17.0, 1.0, 5.0, 4.0]
    assert (fetched.path / ONE).read_bytes() == DATA[ONE]


def test_waiting_is_told(stand_in, cache):
    stand_in.faults += [Fault(ONE, status=429, headers={"Retry-After": "1"})]
    started = time.monotonic()
    _, told = get()
    assert time.monotonic() - started >= 1.0
    assert any("the next attempt is in 1 s" in each.note for each in told)
    assert told[-1].note == ""


def test_a_hub_that_stays_busy_is_given_up_and_what_arrived_is_used_later(stand_in, cache, waits):
    stand_in.faults += [Fault(ONE), Fault(ONE, keep=2_000_000), *[Fault(ONE, status=503)] * 6]
    with pytest.raises(HubError, match=r"status 503, 6 times in a row; run the same command later to go on from here"):
        get()
    assert_only_whole_files(cache, but=1)
    assert not (storage(cache) / "refs").exists()  # an incomplete snapshot is not offered
    stand_in.sent_by_file.clear()
    fetched, told = get()
    assert stand_in.sent_by_file[ONE] == len(DATA[ONE]) - 2_000_000 + 1
    assert told[1].done >= 2_000_000 or told[-1].done == fetched.bytes
    assert_only_whole_files(cache)


def test_a_file_that_arrives_with_another_hash_is_refused_and_not_kept(stand_in, cache):
    stand_in.faults += [Fault(ONE), Fault(ONE, damage=True)]
    with pytest.raises(FetchError, match=rf"owner/model/{ONE} arrived with another hash than the hub lists"):
        get()
    waiting = unfinished(cache)  # what came beside it may go on later
    assert not [path for path in waiting if sha256(DATA[ONE]) in path.name]
    assert_only_whole_files(cache, len(waiting))
    get()
    assert_only_whole_files(cache)


def test_a_beginning_that_was_damaged_on_the_disk_is_fetched_anew(stand_in, cache):
    begun = storage(cache) / "blobs" / f"{sha256(DATA[ONE])}.stoker.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"\0" * 1000 + DATA[ONE][1000:50_000])  # as after a loss of power
    fetched, _ = get()
    assert (fetched.path / ONE).read_bytes() == DATA[ONE]
    assert_only_whole_files(cache)


@pytest.mark.parametrize("name", [ONE, "config.json"])
def test_a_file_that_was_damaged_in_the_cache_is_fetched_anew_and_said(stand_in, cache, name):
    first, _ = get()
    blob = (first.path / name).resolve()
    right = blob.read_bytes()
    blob.write_bytes(b"?" + right[1:])
    again, _ = get()
    assert again.note == f"{name} was damaged in {storage(cache)} and fetched anew"
    assert (again.path / name).read_bytes() == right


def test_two_names_of_one_content_are_fetched_once(stand_in, cache):
    (stand_in.directory / "mtp.safetensors").write_bytes(DATA[ONE])
    fetched, _ = get()
    assert (fetched.path / "mtp.safetensors").read_bytes() == DATA[ONE]
    sent = stand_in.sent_by_file[ONE] + stand_in.sent_by_file["mtp.safetensors"]
    assert sent == len(DATA[ONE]) + 1


def test_a_beginning_that_is_too_long_is_fetched_anew(stand_in, cache):
    begun = storage(cache) / "blobs" / f"{sha256(DATA[TWO])}.stoker.incomplete"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(DATA[TWO] + b"!")
    fetched, _ = get()
    assert (fetched.path / TWO).read_bytes() == DATA[TWO]


def test_a_small_file_with_another_hash_is_refused(stand_in, cache, monkeypatch):
    listing = stand_in.listing
    monkeypatch.setattr(
        stand_in, "listing", lambda hashes: [{**entry, "blobId": "0" * 40} for entry in listing(hashes)]
    )
    with pytest.raises(FetchError, match="arrived with another hash than the hub lists"):
        get()
    assert not list((storage(cache) / "snapshots").rglob("*.json*"))


def test_a_hash_of_the_recipe_that_the_hub_does_not_list_is_refused_before_anything_is_sent(stand_in, cache):
    with pytest.raises(FetchError, match=rf"at {COMMIT} has the sha256 .* and the recipe states 0000.*another file"):
        get(one="0" * 64)
    assert not set(stand_in.sent_by_file) & READ
    assert get(one=sha256(DATA[ONE]))[0].revision == COMMIT
    with pytest.raises(FetchError, match=r"has no absent\.json, of which the recipe states a hash"):
        fetch(HF, "main", {"absent.json": "0" * 64}, None, print)


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(stand_in, cache, monkeypatch):
    monkeypatch.setattr("stoker.up.download.SPARE", 1 << 60)
    with pytest.raises(FetchError, match=r"needs 4\.0 MB more in .*--model, where .* are free and .*HF_HOME"):
        get()
    assert not set(stand_in.sent_by_file) & READ


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_too_small_for_real(stand_in, cache, small_disk):
    with pytest.raises(FetchError, match=r"needs 4\.0 MB more in .* where 2\.1 MB are free"):
        get(into=small_disk)
    assert not set(stand_in.sent_by_file) & READ


def test_a_disk_that_fills_up_meanwhile_keeps_what_arrived_under_no_final_name(
    stand_in, cache, small_disk, monkeypatch
):
    monkeypatch.setattr("stoker.up.download.free_bytes", lambda folder: 1 << 40)  # as it was before somebody else wrote
    with pytest.raises(FetchError, match=r"the disk is full.*What has arrived is kept; make room"):
        get(into=small_disk)
    assert_only_whole_files(small_disk, but=len(unfinished(small_disk)))
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    before = sum(path.stat().st_size for path in unfinished(small_disk))
    assert before > 0
    stand_in.sent_by_file.clear()
    get(into=small_disk)
    assert_only_whole_files(small_disk)
    assert sum(stand_in.sent_by_file[name] for name in DATA) <= sum(map(len, DATA.values())) - before + 2


def test_a_gated_repository_says_how_to_get_in(stand_in, cache, monkeypatch, tmp_path):
    stand_in.token, stand_in.gated = "secret", True
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    page = rf"Accept its terms at {stand_in.endpoint}/owner/model, then log in with `hf auth login` or set HF_TOKEN"
    with pytest.raises(HubError, match=rf"\(status 401\): the repository is gated, and no token was given\. {page}"):
        get()
    monkeypatch.setenv("HF_TOKEN", "other")
    with pytest.raises(HubError, match=rf"the account of the token has no access to it yet\. {page}") as refused:
        get()
    assert "other" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert files_in(get()[0].path) == READ


def test_a_revision_that_was_renamed_is_a_sentence_and_one_that_moved_is_followed(stand_in, cache, waits):
    stand_in.branches = {"main": COMMIT, "v2": COMMIT}
    with pytest.raises(HubError, match=r"has no owner/model@v1 \(revision v1\); check name and revision"):
        get(revision="v1")
    get(revision="v2")
    stand_in.commit = "b" * 40
    stand_in.branches = {"main": stand_in.commit}
    (stand_in.directory / "config.json").write_text('{"model_type": "y"}')
    stand_in.sent_by_file.clear()
    moved, _ = get()
    assert moved.revision == "b" * 40
    assert (moved.path / "config.json").read_text() == '{"model_type": "y"}'
    assert not [name for name in stand_in.sent_by_file if name in DATA]  # weights that did not change
    stand_in.commit = stand_in.branches["main"] = "c" * 40
    (stand_in.directory / TWO).write_bytes(DATA[ONE][:1000])
    stand_in.faults += [Fault(TWO, status=503)] * 5
    assert (get()[0].path / TWO).read_bytes() == DATA[ONE][:1000]


def test_a_revision_in_the_source_counts_and_two_that_differ_are_refused(stand_in, cache):
    assert get(f"{HF}@{COMMIT}")[0].revision == COMMIT
    assert get(f"{HF}@{COMMIT}", revision=None)[0].revision == COMMIT
    with pytest.raises(FetchError, match="one revision and the recipe another, v2"):
        get(f"{HF}@v1", revision="v2")


@pytest.mark.parametrize("revision", ["../../refs", "/etc/x", "a//b", "", "a b"])
def test_a_revision_that_is_none_is_refused(cache, revision):
    with pytest.raises(FetchError, match="cannot name a commit, tag or branch"):
        get(revision=revision)


def test_files_of_another_host_are_read_there_without_the_token(stand_in, cache, monkeypatch):
    """As a hub hands out large files, with what it says to tools that can do more than HTTP."""
    stand_in.token, stand_in.redirect, stand_in.xet = "secret", True, True
    monkeypatch.setenv("HF_TOKEN", "secret")
    fetched, _ = get()
    assert files_in(fetched.path) == READ
    assert stand_in.sent_by_file[ONE] == len(DATA[ONE]) + 1
    asked = {path.partition("/")[2].partition("/")[0]: token for path, _, token in stand_in.requests}
    assert asked == {"api": "Bearer secret", "owner": "Bearer secret", "cdn": None}


def test_without_a_hub_the_cache_serves_what_is_complete_and_right(stand_in, cache, monkeypatch):
    first, _ = get()
    point_at("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr("stoker.up.download.Download._wait", lambda self, seconds: None)
    again, _ = get()
    assert (again.path, again.revision, again.bytes) == (first.path, first.revision, first.bytes)
    assert "cannot be reached" in again.note
    assert "the files of the cache are used" in again.note
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get()[0] == first
    assert get(revision=COMMIT)[0] == first
    with pytest.raises(FetchError, match=r"HF_HUB_OFFLINE is set, and .* does not hold owner/model at v9"):
        get(revision="v9")
    (first.path / TWO).unlink()
    with pytest.raises(FetchError, match="with all its weights"):
        get()


def test_offline_a_damaged_file_is_refused(stand_in, cache, monkeypatch):
    first, _ = get()
    (first.path / ONE).resolve().write_bytes(b"?" + DATA[ONE][1:])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError, match=rf"{ONE} does not have the sha256 hash that the hub cache states"):
        get()


def test_a_folder_is_taken_as_it_is_and_its_hashes_are_checked(stand_in):
    folder = stand_in.directory
    fetched, _ = get(str(folder), revision=None)
    assert (fetched.path, fetched.revision) == (folder, "")
    assert fetched.bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    fetched, told = get(str(folder), one=sha256(DATA[ONE]))
    assert (told[-1].step, told[-1].done, told[-1].total) == ("checking", len(DATA[ONE]), len(DATA[ONE]))
    with pytest.raises(FetchError, match=rf"{ONE} does not have the sha256 hash that the recipe states \(0000"):
        get(str(folder), one="0" * 64)
    assert get("demo")[0].path == EMBEDDED
    with pytest.raises(FetchError, match=r"there is no directory owner/model\. .* write hf:owner/model"):
        get("owner/model")


def test_a_list_that_leads_out_of_the_repository_is_refused(stand_in, cache, monkeypatch):
    monkeypatch.setattr(
        stand_in, "listing", lambda hashes: [{"rfilename": "../x.safetensors", "size": 1, "blobId": "0" * 40}]
    )
    with pytest.raises(HubError, match=r"has a file '\.\./x\.safetensors', which lies outside of it"):
        get()


PROGRAM = """
import sys
from pathlib import Path
from stoker.up import download
from stoker.up.fetch import fetch
download.SPARE = 0
found = fetch("hf:owner/model", "main", {}, None, lambda progress: print(progress.step, flush=True))
print(found.path)
"""


def start(stand_in: StandInHub, home: Path, **more: str) -> "subprocess.Popen[str]":
    """A process of its own, for which the environment alone says where the hub is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": stand_in.endpoint, **more}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_ended_in_the_middle_of_a_file_it_goes_on_there(stand_in, tmp_path, ending):
    hold = threading.Event()
    stand_in.faults += [Fault(ONE), Fault(ONE, keep=2_000_000, hold=hold)]
    process = start(stand_in, tmp_path)
    blobs = storage(tmp_path / "hub") / "blobs"
    begun, other = blobs / f"{sha256(DATA[ONE])}.stoker.incomplete", blobs / sha256(DATA[TWO])
    try:
        wait(lambda: other.exists() and begun.exists() and begun.stat().st_size == 2_000_000)
    finally:
        process.send_signal(ending)
        process.communicate(timeout=30.0)  # though the hub is silent
        hold.set()
    assert_only_whole_files(tmp_path / "hub", but=1)
    stand_in.sent_by_file.clear()
    said, error = start(stand_in, tmp_path).communicate(timeout=60.0)
    assert not error
    assert said.splitlines()[-1].endswith(COMMIT)
    assert stand_in.sent_by_file[ONE] == 1_000_001
    assert_only_whole_files(tmp_path / "hub")


@pytest.mark.long
def test_killed_again_and_again_it_arrives(stand_in, tmp_path):
    """At any moment there are whole files under final names and beginnings of right content beside them."""
    pick = random.Random(1)
    for name in DATA:  # in pieces of a tenth, each cut after a pause in which the kill may come
        stand_in.faults += [Fault(name, keep=len(DATA[name]) // 10, hold=threading.Event()) for _ in range(5)]
    for _ in range(12):
        process = start(stand_in, tmp_path)
        until = time.monotonic() + pick.uniform(0.0, 3.0)
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert_only_whole_files(tmp_path / "hub", but=len(unfinished(tmp_path / "hub")))
        for name in DATA:
            begun = storage(tmp_path / "hub") / "blobs" / f"{sha256(DATA[name])}.stoker.incomplete"
            assert not begun.exists() or DATA[name].startswith(begun.read_bytes())
    stand_in.faults.clear()
    said, error = start(stand_in, tmp_path).communicate(timeout=60.0)
    assert (said.splitlines()[-1][-40:], error) == (COMMIT, "")
    assert_only_whole_files(tmp_path / "hub")


def test_two_at_once_send_everything_once(stand_in, tmp_path):
    hold = threading.Event()
    stand_in.faults += [Fault(ONE), Fault(ONE, keep=2_000_000, hold=hold)]
    first = start(stand_in, tmp_path)
    wait(lambda: stand_in.sent_by_file[ONE] > 1)
    second = start(stand_in, tmp_path)
    lines = iter(second.stdout or ())
    assert next(lines).startswith("listing")
    assert next(lines).startswith("waiting")
    hold.set()
    assert first.communicate(timeout=60.0)[0].splitlines()[-1].endswith(COMMIT)
    assert second.communicate(timeout=60.0)[0].splitlines()[-1].endswith(COMMIT)
    assert stand_in.sent_by_file[ONE] == len(DATA[ONE]) + 1
    assert_only_whole_files(tmp_path / "hub")


def test_without_huggingface_hub_the_advice_is_given(monkeypatch):
    monkeypatch.setattr("stoker.up.fetch.find_spec", lambda name: None)
    with pytest.raises(StokerError, match=r"needs huggingface_hub, which the base install leaves out; install"):
        get()
