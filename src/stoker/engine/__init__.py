"""The life of a request: prompt in, tokens out."""
