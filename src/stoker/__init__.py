"""Stoker: a 120B-class mixture-of-experts model on one desk-side box, as fast as its memory bus allows."""

__version__ = "0.1.0"
