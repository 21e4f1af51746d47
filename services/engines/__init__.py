"""Text generation behind one small interface.

`engine` is that interface and its configuration, `loop` steps an engine in a thread of its own and lets asyncio code
await it, `factory` makes the engine that a configuration names: `transformers_engine` (over `kv_slots`), which needs
nothing but transformers, or `vllm_engine` (over `vllm_worker`, what is done inside vLLM, and `vllm_package`, whether it
can be had). `weight_names` checks the tensors that an update brings. Who only reads a configuration waits for neither
transformers nor vLLM to load.
"""

from services.engines.engine import (
    Engine,
    EngineConfig,
    EngineError,
    Generation,
    GenerationRequest,
    VLLMConfig,
    WeightsError,
)
from services.engines.factory import make_engine
from services.engines.loop import EngineLoop, LoopStats

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineLoop",
    "Generation",
    "GenerationRequest",
    "LoopStats",
    "VLLMConfig",
    "WeightsError",
    "make_engine",
]
