"""What an installed vLLM makes of arguments of `vllm serve`. It stands alone, since vLLM's own Python runs it.

    python -c "$(cat vllm_probe.py)" '{"model": ..., "options": [["--port", "8000"], ...], "environment": [...]}'

It prints one line that begins with MARK: a JSON report as `vllm_parser.Report` reads it. Nothing is loaded or served,
and no card is needed. The parser is that of the `serve` subcommand; beyond it, the names of tool and reasoning parsers
and the keys of --speculative-config are compared with what vLLM has, since it would refuse them only after the start.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, get_args

MARK = "\0vllm-parser "
FORCED = "STOKER_VLLM_PROBE"  # environment: this is the second attempt
MODEL = "a-model"


class Refused(Exception):
    """What the parser says in place of ending the process."""


def refuse(message: str) -> None:
    raise Refused(message)


def main() -> None:
    asked = json.loads(sys.argv[1])
    try:
        found = report(asked)
    except RuntimeError as error:  # a build for cards, on a machine without one
        if "device type" not in str(error) or FORCED in os.environ:
            raise
        os.environ.update({"VLLM_TARGET_DEVICE": "cpu", FORCED: "1"})
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    print(MARK + json.dumps(found), flush=True)
    os._exit(0)  # some libraries crash on their way out


def report(asked: dict[str, Any]) -> dict[str, Any]:
    import vllm
    from vllm.entrypoints.cli import serve

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser

    top = FlexibleArgumentParser(prog="vllm")
    (command, *_) = serve.cmd_init()
    parser = command.subparser_init(top.add_subparsers(dest="subparser"))
    top.error = parser.error = refuse
    model = asked.get("model") or MODEL
    unknown, refused, accepted = [], [], []
    for option in asked["options"]:
        if not known(parser, option[0]):
            near = difflib.get_close_matches(name_of(option[0]), list(parser._option_string_actions), 1, 0.75)
            unknown.append({"option": option, "near": near[0] if near else ""})
            continue
        try:
            top.parse_args(["serve", model, *option])
            for said in beyond(option):
                refuse(said)
        except (Exception, SystemExit) as error:
            refused.append({"option": option, "message": sentence(error)})
        else:
            accepted.append(option)
    together = ""
    try:
        arguments = top.parse_args(["serve", model, *[part for option in accepted for part in option]])
        command.validate(arguments)
    except (Exception, SystemExit) as error:
        together = sentence(error)
    return {
        "version": vllm.__version__,
        "flags": len(parser._option_string_actions),
        "accepted": accepted,
        "unknown": unknown,
        "refused": refused,
        "together": together,
        "environment": [name for name in asked["environment"] if not read_by_vllm(name)],
        "fits": fits(asked.get("specifier", ""), vllm.__version__),
    }


def name_of(argument: str) -> str:
    """--some_flag.key=value is --some-flag."""
    name = argument.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def known(parser: Any, argument: str) -> bool:
    """Exactly, or as the beginning of one name alone, which argparse takes too."""
    actions, name = parser._option_string_actions, name_of(argument)
    if not name.startswith("-") or name in ("-h", "--help"):
        return False
    if name in actions or (name.startswith("-O") and not name.startswith("--")):
        return True
    meant = {id(action) for option, action in actions.items() if name.startswith("--") and option.startswith(name)}
    return len(meant) == 1


def beyond(option: list[str]) -> Iterator[str]:
    """What the parser lets through, and the server would refuse."""
    name, value = name_of(option[0]), option[1] if len(option) > 1 else option[0].partition("=")[2]
    if name == "--tool-call-parser":
        from vllm.tool_parsers import ToolParserManager

        yield from not_among(value, ToolParserManager.list_registered())
    elif name == "--reasoning-parser":
        from vllm.reasoning import ReasoningParserManager

        yield from not_among(value, ReasoningParserManager.list_registered())
    elif name == "--speculative-config" and "." not in option[0]:
        yield from speculation(json.loads(value))


def not_among(value: str, names: Iterable[str]) -> Iterator[str]:
    if value not in names:
        near = difflib.get_close_matches(value, list(names), 1)
        yield f"{value!r} is unknown" + (f"; nearest: {near[0]!r}" if near else "")


def speculation(config: dict[str, Any]) -> Iterator[str]:
    from vllm.config import SpeculativeConfig

    fields = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    for key in config:
        yield from not_among(key, fields)
    if "method" in config:
        with suppress(ImportError):
            from vllm.config.speculative import SpeculativeMethod

            yield from not_among(config["method"], list(leaves(SpeculativeMethod)))


def leaves(literal: Any) -> Iterator[str]:
    """The values of a Literal, and of those in it."""
    for value in get_args(literal):
        if isinstance(value, str):
            yield value
        else:
            yield from leaves(value)


def read_by_vllm(name: str) -> bool:
    import vllm.envs

    return not name.startswith("VLLM_") or name in vllm.envs.environment_variables


def fits(specifier: str, version: str) -> bool:
    """Whether the version is among those; a build of the sources counts as the release it comes before."""
    if not specifier:
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return SpecifierSet(specifier).contains(Version(version).base_version, prereleases=True)


def sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500] or type(error).__name__


if __name__ == "__main__":
    main()
