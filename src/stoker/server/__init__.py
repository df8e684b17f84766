"""The HTTP server: OpenAI's and Anthropic's APIs in front of an engine process.

A request passes `protocol.py` (uvicorn, timeouts), `guard.py` (host, key, size), `endpoints/` with `schemas/` (bodies),
`prepare/` (a body becomes engine requests), `lifecycle/service.py` (queue and engine), `generation.py` with `output/`
(events become text, reasoning and calls) and `stream.py` (server-sent events or JSON).
"""
