"""Checkpoint surgery: the fast checkpoint from published ones, streamed, resumable, with every tensor accounted for."""

from stoker.checkpoint.build.manifest import Report
from stoker.checkpoint.build.options import BuildOptions
from stoker.checkpoint.build.run import build

__all__ = ["BuildOptions", "Report", "build"]
