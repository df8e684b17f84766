"""`python -m stoker`: the command, where its script is not on the path."""

from stoker.cli.main import run

run()
