"""The trainer's part of a checkpoint: the policy in Hugging Face form, and what continues the optimization.

Whoever calls this makes the folder appear whole or not at all (`services.runs.checkpoints`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from services.training.learner import Learner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STATE_FILE = "trainer.pt"


def save_state(path: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, step: int) -> None:
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
    """Continue from `trainer.pt`; returns the step. The policy's weights were loaded when its model was made.

    Moments are continued; settings are those of the learner's configuration, which a resume may have changed.
    ValueError when the optimizer's state has another number of parameters than this model.
    """
    state = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
    learner.optimizer.load_state_dict(state["optimizer"])
    settings = learner.optimizer_config
    for group in learner.optimizer.param_groups:
        # It came with the checkpoint's settings. The learning rate is set by each step.
        group.update(betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
    learner.taid.load_state_dict(state["taid"])
    torch.set_rng_state(state["rng"])
    return int(state["step"])
