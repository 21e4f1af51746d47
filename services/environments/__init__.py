"""Environments that agents act in: sessions on OpenEnv servers, hints for failing turns, and a bundled server.

Importing this is light: no torch, and no `openenv` (only the bundled server's own process imports that).
"""

from services.environments.client import EnvironmentClient, EnvironmentFailure, Observation, Session
from services.environments.config import EnvironmentConfig, ToolboxConfig
from services.environments.hints import HintLayers, dispatch, load_hint_modules, register
from services.environments.process import ServerFailure, ServerProcess

__all__ = [
    "EnvironmentClient",
    "EnvironmentConfig",
    "EnvironmentFailure",
    "HintLayers",
    "Observation",
    "ServerFailure",
    "ServerProcess",
    "Session",
    "ToolboxConfig",
    "dispatch",
    "load_hint_modules",
    "register",
]
