"""Toolbox episodes in this process, a batch at a time: how the warm start measures what the model can do.

The mesh plays through generators and environment servers instead; here there is neither server nor engine, so that a
check takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from services.environments.toolbox.grammar import Toolbox, right_form

MAX_NEW_TOKENS = 16  # the longest sensible call, `merge(729,9)<|end|>`, has 13


@dataclass
class Episode:
    """One played problem: its chat (hints included where they were shown), reward, and refused turns."""

    messages: list[dict[str, str]]
    reward: float = 0.0
    errors: int = 0


def play(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    level: str,
    problems: Sequence[int],
    *,
    hinted: bool,
    greedy: bool,
    seed: int = 0,
) -> list[Episode]:
    """Play the problems (seeds of `Toolbox.reset`) and return one episode for each.

    `hinted` shows the right form before every turn, also for operators without hints of their own. Without `greedy`
    tokens are sampled at temperature 1 from `seed`. The caller's random state is left as it was.
    """
    sessions = [Toolbox(level) for _ in problems]
    episodes = [
        Episode([{"role": "user", "content": session.reset(problem)}])
        for session, problem in zip(sessions, problems, strict=True)
    ]
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while running := [i for i, session in enumerate(sessions) if not session.done]:
            if hinted:
                for i in running:
                    form = right_form(episodes[i].messages, level)
                    episodes[i].messages.append({"role": "hint", "content": form})
            actions = _act(model, tokenizer, [episodes[i].messages for i in running], greedy)
            for i, action in zip(running, actions, strict=True):
                outcome = sessions[i].step(action)
                episodes[i].messages.append({"role": "assistant", "content": action})
                episodes[i].messages.append({"role": "tool", "content": outcome.content})
                episodes[i].errors += outcome.error_kind is not None
                episodes[i].reward = outcome.reward or 0.0
    model.train(was_training)
    return episodes


@torch.no_grad()
def _act(model: Any, tokenizer: Any, chats: list[list[dict[str, str]]], greedy: bool) -> list[str]:
    """The next action in every chat, generated as one left-padded batch."""
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(**batch, **sampling, max_new_tokens=MAX_NEW_TOKENS)
    new = output[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)
