"""One server for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.server.running import Running


@pytest.fixture(scope="session")
def shared() -> Iterator[Running]:
    server = Running("--model", "demo", "--users", "4", "--served-model-name", "demo", "--served-model-name", "other")
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """Each test must leave it idle."""
    yield shared
    shared.until_idle()
