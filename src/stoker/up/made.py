"""A receipt of what has just been started, tested and measured."""

from dataclasses import dataclass
from datetime import UTC, datetime

from stoker.engines.engine import Deployment
from stoker.recipes.load import Loaded
from stoker.recipes.recipe import Recipe
from stoker.up import receipt
from stoker.up.journal import Journal
from stoker.up.measure import GENERAL, cells, left_out
from stoker.up.planning import Planned
from stoker.up.promise import compare, verdict
from stoker.up.receipt import Receipt, RecipeFacts, Revision
from stoker.up.state import Instance


@dataclass(frozen=True)
class Made:
    """What a run of `stoker up` came to, beside its journal."""

    loaded: Loaded
    planned: Planned
    deployment: Deployment
    instance: Instance
    engine_version: str
    revisions: tuple[Revision, ...]
    built: str
    box: str  # the planner's name of this box; empty: it knows none like it


def make(made: Made, service: str, journal: Journal) -> Receipt:
    recipe, planned = made.loaded.recipe, made.planned
    comparable = not recipe.box or recipe.box in (planned.box.key, made.box)
    lines = compare(recipe, journal.measured, made.instance.ready_s, journal.memory_bytes, planned, comparable)
    context = (journal.smoke.context if journal.smoke else None) or recipe.serve.context
    slow = left_out(cells(recipe.expected.speed, context), journal.measured) if journal.measured else ""
    failed = sum(row.failed for row in journal.measured if row.workload != GENERAL)
    said = f"{failed} requests failed while it was measured; the log of the engine may say why" if failed else ""
    notes = [note for note in (planned.note, slow, said) if note]
    if recipe.expected.speed and not comparable:
        here = made.box or "one that the planner does not know"
        notes.append(f"the promise is about {recipe.box} and this box is {here}, so they are not compared")
    return Receipt(
        receipt=receipt.VERSION,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        service=service,
        model_name=made.deployment.model_name,
        recipe=_facts(recipe, made.loaded.hash),
        revisions=made.revisions,
        build=made.built,
        image=recipe.container.image if recipe.container else "",
        versions=receipt.versions(recipe.engine, made.engine_version),
        launches=made.deployment.launches,
        box=made.box,
        probe=journal.probe,
        phases=tuple(made.instance.phases),
        start_s=made.instance.ready_s,
        memory_bytes=journal.memory_bytes,
        stages=journal.seconds,
        smoke=journal.smoke,
        greedy_sha256=journal.smoke.greedy_sha256 if journal.smoke else "",
        measured=tuple(journal.measured),
        expected=tuple(lines),
        kept=verdict(lines),
        notes=tuple(notes),
    )


def _facts(recipe: Recipe, hash_: str) -> RecipeFacts:
    serve = recipe.serve
    return RecipeFacts(
        name=recipe.name,
        title=recipe.title,
        hash=hash_,
        engine=recipe.engine,
        plan=recipe.plan,
        weights=recipe.weights,
        box=recipe.box,
        draft=serve.draft,
        users=serve.users,
        context=serve.context,
        kv_dtype=serve.kv_dtype,
    )
