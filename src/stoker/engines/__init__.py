"""Engines that serve a recipe: Stoker's own and vLLM, each turned into commands that are run. No torch, no vLLM."""
