"""The HTTP server: OpenAI's and Anthropic's APIs in front of an engine process.

parse/      text of an answer to reasoning, content and tool calls, as it comes; no web framework
protocol/   what requests may say, as pydantic models
api/        one file per endpoint family: request in, JSON or a stream of events out
page/       the chat page at /

The rest is what those share: the served model, the engine's life, limits, metrics, structured output.
"""
