"""The network in torch, module by module: what tests compare with, and what runs the demo.

Nothing here knows of requests; state (KV pages, recurrent slots) comes in with every call.
"""
