"""Which class is which engine. Each is imported when it is chosen: neither of them, nor vLLM, is cheap to import."""

from __future__ import annotations

from services.engines.engine import Engine, EngineConfig


def make_engine(model_path: str, config: EngineConfig) -> Engine:
    """The engine that `config.engine` names, with the model of a Hugging Face folder, at version 0.

    What does not suit it raises: ValueError (ModelError is one) for the model or a setting, EngineError for a package
    that is missing or does not load.
    """
    if config.engine == "vllm":
        from services.engines.vllm_engine import VLLMEngine

        return VLLMEngine(model_path, config)
    from services.engines.transformers_engine import TransformersEngine
    from services.models import load_model

    return TransformersEngine(load_model(model_path, config.dtype, config.device), config)
