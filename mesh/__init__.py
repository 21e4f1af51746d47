"""Ground floor: what the actors agree on.

Imports nothing else of Milkweed, and never torch, so that every proc starts fast.
"""
