"""Ground floor: what the actors agree on.

Imports nothing else of Milkweed, and never torch, so that every proc starts fast.
"""

import os

# Monarch reads this when it is first imported: dead processes are then noticed within about a second.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
