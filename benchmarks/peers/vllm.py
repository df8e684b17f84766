"""Decode and prefill speed of an installed vLLM at the same shapes, in rows of `gpu/decode.py` and `gpu/prefill.py`.

    PYTHONPATH=src:. python benchmarks/peers/vllm.py --shape qwen3.5-122b-a10b --batch 1,2,4 --draft none,mtp:2 \\
        --accept-length 2.6 --context 128 --prefill 4096 --json vllm.json
    PYTHONPATH=src:. python benchmarks/peers/vllm.py --read vllm.json --beside decode.json prefill.json

The second form runs nothing: it lays recorded results side by side. Nothing is downloaded: vLLM gets a config.json of
the shape and random weights. Prompts are random token ids. A run feeds the prompts, waits until every sequence has its
first token, lets some steps pass, then counts tokens and seconds of `--steps` steps; CUDA graphs and torch.compile are
as vLLM has them by default. Prefill is the time from the request to its only token. A second engine without graphs,
untimed, counts the experts that the same weights and prompts choose: a row more than 5 % off independent routing says
that it does not count. All that a normal deployment would not have is listed under `modifications`.

Written against vLLM 0.32.0, whose options and model files it was checked with; we have not run it on a GPU yet.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.decode import WARM_UP, parse_draft, shortened
from benchmarks.gpu.result import device_name, record
from benchmarks.gpu.weights import SHAPES
from benchmarks.peers.beside import print_beside
from benchmarks.peers.vllm_config import ARCHITECTURE, text_config
from benchmarks.peers.vllm_measure import SLACK, Bench

VERSION = "0.32.0"
LOAD_FORMATS = {"spread": "stoker-spread", "dummy": "dummy"}


class Unsupported(Exception):
    """vLLM is missing or lacks something; the sentence is the message, exit code 2."""


def engine_arguments(options: argparse.Namespace, directory: str, draft: str, eager: bool) -> dict[str, Any]:
    depth = parse_draft(draft)[1]
    tokens = (WARM_UP + options.steps + SLACK) * (depth + 1)
    found: dict[str, Any] = {
        "model": directory,
        "skip_tokenizer_init": True,
        "load_format": LOAD_FORMATS[options.load_format],
        "worker_extension_cls": "benchmarks.peers.vllm_worker.ExpertCount",
        "max_model_len": max(max(options.context) + tokens, max(options.prefill, default=0) + 1),
        "max_num_seqs": max(options.max_num_seqs, *options.batch),
        "kv_cache_dtype": "fp8" if options.kv == "fp8" else "auto",
        "enable_prefix_caching": False,
        "enforce_eager": eager,
        "seed": 0,
    }
    if depth:
        found["speculative_config"] = {"method": "mtp", "num_speculative_tokens": depth}
        if options.accept_length is not None:
            found["speculative_config"] |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": options.accept_length,
            }
    return found


def modifications(options: argparse.Namespace) -> list[str]:
    """What a normal deployment of the published checkpoint would not have."""
    spread = (
        "weights are random, made in vLLM's worker by a loader registered as 'stoker-spread': INT4 codes and routers "
        "random, what layers add to the stream small, so that tokens differ and choose experts independently"
    )
    dummy = "load_format 'dummy': every tensor from one small range and seed, INT4 codes as memory held them"
    found = [
        spread if options.load_format == "spread" else dummy,
        "text-only architecture: no vision tower is built",
        "no tokenizer (skip_tokenizer_init): ids in, ids out, nothing detokenised, end of text ignored, greedy",
        "prefix caching off",
        f"max_num_seqs {max(options.max_num_seqs, *options.batch)}, max_model_len as short as the benchmark allows",
        "a worker extension (worker_extension_cls): registers the loader; in the untimed engine it counts experts",
    ]
    if any(draft != "none" for draft in options.draft):
        if options.accept_length is not None:
            found.append(f"drafts accepted by chance, {options.accept_length} tokens a step (vLLM's synthetic mode)")
        if options.weights == "int4" and options.mtp == "int4":
            found.append("MTP layer in INT4 as in gpu/decode.py; the published 122B INT4 checkpoint has it in BF16")
    if options.layers:
        found.append(f"only {options.layers} layers")
    return found


def check_installed(arguments: dict[str, Any]) -> str:
    """The version, if this vLLM has every option and the architecture used here."""
    try:
        vllm: Any = import_module("vllm")
    except ModuleNotFoundError as missing:
        if missing.name != "vllm":
            raise
        raise Unsupported(
            f"vLLM is not installed. Written against {VERSION}: pip install vllm=={VERSION}, in an environment "
            "of its own; or use --read with a recorded result."
        ) from None
    speculative: Any = import_module("vllm.config").SpeculativeConfig
    asked = {
        "EngineArgs": (arguments, vllm.EngineArgs),
        "SpeculativeConfig": (arguments.get("speculative_config", {}), speculative),
    }
    lacking = [
        f"{where} has no {name}"
        for where, (names, kind) in asked.items()
        for name in names
        if name not in kind.__dataclass_fields__
    ]
    if ARCHITECTURE not in vllm.ModelRegistry.get_supported_archs():
        lacking.append(f"the architecture {ARCHITECTURE} is unknown")
    if lacking:
        raise Unsupported(
            f"vLLM {vllm.__version__} differs from {VERSION}, which this was written against: {'; '.join(lacking)}. "
            f"Install vllm=={VERSION} to repeat the comparison."
        )
    return str(vllm.__version__)


def start_vllm(options: argparse.Namespace, directory: str) -> Callable[[str, bool], Any]:
    def start(draft: str, eager: bool) -> Any:
        print(f"vLLM starts for draft {draft}" + (", without graphs, to count experts" if eager else ""), flush=True)
        return import_module("vllm").LLM(**engine_arguments(options, directory, draft, eager)).llm_engine

    return start


def vllm_sampling(max_tokens: int) -> Any:
    params: Any = import_module("vllm.sampling_params")
    return params.SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
        output_kind=params.RequestOutputKind.DELTA,
    )  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-122b-a10b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="only so many layers, where memory is short")
    parser.add_argument("--weights", default="int4", choices=["int4", "bf16"])
    parser.add_argument("--mtp", default="int4", choices=["int4", "bf16"], help="format of the MTP layer if INT4")
    parser.add_argument("--batch", default=[1, 2, 4], type=_numbers, help="sequences, or several numbers of them")
    parser.add_argument("--draft", default=["none"], type=_drafts, help="none or mtp:K, or several of them")
    parser.add_argument("--accept-length", type=float, help="tokens per step to assume where there are drafts")
    parser.add_argument("--context", default=[128], type=_numbers, help="tokens of the prompts, or several numbers")
    parser.add_argument("--prefill", default=[], type=_numbers, help="prompts to time to their first token")
    parser.add_argument("--kv", default="bf16", choices=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=128, help="of each run")
    parser.add_argument("--runs", type=int, default=2, help="the faster counts; both are in the spread")
    parser.add_argument("--load-format", default="spread", choices=list(LOAD_FORMATS), help="dummy: vLLM's own")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="of the engine; sizes its graphs and states")
    parser.add_argument("--experts", action=argparse.BooleanOptionalAction, default=True, help="count distinct experts")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    parser.add_argument("--read", metavar="FILE", help="run nothing, take this recorded result")
    parser.add_argument("--beside", metavar="FILE", nargs="+", default=[], help="results of decode.py or prefill.py")
    options = parser.parse_args(arguments)
    for draft in options.draft:
        rows = parse_draft(draft)[1] + 1
        if options.accept_length is not None and rows > 1 and not 1 <= options.accept_length <= rows:
            parser.error(f"--accept-length {options.accept_length} is not between 1 and the {rows} tokens of a step.")
    if options.read and not options.beside:
        parser.error("--read runs nothing: say with --beside which results to lay next to it.")
    return options


def _numbers(text: str) -> list[int]:
    found = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be one or more whole numbers above 0, separated by commas.")
    return found


def _drafts(text: str) -> list[str]:
    for draft in text.split(","):
        kind, _, depth = draft.partition(":")
        if not (draft == "none" or (kind == "mtp" and depth.isdigit() and 1 <= int(depth) <= 15)):
            raise argparse.ArgumentTypeError(
                f"{draft!r} must be none or mtp:K with K from 1 to 15; other drafters need a checkpoint of their own."
            )
    return text.split(",")


def measure(options: argparse.Namespace, arguments: list[str] | None) -> None:
    config = shortened(SHAPES[options.shape], options.layers)
    deepest = max(options.draft, key=lambda draft: parse_draft(draft)[1])
    installed = check_installed(engine_arguments(options, "", deepest, False))
    listed = modifications(options)
    print(f"vLLM {installed}; a normal deployment would differ in this:", *listed, sep="\n- ", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(text_config(config, options.weights, options.mtp)))
        bench = Bench(config, options, start_vllm(options, directory), vllm_sampling)
        bench.run()
    found = {"engine": f"vllm {installed}", "rows": bench.rows, "prefill": bench.prefill}
    if options.beside:
        print_beside(options.beside, {"device": device_name(), **found})
    record("peers/vllm", options.json, arguments, weights="random", modifications=listed, **found)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.read:
        print_beside(options.beside, json.loads(Path(options.read).read_text()))
        return 0
    try:
        measure(options, arguments)
    except Unsupported as reason:
        print(reason, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # started by its path, this file would be found as `vllm` before the installed one
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    sys.exit(main())
