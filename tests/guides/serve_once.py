"""`python -m tests.guides.serve_once OPTIONS`: `stoker serve OPTIONS` on a free port until it answers, then ended."""

import sys

from tests.server.running import Running

if __name__ == "__main__":
    server = Running(*sys.argv[1:])
    try:
        server.wait()
        print(server.get("/v1/models").json()["data"][0]["id"])
    finally:
        if code := server.stop():
            sys.exit(code)
