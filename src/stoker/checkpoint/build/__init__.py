"""Checkpoint surgery: the fast checkpoint from published ones, streamed, resumable, with every tensor accounted for."""

from stoker.checkpoint.build.manifest import Report
from stoker.checkpoint.build.recipe import Recipe
from stoker.checkpoint.build.run import build

__all__ = ["Recipe", "Report", "build"]
