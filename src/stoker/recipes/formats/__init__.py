"""Recipes of sparkrun, spark-vllm-docker and vllm-project/recipes, read into ours and written from ours. No torch."""
