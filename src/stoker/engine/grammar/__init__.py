"""Grammars of strangers, compiled and followed in processes of their own: a hang or a crash costs one request."""
