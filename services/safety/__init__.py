"""Guard rails of a run: what notices that a policy gets better at its reward and worse at its task."""

from services.safety.config import GuardConfig, SafetyConfig
from services.safety.guard import CollapseStopError, HeldOutGuard, Verdict, raise_if_fired
from services.safety.split import HeldoutSplit, LeakedTaskError, content_hash

__all__ = [
    "CollapseStopError",
    "GuardConfig",
    "HeldOutGuard",
    "HeldoutSplit",
    "LeakedTaskError",
    "SafetyConfig",
    "Verdict",
    "content_hash",
    "raise_if_fired",
]
