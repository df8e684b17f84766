"""A result as Markdown, to be pasted into an issue or a forum."""

from stoker.bench import show
from stoker.bench.record import Document


def markdown(found: Document) -> str:
    environment = found.environment
    lines = [f"**{found.headline.text}**", ""]
    lines += [f"| {' | '.join(show.HEADS)} |", f"|---|{'---:|' * (len(show.HEADS) - 1)}"]
    lines += [f"| {' | '.join(show.cells(row, show.two_servers(found)))} |" for row in found.workloads]
    lines.append("")
    extra = [*show.turns(found), *show.throughput(found), *show.prefix(found)]
    extra += [show.quality(found), show.noise(found), show.client(found)]
    extra += [f"Warning: {warning}" for warning in found.warnings]
    extra += [f"Failed: {line}" for line in show.failures(found)]
    lines += [f"- {line}" for line in extra if line]
    lines.append("")
    for server in environment.servers:
        context = f", context {server.context:,}" if server.context else ""
        lines.append(
            f"{server.name}: `{server.model}` on {server.engine}{context}; prompts fitted by {server.tokenizer}."
        )
    gpus = f", {', '.join(environment.gpus)}" if environment.gpus else ""
    lines.append(
        f"Measured {environment.started} from {environment.processor} ({environment.cpus} CPUs{gpus}) by stoker "
        f"{environment.stoker}: `{environment.command}`"
    )
    return "\n".join(lines) + "\n"
