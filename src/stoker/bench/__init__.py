"""Measuring any OpenAI-compatible server: workloads, client, measurement, suites, report. No torch.

Tokens come from token ids or `usage`, never from SSE chunks; docs/benchmarks.md has a formula per metric.
"""
