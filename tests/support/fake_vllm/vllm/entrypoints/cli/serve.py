import argparse
import json
import os


class Serve:
    def subparser_init(self, subparsers):
        if "FAKE_VLLM_NO_DEVICE" in os.environ and "VLLM_TARGET_DEVICE" not in os.environ:
            raise RuntimeError("Failed to infer device type, please set the environment variable")
        parser = subparsers.add_parser("serve")
        parser.add_argument("model_tag", nargs="?")
        for flag in ("--host", "--tool-call-parser", "--reasoning-parser", "--master-addr", "--attention-backend"):
            parser.add_argument(flag)
        parser.add_argument("--port", type=int, default=8000)
        for flag in ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--master-port", "--nnodes"):
            parser.add_argument(flag, type=int)
        parser.add_argument("--node-rank", type=int, default=0)
        parser.add_argument("--headless", action="store_true")
        parser.add_argument("--tensor-parallel-size", "-tp", type=int)
        parser.add_argument("--pipeline-parallel-size", "-pp", type=int)
        parser.add_argument("--distributed-executor-backend", choices=["mp", "ray"])
        parser.add_argument("--gpu-memory-utilization", type=float)
        parser.add_argument("--kv-cache-dtype", choices=["auto", "bfloat16", "fp8"])
        parser.add_argument("--served-model-name", nargs="+")
        parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
        parser.add_argument("--enable-expert-parallel", action=argparse.BooleanOptionalAction)
        parser.add_argument("--trust-remote-code", action="store_true")
        parser.add_argument("--enable-auto-tool-choice", action="store_true")
        parser.add_argument("--enable-prompt-tokens-details", action="store_true")
        for flag in ("--speculative-config", "--default-chat-template-kwargs", "--override-generation-config"):
            parser.add_argument(flag, type=json.loads)
        return parser

    def validate(self, args):
        if args.enable_auto_tool_choice and not args.tool_call_parser:
            raise TypeError("Error: --enable-auto-tool-choice requires --tool-call-parser")


def cmd_init():
    return [Serve()]
