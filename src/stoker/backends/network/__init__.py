"""The network in torch, module by module: a checkpoint is loaded into it, the CPU backend computes with it, the GPU
backend packs its weights for kernels of its own, and tests compare with it.

Nothing here knows of requests; state (KV pages, recurrent slots) comes in with every call.
"""
