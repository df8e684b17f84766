"""The engine's backend on the network in torch, with drafting networks: the demo, and dense models on accelerators."""
