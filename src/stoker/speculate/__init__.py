"""Guessing the next tokens cheaply, and accepting exactly those the model would have produced."""
