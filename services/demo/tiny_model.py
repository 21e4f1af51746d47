"""The demo's policy: a Qwen3 decoder of about 0.2 M parameters that two CPU cores train in minutes.

A stock architecture, so that transformers and vLLM both load it; `head_dim` is 32 because vLLM's CPU attention has no
kernel for smaller heads.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.demo.tokenizer import build_tokenizer


class TinyModelConfig(BaseModel):
    """Shape of the demo's decoder."""

    model_config = ConfigDict(extra="forbid")

    hidden_size: int = Field(default=64, gt=0, description="Width of the residual stream.")
    intermediate_size: int = Field(default=128, gt=0, description="Width of the gated MLP.")
    layers: int = Field(default=3, gt=1, description="Decoder layers; copying a hint takes at least two.")
    heads: int = Field(default=4, gt=0, description="Attention heads, each with its own key and value.")
    head_dim: int = Field(
        default=32, ge=32, multiple_of=2, description="Width of a head; vLLM on CPU wants 32 or more."
    )
    max_positions: int = Field(default=512, gt=0, description="Longest sequence in tokens.")


def build_model(config: TinyModelConfig, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialized float32 model in train mode; the same config and seed give the same parameters.

    The caller's random state is left as it was.
    """
    tokenizer = build_tokenizer()
    qwen = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(qwen).train()
