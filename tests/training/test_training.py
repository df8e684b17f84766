"""The whole training in miniature on a CPU: losses fall, an interrupted run ends where an uninterrupted one does, and
what comes out is a checkpoint that drafts."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from training.batches import Mixture
from training.config import DEMO, LIMIT, TINY, byte_budget
from training.dflash import Drafter
from training.export import export_drafter, export_model
from training.imitation import imitation
from training.model import Model
from training.quantize import train_for_int4
from training.state import PROGRESS, fill, load_weights

from stoker.backends.network.load import load_drafter, load_model
from training import loop, train_dflash, train_mtp, train_trunk

SOURCES = ("arithmetic", "questions", "stories")  # short and soon learned
PLAN = loop.Plan(
    shape="tiny", steps=40, batch=4, context=96, lr=6e-3, warmup=10, dispatch="grouped", int4_from=0.8, int4_group=32
)
SHORT = replace(PLAN, steps=20)  # for what takes no long training to show


@pytest.fixture(scope="module")
def rows(data: Path, tokenizer: Tokenizer) -> Mixture:
    return Mixture(data / "shards", tokenizer, only=SOURCES)


def train_trunk_for(plan: loop.Plan, run: Path, rows: Mixture, exact: bool = True) -> Model:
    """Trains up to `plan.steps`, laid out as PLAN."""
    model = train_trunk.prepare(plan)
    loop.train(
        model,
        lambda tokens, weights: train_trunk.loss_of(model, tokens, weights, plan.balance),
        plan,
        run,
        minutes=5,
        rows=rows,
        exact=exact,
        at_step=train_trunk.int4_switch(model, plan),
        log_every=5,
    )
    return model


@pytest.fixture(scope="module")
def trunk(rows: Mixture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "trunk"
    train_trunk_for(PLAN, run, rows)
    return run


def logged(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / loop.LOG).read_text().splitlines()]


def test_the_trunk_learns_and_says_how_fast(trunk: Path) -> None:
    entries = logged(trunk)
    assert entries[-1]["text"] < 0.7 * entries[0]["text"]
    assert entries[-1]["balance"] < 1.5  # 1 is perfect, the number of experts is the worst
    assert entries[-1]["tokens_per_s"] > 0
    assert [entry["step"] for entry in entries] == list(range(5, PLAN.steps + 1, 5))


def interrupted(run: Path, rows: Mixture, monkeypatch: pytest.MonkeyPatch, at: int, exact: bool) -> Model:
    """A short run stopped by the clock after `at` steps and started again."""

    def clock() -> float:
        done = len(logged(run)) * 5 if (run / loop.LOG).exists() else 0
        return time.perf_counter() if done < at else 1e9

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        train_trunk_for(SHORT, run, rows, exact)
    assert json.loads((run / PROGRESS).read_text())["step"] == at
    return train_trunk_for(SHORT, run, rows)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    rows: Mixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change to INT4 after the stop."""
    train_trunk_for(SHORT, tmp_path / "whole", rows)
    model = interrupted(tmp_path / "resumed", rows, monkeypatch, at=10, exact=True)
    whole = load_weights(tmp_path / "whole")
    assert set(whole) == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, values in whole.items():
        assert torch.equal(model.get_parameter(name).detach(), values), name


def test_without_its_moments_a_run_warms_up_again_and_still_learns(
    rows: Mixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path, rows, monkeypatch, at=10, exact=False)
    entries = logged(tmp_path)
    assert entries[2]["lr"] < entries[1]["lr"]
    assert entries[-1]["text"] < entries[1]["text"]


def test_another_plan_is_refused(trunk: Path, rows: Mixture) -> None:
    with pytest.raises(SystemExit, match=r"lr was 0\.006 and is now 0\.001"):
        train_trunk_for(replace(PLAN, lr=1e-3), trunk, rows)


def test_a_run_begun_before_an_option_existed_had_its_default(trunk: Path, rows: Mixture, tmp_path: Path) -> None:
    shutil.copytree(trunk, tmp_path / "run")
    path = tmp_path / "run" / PROGRESS
    progress = json.loads(path.read_text())
    del progress["plan"]["emphasise"]
    path.write_text(json.dumps(progress))
    train_trunk_for(PLAN, tmp_path / "run", rows)
    with pytest.raises(SystemExit, match="emphasise was '' and is now 'stories=3'"):
        train_trunk_for(replace(PLAN, emphasise="stories=3"), tmp_path / "run", rows)


def test_the_plan_says_which_sources_to_emphasise(data: Path) -> None:
    plan = replace(PLAN, data=str(data))
    one, three = (loop.mixture(replace(plan, emphasise=text), only=SOURCES) for text in ("", "stories=3"))
    assert three.shares[three.names.index("stories")] > 1.5 * one.shares[one.names.index("stories")]


def test_files_are_small_enough_to_travel(trunk: Path) -> None:
    assert max(path.stat().st_size for path in trunk.iterdir()) <= 16 * 2**20


def frozen(trunk: Path) -> Model:
    model = train_trunk.prepare(PLAN)
    fill(model, load_weights(trunk))
    return model.requires_grad_(False)


def test_both_drafters_learn_from_the_trunk_and_are_served(trunk: Path, rows: Mixture, tmp_path: Path) -> None:
    plan = replace(PLAN, steps=30, warmup=5)
    model = frozen(trunk)
    model.mtp.requires_grad_(True)
    before = {name: p.clone() for name, p in model.named_parameters() if not name.startswith("mtp.")}
    loop.train(
        model,
        lambda tokens, weights: train_mtp.loss_of(model, tokens, weights, plan.balance),
        plan,
        tmp_path / "mtp",
        minutes=5,
        rows=rows,
        log_every=5,
    )
    assert logged(tmp_path / "mtp")[-1]["loss"] < 0.9 * logged(tmp_path / "mtp")[0]["loss"]
    for name, values in before.items():
        assert torch.equal(values, model.get_parameter(name))

    drafter, generator = Drafter(TINY.dflash), torch.Generator()

    def reseed(step: int) -> None:
        generator.manual_seed(step)

    loop.train(
        drafter,
        lambda tokens, weights: train_dflash.loss_of(drafter, model, tokens, weights, generator, blocks=8),
        plan,
        tmp_path / "dflash",
        minutes=5,
        rows=rows,
        at_step=reseed,
        log_every=5,
    )
    assert logged(tmp_path / "dflash")[-1]["loss"] < 0.9 * logged(tmp_path / "dflash")[0]["loss"]

    export_model(model, TINY, tmp_path / "out")
    export_drafter(drafter, TINY, tmp_path / "out" / "dflash")
    loaded = load_model(tmp_path / "out")
    assert loaded.model.mtp is not None
    assert loaded.notes == []
    assert isinstance(load_drafter(tmp_path / "out" / "dflash", loaded.config), nn.Module)


def test_a_sharp_target_is_the_likeliest_token() -> None:
    logits, wanted = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    weights = torch.ones(2, 3)
    plain = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.softmax(-1).flatten(0, 1))
    best = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.argmax(-1).flatten())
    torch.testing.assert_close(imitation(logits, wanted, weights), plain)
    torch.testing.assert_close(imitation(logits, 1e3 * wanted, weights, sharpness=10.0), best)


def test_trunk_and_mtp_head_can_learn_together(rows: Mixture, tmp_path: Path) -> None:
    plan = replace(PLAN, steps=30, warmup=5, mtp=0.3)
    model = train_trunk.prepare(plan)
    tokens, weights = (torch.from_numpy(part) for part in rows.batch(0, 0, 2, 64))
    alone, both = (train_trunk.loss_of(model, tokens, weights, plan.balance, share) for share in (0.0, plan.mtp))
    assert torch.equal(alone["text"], both["text"])
    (both["loss"] - alone["loss"]).backward()  # what the drafts ask for reaches the trunk
    reached = [p.grad for name, p in model.named_parameters() if name.startswith("layers.0.mlp.shared_expert.")]
    assert reached
    assert all(grad is not None and float(grad.abs().max()) > 0 for grad in reached)
    model.zero_grad()
    loop.train(
        model,
        lambda tokens, weights: train_trunk.loss_of(model, tokens, weights, plan.balance, plan.mtp),
        plan,
        tmp_path / "together",
        minutes=5,
        rows=rows,
        log_every=5,
    )
    first, *_, last = logged(tmp_path / "together")
    assert last["text"] < first["text"]
    assert last["loss"] - last["text"] < 0.9 * (first["loss"] - first["text"])


def test_the_demo_fits_its_budget() -> None:
    """With room for tokenizer, headers and configuration."""
    assert sum(stored for _, stored in byte_budget(DEMO).values()) <= LIMIT - 2**19


def test_weights_of_another_shape_are_refused(trunk: Path) -> None:
    with pytest.raises(ValueError, match="another shape of model"):
        fill(Drafter(TINY.dflash), load_weights(trunk))


def test_every_kind_of_layer_compiles_into_one_graph(rows: Mixture) -> None:
    """What a GPU compiles: no breaks, and layers of a kind share their code. Rounding to INT4 compiles too."""
    graphs: list[object] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = Model(TINY.model)
    train_for_int4(model, 32)
    for layer in model.layers:
        layer.compile(backend=keep, fullgraph=True)
    tokens, weights = rows.batch(0, 0, 2, 64)
    train_trunk.loss_of(model, torch.from_numpy(tokens), torch.from_numpy(weights), 0.01)["loss"].backward()
    assert len(graphs) == 2
