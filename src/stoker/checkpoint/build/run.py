"""`build`: this file has the order of the steps, each of which has a file of its own."""

import hashlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.checkpoint.build.convert import block_elements
from stoker.checkpoint.build.describe import drafter_config, result_config
from stoker.checkpoint.build.drafter import FOLDER, drafter_units
from stoker.checkpoint.build.extras import copy_files, sort_files
from stoker.checkpoint.build.manifest import MANIFEST, Report, index, json_bytes, manifest, state
from stoker.checkpoint.build.options import FP8, HUB, MEMORY, SMALLEST_MEMORY, BuildOptions, OptionsError, show_bytes
from stoker.checkpoint.build.plan import Sources, header_of, make_plan
from stoker.checkpoint.build.sanity import refuse_dead_mtp, refuse_foreign
from stoker.checkpoint.build.shards import Shard, pack, sha256, write_shard
from stoker.checkpoint.build.sources import Source, open_local
from stoker.checkpoint.build.workspace import Workspace, WorkspaceError, write_synced
from stoker.weights.checkpoint import INDEX, quantization_config
from stoker.weights.json_file import read_json
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import SHARED, group_of, is_mtp

if TYPE_CHECKING:
    from stoker.checkpoint.build.fetch import MakeHub

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # phase, bytes so far, bytes in all


@dataclass
class _Job:
    """Everything that is known before the first value is written."""

    options: BuildOptions
    sources: Sources
    parts: dict[str, list[Shard]] = field(default_factory=dict)  # folder of the result -> its weight files
    configs: dict[str, bytes] = field(default_factory=dict)  # folder -> config.json
    rules: dict[str, list[str]] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, Shard]:
        return {f"{folder}{shard.file}": shard for folder, shards in self.parts.items() for shard in shards}


def build(
    options: BuildOptions,
    out: Path,
    *,
    memory: int = MEMORY,
    force: bool = False,
    say: Say = lambda line: None,
    progress: Progress = lambda phase, done, total: None,
    make_hub: "MakeHub | None" = None,
) -> Report:
    """Make the checkpoint that the options describe, or go on where an earlier run was interrupted."""
    options.check()
    if memory < SMALLEST_MEMORY:
        raise OptionsError(
            f"--memory is {show_bytes(memory)}, expected at least {show_bytes(SMALLEST_MEMORY)}: the Python runtime "
            "alone takes half of that."
        )
    base = open_local("--base", options.base)
    config = ModelConfig.load(Path(options.base))
    _refuse_overlap(out, options)
    workspace = Workspace(out.absolute(), force)
    if workspace.finished(options.as_dict()):
        return Report.of(out)
    workspace.check_out()
    with workspace.locked():
        sources = _open_all(options, base, workspace, say, progress, make_hub)
        job = _prepare(options, config, sources)
        for option, lines in job.rules.items():
            for line in lines:
                say(f"{option}: {line}")
        report = Report(out, job.rules)
        _write_weights(job, workspace, report, block_elements(memory), say, progress)
        _finish(job, workspace, report)
    return report


def _refuse_overlap(out: Path, options: BuildOptions) -> None:
    """Refuse an output directory that would overwrite a source while it is being read."""
    named = {"--base": options.base, "--shared-experts": options.shared_experts, "--mtp": options.mtp}
    for option, where in (named | {"--drafter": options.drafter}).items():
        if not where or where.startswith(HUB) or where == FP8:
            continue
        source, target = Path(where).resolve(), out.resolve()
        if source == target or source in target.parents or target in source.parents:
            raise WorkspaceError(f"--out {out} and {option} {where} lie in one another; choose another --out.")


def _open_all(
    options: BuildOptions, base: Source, workspace: Workspace, say: Say, progress: Progress, make_hub: "MakeHub | None"
) -> Sources:
    def opened(option: str, where: str, wanted: Callable[[str], bool]) -> Source | None:
        if not where or where == FP8:
            return None
        if not where.startswith(HUB):
            return open_local(option, where)

        from stoker.checkpoint.build.fetch import fetch  # and huggingface_hub, half a second

        def show(done: int, total: int) -> None:
            progress(f"fetching {option}", done, total)

        source = fetch(option, where, wanted, workspace.fetched, make_hub, show)
        part, whole = source.hub["tensor_bytes"], source.hub["repository_bytes"]
        say(f"{option}: {where} at {source.hub['revision']}: {show_bytes(part)} of {show_bytes(whole)} fetched")
        return source

    return Sources(
        base,
        opened("--shared-experts", options.shared_experts, lambda name: group_of(name) == SHARED),
        opened("--mtp", options.mtp, is_mtp),
        opened("--drafter", options.drafter, lambda name: True),
    )


def _prepare(options: BuildOptions, config: ModelConfig, sources: Sources) -> _Job:
    """Plan the units, account for every tensor, check the values and lay out the files."""
    base, shared, head, drafter = sources.base, sources.shared_experts, sources.mtp, sources.drafter
    plan = make_plan(options, config, sources)
    rules = {"--base": base.report_unused()}
    if shared:
        rules[shared.option] = shared.report_unused("not used: this build takes only shared experts")
        refuse_foreign(plan.replaced, f"{shared.option} {shared.where}")
    if head:
        rules[head.option] = head.report_unused("not used: this build takes only the MTP head")
    refuse_dead_mtp(plan.mtp, (head or base).where)
    rules["MTP"] = [_mtp_line(sources, config)]
    rules["files"] = sort_files(base.checkpoint.directory)[1]
    directory = base.checkpoint.directory
    described = result_config(
        read_json(directory / "config.json"), quantization_config(directory), plan.header, options, plan.config
    )
    job = _Job(options, sources, {"": pack(plan.units, options.shard_bytes)}, {"": json_bytes(described)}, rules)
    if drafter:
        raw = read_json(drafter.checkpoint.directory / "config.json")
        units = drafter_units(drafter, raw, config, options)
        job.parts[f"{FOLDER}/"] = pack(units, options.shard_bytes)
        job.configs[f"{FOLDER}/"] = json_bytes(drafter_config(raw, header_of(units), options))
        rules[drafter.option] = drafter.report_unused()
    return job


def _mtp_line(sources: Sources, config: ModelConfig) -> str:
    source = sources.mtp or sources.base
    count = sum(map(is_mtp, source.names))
    if not count:
        announced = "config.json announces an MTP head, but the base" if config.mtp_layers else "the base"
        return f"{announced} has no mtp.* tensors: no drafting with MTP; --mtp DIR or --mtp hf:REPO adds a head"
    if sources.mtp:
        return f"{count:,} of {count:,} MTP tensors come from {sources.mtp.where}; the new index maps them all"
    path = sources.base.checkpoint.directory / INDEX
    mapped = sum(map(is_mtp, read_json(path)["weight_map"])) if path.exists() else 0
    if mapped == count:
        return f"{count:,} of {count:,} MTP tensors already mapped: nothing to do"
    return f"{mapped:,} of {count:,} MTP tensors are mapped in the index of the base; the new index maps them all"


def _write_weights(job: _Job, workspace: Workspace, report: Report, block: int, say: Say, progress: Progress) -> None:
    """Write the weight files that an earlier run has not finished. A file is hashed while the next one is written."""
    files = job.files
    if workspace.begin(state(job.options, job.sources, files)):
        say(f"resuming: {sum(name in workspace.done for name in files)} of {len(files)} weight files are done")
    total = sum(shard.size for shard in files.values())
    done = sum(shard.size for name, shard in files.items() if name in workspace.done)
    _check_space(workspace, total - done)
    progress("writing", done, total)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("writing", done, total)

    pending: list[tuple[str, Future[str]]] = []
    with ThreadPoolExecutor(1) as pool:
        for name, shard in files.items():
            if name in workspace.done:
                continue
            path = workspace.result / name
            path.parent.mkdir(exist_ok=True)
            write_shard(path, shard, block, advance)
            advance(len(shard.header))
            while pending:
                workspace.record(*_hashed(pending.pop()))
            pending.append((name, pool.submit(sha256, path)))
        while pending:
            workspace.record(*_hashed(pending.pop()))
    report.files = {name: {"bytes": shard.size, "sha256": workspace.done[name]} for name, shard in files.items()}


def _hashed(pending: tuple[str, Future[str]]) -> tuple[str, str]:
    return pending[0], pending[1].result()


def _check_space(workspace: Workspace, needed: int) -> None:
    free = shutil.disk_usage(workspace.partial).free
    if free < needed:
        raise WorkspaceError(
            f"the result needs {show_bytes(needed)} more in {workspace.out.parent}, where {show_bytes(free)} are free; "
            "make room or choose another --out. What is done so far is kept."
        )


def _finish(job: _Job, workspace: Workspace, report: Report) -> None:
    """Write index, small files and manifest, config.json last, then rename the result into place."""
    result, drafter = workspace.result, job.sources.drafter
    written = copy_files(sort_files(job.sources.base.checkpoint.directory)[0], result)
    if drafter and not drafter.hub:
        written += copy_files(sort_files(drafter.checkpoint.directory)[0], result / FOLDER)
    for folder, shards in job.parts.items():
        path = result / folder / INDEX
        write_synced(path, json_bytes(index(shards)))
        written.append(path)
    for path in written:
        name = str(path.relative_to(result))
        report.files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    for folder, data in job.configs.items():
        report.files[f"{folder}config.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_synced(result / MANIFEST, json_bytes(manifest(job.options, job.sources, report)))
    for folder, data in reversed(job.configs.items()):
        write_synced(result / folder / "config.json", data)
    workspace.publish()
