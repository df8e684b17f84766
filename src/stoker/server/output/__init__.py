"""Text of an answer to reasoning, content and tool calls. Pure: however the text is cut, the result is the same."""
