"""Rows for the planner out of a receipt: what was measured here, beside what others published."""

import hashlib

from stoker.errors import StokerError
from stoker.plan.answer import ENGINE_NAMES
from stoker.plan.catalog import find_box, find_model
from stoker.plan.evidence import OWN, Row
from stoker.speculate.assumed import LABEL
from stoker.up.measure import GENERAL
from stoker.up.receipt import Receipt, ReceiptError


def rows_of(receipt: Receipt, file: str) -> list[Row]:
    """One for each workload that has a speed. `file` is where the receipt lies."""
    recipe, source = receipt.recipe, receipt.revisions[0].source if receipt.revisions else ""
    try:
        model = find_model(recipe.plan or source, fetch=False)
    except StokerError as error:
        raise ReceiptError(
            f"the planner does not know the model of {file}, so a row of it would never be shown: {error}"
        ) from error
    box, boxes = find_box(receipt.box).of_rows if receipt.box else ("this", 1)
    kind, _, depth = recipe.draft.removeprefix("lookup+").partition(":")
    mark = hashlib.sha256(f"{recipe.hash} {receipt.date}".encode()).hexdigest()[:6]
    found = []
    for number, row in enumerate(receipt.measured, 1):
        if row.decode_tokens_per_s is None or row.workload == GENERAL:
            continue
        assumed = f"; {LABEL}" if LABEL in row.steps_source else ""
        found.append(
            Row(
                id=f"r{mark}-{number}",
                model=model.name,
                parameters_b=round(model.parameters / 1e9, 3),
                active_b=round(model.active_parameters / 1e9, 3),
                weights_stated=recipe.weights or "as the files are",
                weights=recipe.weights,
                kv=recipe.kv_dtype,
                box=box,
                boxes=boxes,
                engine=ENGINE_NAMES[recipe.engine],
                backend="",
                engine_version=receipt.versions.get(recipe.engine, ""),
                drafter=kind,
                depth=int(depth) if depth.isdecimal() else None if kind != "none" else 0,
                workload=row.workload,
                context_tokens=None,
                output_tokens=None,
                users=row.users,
                prefill_tok_s=None,
                decode_tok_s=row.decode_tokens_per_s,
                scope="per_stream",
                timing="decode-only",
                acceptance_rate=None,
                tokens_per_step=row.tokens_per_step,
                method=f"stoker up, {row.requests} requests, {row.failed} failed",
                evidence="A",
                notes=f"recipe {recipe.name}{assumed}",
                source=OWN,
                url=file,
                date=receipt.date[:10],
            )
        )
    if not found:
        raise ReceiptError(f"{file} holds no measured speed: stoker up --no-measure left it out, or it failed.")
    return found
