"""Grammars of requests, compiled and followed in separate processes, so that a hang or a crash costs one request."""
