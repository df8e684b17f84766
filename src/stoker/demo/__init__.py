"""A small model to run without a download. Until a trained one is embedded, its weights are random and it says so."""
