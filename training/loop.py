"""What the three trainings share: schedule, optimizer, precision, the loop with its clock, log and checkpoints."""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.batches import Mixture, emphasis
from training.state import PROGRESS, load_run, save_run
from training.tokenizer import load as load_tokenizer

LOG = "log.jsonl"


@dataclass(frozen=True)
class Plan:
    """Everything a run depends on. The command line reads its defaults from here."""

    shape: str = "demo"
    data: str = "build/training"
    seed: int = 1
    steps: int = 12_000  # of the whole run: the learning rate is laid out over these
    batch: int = 64  # rows
    context: int = 1024  # tokens of a row
    lr: float = 2e-3
    warmup: int = 200
    decay: float = 0.3  # last share of the steps, in which the learning rate falls to zero
    weight_decay: float = 0.05
    clip: float = 1.0
    balance: float = 0.01  # weight of the experts' balancing loss
    mtp: float = 0.0  # trunk: weight of the MTP head's loss, where it learns along; 0: it does not
    sharpness: float = 1.0  # of the trunk's distribution that the MTP head imitates
    dispatch: str = "dense"
    int4_from: float = 1.0  # share of the steps after which weights are rounded to INT4 in the forward pass
    int4_group: int = 128
    compile: bool = False
    emphasise: str = ""  # sources to take more often than training.batches.WEIGHTS says: "code=3,code_tests=2"

    def lr_at(self, done: float, since_restart: int) -> float:
        """Warm-up, constant, linear fall by the share `done` of the run. A run without its moments warms up again."""
        rise = min(1.0, (since_restart + 1) / max(1, self.warmup))
        return self.lr * min(rise, max(0.0, min(1.0, (1.0 - done) / max(self.decay, 1e-9))))


def parse(description: str, **defaults: Any) -> tuple[Plan, argparse.Namespace]:
    """A Plan with these defaults from the command line, and the options that are not part of it."""
    parser = argparse.ArgumentParser(description=description)
    plan = replace(Plan(), **defaults)
    for field in fields(Plan):
        value = getattr(plan, field.name)
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(flag, type=type(value), default=value)
    parser.add_argument("--run", "--resume", type=Path, required=True, help="run directory; goes on where it stopped")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so many minutes")
    parser.add_argument("--weights", type=Path, help="run directory or checkpoint of the trunk to start from")
    parser.add_argument("--start", type=Path, help="drafters: run directory or checkpoint of the drafter to go on from")
    parser.add_argument("--until", type=int, help="stop before this step, to go on in another stretch")
    parser.add_argument("--by-clock", action="store_true", help="lay the learning rate out over --minutes, not --steps")
    parser.add_argument("--light", action="store_true", help="keep bf16 weights only, no optimizer state")
    options = parser.parse_args()
    try:
        emphasis(options.emphasise)
    except ValueError as wrong:
        parser.error(str(wrong))
    return Plan(**{field.name: getattr(options, field.name) for field in fields(Plan)}), options


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def precision(where: torch.device) -> torch.autocast:
    """bf16 on a GPU, fp32 on a CPU."""
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return torch.autocast(where.type, dtype=torch.bfloat16, enabled=where.type == "cuda")


def adamw(named: Iterable[tuple[str, nn.Parameter]], plan: Plan, where: torch.device) -> torch.optim.AdamW:
    """Matrices decay; norms, decay rates and embeddings do not."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        (matrices if parameter.dim() > 1 and "embed" not in name and "conv1d" not in name else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.95), fused=where.type == "cuda")


def mixture(plan: Plan, only: tuple[str, ...] = (), own: bool = False) -> Mixture:
    data, factors = Path(plan.data), emphasis(plan.emphasise)
    return Mixture(data / "shards", load_tokenizer(data / "tokenizer"), only=only, factors=factors, own=own)


def to_device(drawn: tuple[np.ndarray, np.ndarray], where: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and weights of a batch; from pinned memory a copy does not wait for the step before it."""
    tokens, weights = (torch.from_numpy(part) for part in drawn)
    if where.type == "cuda":
        tokens, weights = tokens.pin_memory(), weights.pin_memory()
    return tokens.to(where, non_blocking=True), weights.to(where, non_blocking=True)


Loss = Callable[[Tensor, Tensor], dict[str, Tensor]]  # tokens, weights -> "loss" and whatever else is worth logging


def train(
    module: nn.Module,
    loss_of: Loss,
    plan: Plan,
    run: Path,
    minutes: float,
    rows: Mixture,
    exact: bool = True,
    at_step: Callable[[int], None] | None = None,
    log_every: int = 20,
    until: int | None = None,
    by_clock: bool = False,
) -> dict[str, Any]:
    """Trains the parameters of `module` that ask for gradients until the plan is done or the time is up.

    `at_step` is told every step's number before it runs. A run `by_clock` is one stretch whose learning rate has
    fallen to zero when its minutes are over, however many steps that takes.
    """
    where = next(module.parameters()).device
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    optimizer = adamw(trained, plan, where)
    step, restarted_at, tokens = 0, 0, 0
    if (run / PROGRESS).exists():
        progress, went_on = load_run(run, module, optimizer)
        _check_plan(progress["plan"], plan, run)
        step, tokens = progress["step"], progress["tokens"]
        restarted_at = progress["restarted_at"] if went_on else step
        print(f"goes on at step {step}" + ("" if went_on else " from bf16 weights, with a new warm-up"), flush=True)
    run.mkdir(parents=True, exist_ok=True)
    started = last_time = time.monotonic()
    last_tokens = tokens
    entry: dict[str, Any] = {}
    with (run / LOG).open("a", encoding="utf-8") as log, ThreadPoolExecutor(1) as ahead:
        next_rows = ahead.submit(rows.batch, plan.seed, step, plan.batch, plan.context)
        while step < min(plan.steps, until or plan.steps) and time.monotonic() - started < 60 * minutes:
            if at_step:
                at_step(step)
            done = (time.monotonic() - started) / (60 * minutes) if by_clock else step / plan.steps
            lr = plan.lr_at(done, step - restarted_at)
            for group in optimizer.param_groups:
                group["lr"] = lr
            drawn = next_rows.result()
            next_rows = ahead.submit(rows.batch, plan.seed, step + 1, plan.batch, plan.context)
            with precision(where):
                found = loss_of(*to_device(drawn, where))
            optimizer.zero_grad(set_to_none=True)
            found["loss"].backward()
            norm = nn.utils.clip_grad_norm_([p for _, p in trained], plan.clip)
            optimizer.step()
            step, tokens = step + 1, tokens + drawn[0].size
            if step % log_every == 0 or step == plan.steps:
                entry = {"step": step, "tokens": tokens, "lr": lr, "norm": float(norm)}
                entry |= {name: float(value.detach()) for name, value in found.items()}
                if not math.isfinite(entry["loss"]):
                    raise FloatingPointError(f"the loss is {entry['loss']} at step {step}; lower --lr and start again.")
                now = time.monotonic()
                entry["tokens_per_s"] = round((tokens - last_tokens) / (now - last_time))
                last_time, last_tokens = now, tokens
                log.write(json.dumps(entry) + "\n")
                log.flush()
                shown = " ".join(f"{k} {v:.4g}" for k, v in entry.items() if k not in ("step", "tokens_per_s"))
                print(f"step {step}/{plan.steps} {shown} {entry['tokens_per_s']:,} tokens/s", flush=True)
    progress = {"step": step, "tokens": tokens, "restarted_at": restarted_at, "plan": asdict(plan)}
    save_run(run, module, optimizer if exact else None, progress)
    print(f"stopped at step {step} of {plan.steps} after {time.monotonic() - started:.0f} s; kept in {run}", flush=True)
    return entry


def _check_plan(before: dict[str, Any], plan: Plan, run: Path) -> None:
    """Data order and schedule hang on the plan, so a run may not change it on the way; speed settings may change."""
    free = {"compile", "dispatch", "data"}
    begun = asdict(Plan()) | before  # an option that did not exist yet had its default
    changed = {k: (begun[k], v) for k, v in asdict(plan).items() if k not in free and begun[k] != v}
    if changed:
        listed = ", ".join(f"{name} was {old!r} and is now {new!r}" for name, (old, new) in changed.items())
        raise SystemExit(f"{run} was begun with another plan: {listed}. Use the same options or another --run.")
