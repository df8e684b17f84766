"""Checkpoint surgery: the fast checkpoint from published ones, streamed, resumable, with every tensor accounted for."""

from stoker.weights.build.manifest import Report
from stoker.weights.build.recipe import Recipe
from stoker.weights.build.run import build

__all__ = ["Recipe", "Report", "build"]
