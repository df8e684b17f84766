"""Shows a case, sends it, or runs many: `python -m tests.server.fuzz 4711 [--url URL]`, `... --cases N --json FILE`."""

import argparse
import json
from pathlib import Path

from tests.server.fuzz.cases import case
from tests.server.fuzz.client import attempt, exchange
from tests.server.fuzz.run import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, nargs="*")
    parser.add_argument("--url")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--warm-up", type=int, default=400)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    for number in asked.number:
        print(case(number))
        if asked.url:
            print(exchange(asked.url, case(number)))
            print(attempt(asked.url, case(number)))
    if asked.cases:
        command = f"python -m tests.server.fuzz --cases {asked.cases} --warm-up {asked.warm_up} --json FILE"
        text = json.dumps(run(asked.cases, asked.warm_up).document(command), indent=1)
        if asked.json:
            asked.json.write_text(text + "\n", encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
