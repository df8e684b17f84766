"""Made-up requests to a real server: a case number is a request, always the same one.

`python -m tests.server.fuzz 4711` shows a request, with `--url` it sends it and judges the answer.
"""
