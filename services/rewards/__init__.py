"""Reward functions by import path, each called in a process that can be killed.

`sandbox` is the caller's side, `worker` the process. Nothing here imports torch: a worker starts as fast as the
functions it was given.
"""
