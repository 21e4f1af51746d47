"""Text generation behind one small interface.

`engine` is that interface and its configuration, `loop` steps an engine in a thread of its own and lets asyncio code
await it, `transformers_engine` (over `kv_slots`) is the engine that needs nothing but transformers. It is imported by
its own name: who only reads a configuration does not wait for transformers to load.
"""

from services.engines.engine import Engine, EngineConfig, EngineError, Generation, GenerationRequest, WeightsError
from services.engines.loop import EngineLoop, LoopStats

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineLoop",
    "Generation",
    "GenerationRequest",
    "LoopStats",
    "WeightsError",
]
