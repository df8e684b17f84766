"""What somebody who watches a first start sees in the log."""

import re

from tests.server.running import Running


def test_the_log_names_every_phase_of_a_start_as_it_begins_and_then_the_seconds_of_each(server: Running) -> None:
    said = [
        server.log.index(words)
        for words in (
            "listening on",
            "INFO reading weights",
            "INFO allocating caches",
            "INFO self-test",
            "INFO ready after",
        )
    ]
    assert said == sorted(said)
    line = re.search(r"ready after \S+ s: (.+)", server.log)
    assert line
    phases = [part.rpartition(" ")[0] for part in line[1].split(", ")]
    assert {"planning", "starting the engine", "reading weights", "self-test"} <= set(phases)
