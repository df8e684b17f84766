"""vLLM on several boxes: one launch per rank, the first one answering requests.

Without Ray, every box runs `vllm serve` with its rank and the first one's address; all but the first are headless.
With Ray, the first box starts a Ray head and then `vllm serve`, the others a Ray worker. The network's settings come
from what was found there (up/nodes.py); the recipe's own environment comes last.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from stoker.engines import container, vllm_parser
from stoker.engines.engine import Launch
from stoker.recipes import shell
from stoker.recipes.formats.flags import Option, option
from stoker.recipes.recipe import Nodes, Recipe
from stoker.up.nodes import Box

RAY_WAITS_S = 120  # for its head, or for all workers
RAY_ENVIRONMENT = {"RAY_memory_monitor_refresh_ms": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
OBJECT_STORE = 1 << 30  # bytes; vLLM sends little through it
# One rank on each box: Ray would fill the first one.
SPREAD = '{"placement_group_options": {"strategy": "SPREAD"}}'


def options(nodes: Nodes) -> list[Option]:
    """What every rank is told."""
    found = [
        option("--tensor-parallel-size", str(nodes.tensor_parallel)),
        option("--pipeline-parallel-size", str(nodes.pipeline_parallel)),
    ]
    found += [option("--enable-expert-parallel")] if nodes.expert_parallel else []
    found.append(option("--distributed-executor-backend", "ray" if nodes.launcher == "ray" else "mp"))
    return found


def rank_options(nodes: Nodes, rank: int, address: str) -> list[Option]:
    """What one rank is told beside. With Ray it is Ray that knows."""
    if nodes.launcher == "ray":
        return []
    found = [
        option("--nnodes", str(len(nodes.hosts))),
        option("--node-rank", str(rank)),
        option("--master-addr", address),
        option("--master-port", str(nodes.port)),
    ]
    return found + ([option("--headless")] if rank else [])


def environment(recipe: Recipe, box: Box) -> dict[str, str]:
    """Of one rank: which network device and which RDMA device lead to the others."""
    assert box.facts
    name, network = box.interface, box.facts.network
    found = {
        "VLLM_HOST_IP": box.address,
        "NCCL_SOCKET_IFNAME": name,
        "GLOO_SOCKET_IFNAME": name,
        "TP_SOCKET_IFNAME": name,
        "MN_IF_NAME": name,
        "NCCL_IGNORE_CPU_AFFINITY": "1",
    }
    if network.rdma:
        found |= {
            "NCCL_NET": "IB",
            "NCCL_IB_DISABLE": "0",
            "NCCL_IB_HCA": network.rdma,
            "NCCL_IB_GID_INDEX": str(3 if network.gid_index is None else network.gid_index),
            "NCCL_CROSS_NIC": "1",
            "NCCL_CUMEM_ENABLE": "0",
            "UCX_NET_DEVICES": f"{network.rdma}:1",
        }
    if recipe.nodes and recipe.nodes.launcher == "ray":
        found |= RAY_ENVIRONMENT | {"VLLM_DISTRIBUTED_EXECUTOR_CONFIG": SPREAD}
    return found


def launches(
    recipe: Recipe,
    boxes: Sequence[Box],
    arguments: Sequence[Sequence[str]],
    env: dict[str, str],
    mounts: Sequence[Path],
) -> tuple[Launch, ...]:
    """`arguments` are those of `vllm`, rank by rank."""
    nodes = recipe.nodes
    assert nodes
    found = []
    for rank, (box, said) in enumerate(zip(boxes, arguments, strict=True)):
        assert box.facts
        vllm = "vllm" if recipe.container else box.facts.vllm["command"]
        serve = (vllm, *said)
        if nodes.launcher == "ray":
            ray = "ray" if recipe.container else str(Path(vllm).with_name("ray"))
            head = boxes[0]
            serve = _ray_worker(ray, nodes, head, box) if rank else _ray_head(ray, nodes, head, len(boxes), serve)
        own = {**env, **environment(recipe, box), **recipe.env}
        if recipe.container:
            name, program = f"{recipe.name}-{rank}", box.facts.image["program"]
            inside, device = shell.inside(recipe.shell, serve), recipe.serve.device
            found.append(container.launch(recipe.container, inside, own, mounts, name, device, box.ssh, program))
            continue
        files = vllm_parser.alias(box.package, box.version)
        found.append(Launch(serve, vllm_parser.with_alias(own, files), box.ssh, files=files))
    return tuple(found)


def _ray_head(ray: str, nodes: Nodes, box: Box, count: int, serve: tuple[str, ...]) -> tuple[str, ...]:
    """Ray, then vLLM once every box has joined. What Ray leaves in the background ends with the launch."""
    start = [ray, "start", "--head", f"--port={nodes.port}", f"--node-ip-address={box.address}", *_small()]
    joined = f"sum(node['Alive'] for node in ray.nodes()) >= {count}"
    init = f"ray.init(address='{box.address}:{nodes.port}', logging_level='ERROR')"
    wait = f"import ray, sys; {init}; sys.exit(not {joined})"
    python = str(Path(ray).with_name("python3")) if "/" in ray else "python3"
    script = [
        f"{shlex.join(start)} || exit 1",
        f"for second in $(seq {RAY_WAITS_S}); do",
        f'  if {shlex.join([python, "-c", wait])}; then export RAY_ADDRESS={box.address}:{nodes.port}; exec "$@"; fi',
        "  sleep 1",
        "done",
        f'echo "not all of {count} boxes joined Ray within {RAY_WAITS_S} s" >&2; exit 1',
    ]
    return ("sh", "-c", "\n".join(script), "stoker", *serve)


def _ray_worker(ray: str, nodes: Nodes, head: Box, box: Box) -> tuple[str, ...]:
    address = f"{head.address}:{nodes.port}"
    start = [ray, "start", f"--address={address}", f"--node-ip-address={box.address}", "--block", *_small()[:-1]]
    script = [
        f"for second in $(seq {RAY_WAITS_S}); do",
        f"  {shlex.join([ray, 'health-check', '--address', address])} 2>/dev/null && exec {shlex.join(start)}",
        "  sleep 1",
        "done",
        f'echo "Ray at {address} did not answer within {RAY_WAITS_S} s" >&2; exit 1',
    ]
    return ("sh", "-c", "\n".join(script), "stoker")


def _small() -> list[str]:
    return [
        f"--object-store-memory={OBJECT_STORE}",
        "--num-cpus=2",
        "--disable-usage-stats",
        "--include-dashboard=false",  # of the head alone
    ]
