"""Training goes on from what is served: a quantised checkpoint gives back the weights it was made from."""

import sys
from pathlib import Path

import pytest
import torch
from training.config import TINY
from training.dflash import Drafter
from training.export import export_drafter, export_model
from training.loop import LOG
from training.model import Model
from training.quantize import int4_names, snap
from training.state import fill, fill_mtp, load_weights, save_run

from stoker.checkpoint.build import BuildOptions, build
from training import train_dflash, train_mtp, train_trunk

GROUP = 32


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(5)
    model = Model(TINY.model)
    snap(model, GROUP)
    return model


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    torch.manual_seed(6)
    drafter = Drafter(TINY.dflash)
    snap(drafter, GROUP)
    return drafter


@pytest.fixture(scope="module")
def served(model: Model, drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    export_model(model, TINY, root / "bf16")
    export_drafter(drafter, TINY, root / "bf16" / "dflash")
    options = BuildOptions(
        str(root / "bf16"), quantize="hybrid-g32", draft_weights="int4-g32", drafter=str(root / "bf16" / "dflash")
    )
    build(options, root / "served")
    return root / "served"


def test_trunk_and_mtp_head_come_back(model: Model, served: Path) -> None:
    found = load_weights(served)
    assert set(found) == {name for name, _ in model.named_parameters()}
    exact = set(int4_names(model, GROUP))
    for name, parameter in model.named_parameters():
        assert found[name].dtype == torch.float32
        if name in exact:
            assert torch.equal(found[name], parameter), name
        else:  # 16 bit, or 8 bit for the head and the shared experts
            assert (found[name] - parameter).norm() <= 0.05 * parameter.norm(), name
    fill(Model(TINY.model), found)


def test_the_drafter_comes_back(drafter: Drafter, served: Path) -> None:
    found = load_weights(served / "drafter")
    exact = set(int4_names(drafter, GROUP))
    assert {name for name, parameter in drafter.named_parameters() if torch.equal(found[name], parameter)} >= exact
    fill(Drafter(TINY.dflash), found)


def test_only_the_mtp_head_is_taken_over(model: Model, served: Path) -> None:
    torch.manual_seed(7)
    other = Model(TINY.model)
    trunk = {name: p.clone() for name, p in other.named_parameters() if not name.startswith("mtp.")}
    fill_mtp(other, load_weights(served))
    assert all(torch.equal(other.get_parameter(name), values) for name, values in trunk.items())
    name = "mtp.layers.0.self_attn.q_proj.weight"
    assert torch.equal(other.get_parameter(name), model.get_parameter(name))


def test_weights_without_a_head_are_refused(model: Model, tmp_path: Path) -> None:
    model.mtp.requires_grad_(False)
    save_run(tmp_path, model, None, {})
    model.mtp.requires_grad_(True)
    with pytest.raises(ValueError, match="no MTP head to go on from"):
        fill_mtp(Model(TINY.model), load_weights(tmp_path))


def test_a_directory_of_neither_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="a training run or of a checkpoint"):
        load_weights(tmp_path)


def test_all_three_trainings_go_on_from_it(
    served: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate of zero: what is kept at the end is what was taken up."""
    common = f"--shape tiny --data {data} --steps 2 --batch 2 --context 128 --lr 0 --int4-group {GROUP} --light"
    commands = {
        "trunk": (train_trunk, f"--weights {served}"),
        "mtp": (train_mtp, f"--weights {tmp_path / 'trunk'} --start {served}"),
        "dflash": (train_dflash, f"--weights {tmp_path / 'trunk'} --start {served / 'drafter'}"),
    }
    for name, (command, options) in commands.items():
        monkeypatch.setattr(sys, "argv", [name, *f"--run {tmp_path / name} {options} {common}".split()])
        command.main()
        assert (tmp_path / name / LOG).exists()
    before, head = load_weights(served), load_weights(tmp_path / "mtp")
    assert all(torch.equal(head[name], before[name].bfloat16().float()) for name in before)
    drafter = load_weights(tmp_path / "dflash")
    assert all(torch.equal(drafter[name], v.bfloat16().float()) for name, v in load_weights(served / "drafter").items())
