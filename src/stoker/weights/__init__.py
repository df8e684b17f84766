"""Weights on disk: safetensors headers, checkpoint directories, formats, loading."""
