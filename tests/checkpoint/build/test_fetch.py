"""`hf:REPO`: only the tensors that a build takes, by range, resumed after a cut or a kill, as from a directory."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stoker.checkpoint.build import BuildOptions, build
from stoker.checkpoint.build.fetch import MakeHub
from stoker.weights.checkpoint import INDEX
from stoker.weights.hub import Hub, HubError
from tests.checkpoint.build.conftest import CopyOf, Published
from tests.checkpoint.build.result import bytes_of, tensor
from tests.support import situations
from tests.support.stand_in_hub import COMMIT, Fault, StandInHub

HF = "hf:owner/model"


@pytest.fixture(autouse=True)
def _in_miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps and flushes on the scale of files of a megabyte."""
    monkeypatch.setattr("stoker.checkpoint.build.fetch.GAP", 1000)
    monkeypatch.setattr("stoker.checkpoint.build.fetch.SYNC", 1000)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def stand_in(copy_of: CopyOf) -> Iterator[StandInHub]:
    with StandInHub(copy_of("qwen_fp8")).running() as hub:
        yield hub


def reach(stand_in: StandInHub) -> MakeHub:
    def make(repository: str, revision: str) -> Hub:
        return Hub(repository, revision, endpoint=stand_in.endpoint, token=False, sleep=lambda seconds: None)

    return make


def weights_of(directory: Path) -> dict[str, str]:
    return {name: digest for name, digest in bytes_of(directory).items() if name != "stoker.json"}


def test_fetched_shared_experts_are_those_of_the_directory(
    published: Published, tmp_path: Path, stand_in: StandInHub
) -> None:
    base, said = published("intel_int4"), list[str]()
    local = build(BuildOptions(base, shared_experts=published("qwen_fp8")), tmp_path / "local")
    fetched = build(
        BuildOptions(base, shared_experts=HF), tmp_path / "fetched", say=said.append, make_hub=reach(stand_in)
    )
    assert weights_of(tmp_path / "fetched") == weights_of(tmp_path / "local")
    assert fetched.rules["--shared-experts"] == local.rules["--shared-experts"]  # all tensors are accounted for
    assert any(f"{HF} at {COMMIT}: " in line and line.endswith(" fetched") for line in said)
    (_, source) = json.loads((tmp_path / "fetched" / "stoker.json").read_text())["sources"]
    assert (source["repository"], source["revision"]) == ("owner/model", COMMIT)
    total = sum(path.stat().st_size for path in stand_in.directory.glob("*.safetensors"))
    headers = 2 * 60_000
    assert stand_in.sent < source["tensor_bytes"] + headers < total / 2
    assert source["repository_bytes"] > total * 0.9
    assert not (tmp_path / "fetched.partial").exists()


def test_an_mtp_head_the_index_leaves_out_is_found_in_the_headers(
    published: Published, out: Path, copy_of: CopyOf
) -> None:
    with StandInHub(copy_of("int4_index_without_mtp")).running() as hub:
        build(BuildOptions(published("int4_without_mtp"), mtp=f"{HF}@main"), out, make_hub=reach(hub))
        asked = {path.rsplit("/", 1)[1] for path, asked, _ in hub.requests if asked}
    assert asked == {situations.EXTRA}  # no header of the trunk's files, let alone their data
    name = "mtp.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensor(out, name), tensor(published("int4_index_without_mtp"), name))


def test_cuts_and_busy_answers_are_got_over(published: Published, tmp_path: Path, stand_in: StandInHub) -> None:
    base = published("intel_int4")
    build(BuildOptions(base, shared_experts=published("qwen_fp8")), tmp_path / "local")
    stand_in.faults += [
        Fault(INDEX, status=500),
        Fault("00001-of", status=429, headers={"Retry-After": "1"}),
        Fault("00001-of", keep=0),
        Fault("00001-of", keep=100),
        Fault("00001-of", keep=20_000),
        Fault("00002-of", keep=7),
    ]
    build(BuildOptions(base, shared_experts=HF), tmp_path / "fetched", make_hub=reach(stand_in))
    assert not stand_in.faults
    assert weights_of(tmp_path / "fetched") == weights_of(tmp_path / "local")


def test_an_interrupted_fetch_goes_on_at_the_same_commit(
    published: Published, tmp_path: Path, stand_in: StandInHub
) -> None:
    base, out = published("intel_int4"), tmp_path / "fetched"
    build(BuildOptions(base, shared_experts=published("qwen_fp8")), tmp_path / "local")
    # The second file breaks off in the middle of its data and the server is gone for good.
    stand_in.faults += [Fault("00002-of", keep=None)] * 3
    stand_in.faults += [Fault("00002-of", keep=5_000), *[Fault("00002-of", status=503)] * 6]
    with pytest.raises(HubError, match="status 503, 6 times in a row"):
        build(BuildOptions(base, shared_experts=HF), out, make_hub=reach(stand_in))
    assert not out.exists()
    stand_in.requests.clear()
    pinned: list[str] = []

    def make(repository: str, revision: str) -> Hub:
        pinned.append(revision)
        return reach(stand_in)(repository, revision)

    build(BuildOptions(base, shared_experts=HF), out, make_hub=make)
    assert pinned == [COMMIT]  # not wherever main may stand by now
    again = [asked for path, asked, _ in stand_in.requests if "00001-of" in path]
    assert len(again) == 3  # size, length of the header, header: its data is here
    assert weights_of(out) == weights_of(tmp_path / "local")


def test_a_file_that_changed_on_the_hub_meanwhile_is_refused(
    published: Published, out: Path, stand_in: StandInHub
) -> None:
    stand_in.faults += [Fault("00002-of")] * 3 + [Fault("00002-of", keep=5_000)] + [Fault("00002-of", status=503)] * 6
    with pytest.raises(HubError, match="503"):
        build(BuildOptions(published("intel_int4"), shared_experts=HF), out, make_hub=reach(stand_in))
    second = next(stand_in.directory.glob("*00002-of*"))
    situations.rewrite(second, lambda tensors: tensors.update({"mtp.more.weight": torch.ones(4)}))
    with pytest.raises(HubError, match=r"changed on the hub since a part of it was fetched"):
        build(BuildOptions(published("intel_int4"), shared_experts=HF), out, make_hub=reach(stand_in))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", r"owner/model/model.* is cut short: its header needs .* bytes and it has"),
        ("text", r"owner/model/model.* is not a whole safetensors file"),
        ("garbled", r"owner/model/model.* has a header that is not JSON"),
    ],
)
def test_remote_headers_that_do_not_add_up_are_refused(
    published: Published, out: Path, stand_in: StandInHub, damage: str, message: str
) -> None:
    path = next(stand_in.directory.glob("*00001-of*"))
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(
        {"cut": data[: start + 999], "text": b"<html>not here</html>", "garbled": data[:8] + b"?" + data[9:]}[damage]
    )
    with pytest.raises(HubError, match=message):
        build(BuildOptions(published("intel_int4"), shared_experts=HF), out, make_hub=reach(stand_in))


def test_a_repository_without_what_is_wanted_is_named(published: Published, out: Path, copy_of: CopyOf) -> None:
    with (
        StandInHub(copy_of("int4_without_mtp")).running() as hub,
        pytest.raises(HubError, match=r"--mtp hf:owner/model: the repository has none of the tensors"),
    ):
        build(BuildOptions(published("intel_int4"), mtp=HF), out, make_hub=reach(hub))


def test_a_drafter_is_fetched_whole(published: Published, out: Path, copy_of: CopyOf) -> None:
    with StandInHub(copy_of("drafter")).running() as hub:
        build(BuildOptions(published("intel_int4"), drafter=HF), out, make_hub=reach(hub))
    name = "layers.1.mlp.up_proj.weight"
    assert torch.equal(tensor(out / "drafter", name), tensor(published("drafter"), name))
    assert (out / "drafter" / "config.json").exists()
