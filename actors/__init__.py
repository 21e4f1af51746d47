"""Thin Monarch actors: endpoints, state, and calls into `services`."""
