"""A run on disk: its folder, its checkpoints, and the lock that keeps it to one driver.

Imported by whoever writes a file that must be either whole or not there. Free of torch, so that a command line or a
notebook that only looks at a run starts fast.
"""

from services.runs.atomic import write_atomic
from services.runs.checkpoints import Checkpoint, Checkpoints
from services.runs.folder import RunFolder, find_run, of_replica
from services.runs.lock import RunLock

__all__ = ["Checkpoint", "Checkpoints", "RunFolder", "RunLock", "find_run", "of_replica", "write_atomic"]
