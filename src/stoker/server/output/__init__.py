"""Parsers that split the text of an answer into reasoning, content and tool calls.

They are pure, and however the text is cut into pieces, the result is the same.
"""
