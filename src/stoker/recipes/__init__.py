"""Recipes: one TOML file says which model runs how, and what it is expected to reach. No torch."""
