"""What the network computes: config, decoder, attention, DeltaNet, experts, MTP head, DFlash drafter.

Nothing here knows of requests; state (KV pages, recurrent slots) comes in with every call.
"""
