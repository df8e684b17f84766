"""Measuring any OpenAI-compatible server: workloads, timed client, formulas, suites. No torch.

Tokens come from token ids or `usage`, never from SSE chunks; docs/benchmarks.md has a formula per metric. Pages and
tables of results are in report/.
"""
