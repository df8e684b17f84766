"""`vllm serve` of the stand-in: a recorded log, then an engine that answers. FAKE_VLLM in the environment is JSON:
`log` (a file), `pause` (seconds between lines), `die` (after that line), `rank_dies_after` (seconds)."""

import json
import os
import pathlib
import sys
import time


def main(fake_engine):
    """`fake_engine` is the module of that name."""
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    top = FlexibleArgumentParser(prog="vllm")
    serve.cmd_init()[0].subparser_init(top.add_subparsers(dest="subparser"))
    args = top.parse_args(sys.argv[1:])
    told = json.loads(os.environ.get("FAKE_VLLM", "{}"))
    lines = pathlib.Path(told["log"]).read_text(encoding="utf-8").splitlines() if "log" in told else []
    for line in lines:
        print(line, flush=True)
        time.sleep(told.get("pause", 0.0))
        if told.get("die") and told["die"] in line:
            print("ValueError: Free memory on device (9.18/10.59 GiB) is less than desired", flush=True)
            sys.exit(1)
    if args.headless:
        print(f"rank {args.node_rank} waits for {args.master_addr}:{args.master_port}", flush=True)
        time.sleep(told.get("rank_dies_after", 3600.0))
        sys.exit(9)
    fake_engine.Handler.engine = fake_engine.Engine(args.served_model_name[0], 0.0, True)
    fake_engine.Server((args.host, args.port), fake_engine.Handler).serve_forever()
