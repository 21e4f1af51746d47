"""The trainer's part of a checkpoint: the policy in Hugging Face form, and what continues the optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from services.training.learner import Learner

STATE_FILE = "trainer.pt"


def save_state(path: Path, learner: Learner, tokenizer: Any, step: int) -> None:
    """Write `policy/` (loads with `AutoModelForCausalLM.from_pretrained`) and `trainer.pt` into the folder `path`."""
    learner.model.save_pretrained(path / "policy")
    tokenizer.save_pretrained(path / "policy")
    torch.save(
        {
            "step": step,
            "optimizer": learner.optimizer.state_dict(),
            "taid": learner.taid.state_dict(),
            "rng": torch.get_rng_state(),
        },
        path / STATE_FILE,
    )


def load_state(path: Path, learner: Learner) -> int:
    """Continue from `trainer.pt`; returns the step. The policy's weights were loaded when its model was made."""
    state = torch.load(path / STATE_FILE, weights_only=True)
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.taid.load_state_dict(state["taid"])
    torch.set_rng_state(state["rng"])
    return int(state["step"])
