"""Measured comparisons; results are kept in results/."""
