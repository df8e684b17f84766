"""A stand-in hub with several repositories of small checkpoints."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.support import stand_in_hub
from tests.support.stand_in_hub import StandInHub


@contextmanager
def hubs(root: Path, repositories: Mapping[str, Callable[[Path], object]]) -> Iterator[str]:
    """The endpoint. Repositories are filled once they are asked for."""
    known = {name: StandInHub(root / name.replace("/", "--"), name) for name in repositories}
    filling = threading.Lock()

    class Handler(stand_in_hub._Handler):
        def do_GET(self) -> None:
            found = next((hub for name, hub in known.items() if f"/{name}/" in f"{self.path.split('?')[0]}/"), None)
            if found is None:
                return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            with filling:
                if not found.directory.exists():
                    found.directory.mkdir(parents=True)
                    repositories[found.repository](found.directory)
            self.stand_in = found
            return super().do_GET()

    with patch.object(stand_in_hub, "_Handler", Handler), StandInHub(root).running() as server:
        yield server.endpoint
