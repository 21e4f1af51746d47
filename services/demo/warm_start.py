"""The warm start: supervised training on demonstrations until the tiny model speaks the task and copies hints.

What it must leave behind: calls that are well formed, names drawn from the level's prior (so that an untrained policy
sometimes earns something), and obedience to a hint of a name never tried before. The last comes late and suddenly, a
phase change near a loss of .1, so training does not run for a number of steps: it runs at a constant learning rate
until hinted problems are solved, then cools down (warm-up, stable, decay). A base model that ignores hints would make
self-distillation destroy what reinforcement learns, therefore a run that does not get there is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from services.cache import cache_folder, fill_once
from services.demo.play import play
from services.demo.tiny_model import TinyModelConfig, build_model
from services.demo.tokenizer import build_tokenizer
from services.environments.toolbox import grammar, wording
from services.environments.toolbox.grammar import Demonstration, demonstration, level_ops

Row = tuple[list[int], list[bool]]  # token ids, and which of them are trained

MEASURED_FILE = "warm_start.json"
_FRESH = 1_000_000  # first seed of the problems that measure; demonstrations draw from their own stream


class WarmStartConfig(BaseModel):
    """How the demo's model is warm-started."""

    model_config = ConfigDict(extra="forbid")

    model: TinyModelConfig = Field(default_factory=lambda: TinyModelConfig(), description="Shape of the decoder.")
    batch: int = Field(default=32, gt=0, description="Demonstrations per step.")
    lr: float = Field(default=4e-3, gt=0, description="AdamW learning rate while it is constant.")
    warm_up: int = Field(default=20, ge=1, description="Steps of linear warm-up.")
    check_every: int = Field(default=25, gt=0, description="Steps between two looks at the hinted accuracy.")
    cool_down: int = Field(default=75, ge=0, description="Steps of linear decay after hints are followed.")
    max_steps: int = Field(default=900, gt=0, description="Give up when hints are not followed after so many steps.")
    p_hint: float = Field(default=0.5, ge=0, le=1, description="Share of the demonstrated turns that follow a hint.")
    p_error: float = Field(
        default=0.3, ge=0, le=1, description="Chance of a refused turn before a demonstrated call, and of one more."
    )
    target: float = Field(default=0.97, ge=0, le=1, description="Hinted accuracy (greedy) that starts the cool-down.")
    required: float = Field(default=0.95, ge=0, le=1, description="Hinted accuracy below which the result is refused.")
    problems: int = Field(default=256, ge=4, description="Fresh problems of the final measurement; a look takes 1/4.")
    threads: int = Field(default=1, ge=1, description="torch threads; another number gives slightly other parameters.")

    @model_validator(mode="after")
    def _hints_can_be_learned(self) -> WarmStartConfig:
        if self.p_hint == 0:
            raise ValueError("p_hint=0 shows no hint, so following hints cannot be learned: use .3 or more")
        if self.required > self.target:
            raise ValueError(
                f"required={self.required} is above target={self.target}, so training would stop too early: "
                "raise target or lower required"
            )
        return self


@dataclass
class Measured:
    """What a warm start reached. Rewards and accuracies are means over `problems` fresh problems."""

    level: str
    seed: int
    steps: int
    loss: float  # nats per trained token, last step
    hinted_accuracy: float  # greedy, the right form before every turn: problems solved without a refused turn
    unhinted_reward: float  # sampled at temperature 1
    problems: int
    parameters: int
    seconds: float
    cpu_seconds: float


def warm_start(
    level: str, seed: int, config: WarmStartConfig | None = None
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, Measured]:
    """Train a new model for `level`; the same arguments give the same parameters on the same machine.

    ValueError for an unknown level; RuntimeError when the model does not follow hints within `config.max_steps`.
    """
    config = config or WarmStartConfig()
    level_ops(level)
    tokenizer, model = build_tokenizer(), build_model(config.model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0)
    batches = _batches(tokenizer, level, seed, config)
    started, cpu_started = time.monotonic(), time.process_time()
    accuracy, loss, step = -1.0, float("nan"), 0

    with _threads(config.threads):
        while accuracy < config.target:
            if step >= config.max_steps:
                raise RuntimeError(_not_following(level, seed, step, accuracy, config.target, loss))
            for _ in range(config.check_every):
                scale = min(1.0, (step + 1) / config.warm_up)
                loss = _train_step(model, optimizer, next(batches), config.lr * scale)
                step += 1
            accuracy = hinted_accuracy(model, tokenizer, level, config.problems // 4)

        for left in range(config.cool_down, 0, -1):
            scale = left / (config.cool_down + 1)
            loss = _train_step(model, optimizer, next(batches), config.lr * scale)
        step += config.cool_down
        accuracy = hinted_accuracy(model, tokenizer, level, config.problems)
        if accuracy < config.required:
            raise RuntimeError(_not_following(level, seed, step, accuracy, config.required, loss))
        unhinted = play(model, tokenizer, level, _fresh(config.problems), hinted=False, greedy=False, seed=seed)

    measured = Measured(
        level=level,
        seed=seed,
        steps=step,
        loss=loss,
        hinted_accuracy=accuracy,
        unhinted_reward=sum(episode.reward for episode in unhinted) / len(unhinted),
        problems=config.problems,
        parameters=model.num_parameters(),
        seconds=round(time.monotonic() - started, 1),
        cpu_seconds=round(time.process_time() - cpu_started, 1),
    )
    return model.eval(), tokenizer, measured


def hinted_accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, level: str, problems: int = 128
) -> float:
    """Share of fresh problems solved greedily, without a refused turn, when a hint stands before every turn."""
    episodes = play(model, tokenizer, level, _fresh(problems), hinted=True, greedy=True)
    return sum(episode.reward > 0 and episode.errors == 0 for episode in episodes) / problems


def training_ids(chat: Demonstration, tokenizer: PreTrainedTokenizerFast) -> Row:
    """Token ids of a demonstration as the chat template renders it, and which of them are trained.

    Of a trained assistant turn the content and its `<|end|>` are trained, the role token is not.
    """
    ids: list[int] = []
    trained: list[bool] = []
    for message, train in zip(chat.messages, chat.trained, strict=True):
        turn = tokenizer.encode(f"<|{message['role']}|>{message['content']}<|end|>", add_special_tokens=False)
        ids += turn
        trained += [False] + [train] * (len(turn) - 1)
    return ids, trained


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, measured: Measured, folder: Path) -> None:
    """Write a folder that `from_pretrained` loads, chat template included, and what was measured beside it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / MEASURED_FILE).write_text(json.dumps(asdict(measured), indent=2) + "\n")


def demo_model(
    level: str, seed: int = 0, cache_dir: str | os.PathLike[str] | None = None, config: WarmStartConfig | None = None
) -> Path:
    """The folder of the warm-started model for `level`, built on first use (about a minute) and cached.

    The cache is `cache_dir`, or `milkweed` under `$XDG_CACHE_HOME` or `~/.cache`. Errors as `warm_start`.
    """
    config = config or WarmStartConfig()
    folder = demo_folder(level, seed, cache_dir, config)
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)  # before the training: a cache that is not ours to write fails now
    model, tokenizer, measured = warm_start(level, seed, config)
    return fill_once(folder, lambda aside: save_model(model, tokenizer, measured, aside))


def demo_folder(
    level: str, seed: int = 0, cache_dir: str | os.PathLike[str] | None = None, config: WarmStartConfig | None = None
) -> Path:
    """Where `demo_model` of the same arguments keeps its model; it may not be there yet."""
    cache = Path(cache_dir or cache_folder())
    return cache / f"toolbox-{level}-seed{seed}-{_fingerprint(level, config or WarmStartConfig())}"


def _fingerprint(level: str, config: WarmStartConfig) -> str:
    """Changes with the settings, the level and the code that makes the model, so that no stale model is found."""
    level_ops(level)
    digest = hashlib.sha256(config.model_dump_json().encode())
    for source in (Path(grammar.__file__), Path(wording.__file__), *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _batches(tokenizer: PreTrainedTokenizerFast, level: str, seed: int, config: WarmStartConfig) -> Iterator[list[Row]]:
    """Batches of demonstrations of like length, which saves a third of the padding that random batches would have."""
    rng = random.Random(seed)
    while True:
        chats = [demonstration(level, rng, config.p_hint, config.p_error) for _ in range(8 * config.batch)]
        rows = sorted((training_ids(chat, tokenizer) for chat in chats), key=lambda row: len(row[0]))
        batches = [rows[i : i + config.batch] for i in range(0, len(rows), config.batch)]
        rng.shuffle(batches)
        yield from batches


def _train_step(model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, rows: list[Row], lr: float) -> float:
    """One step on the mean cross-entropy of the trained tokens; returns it in nats per token."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    trained = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (row_ids, row_trained) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        trained[row, : len(row_ids)] = torch.tensor(row_trained)
    # Rows are padded on the right, where causal attention never looks from a trained position: no attention mask.
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
    loss = F.cross_entropy(model.lm_head(hidden[trained[:, 1:]]), ids[:, 1:][trained[:, 1:]])
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _fresh(problems: int) -> range:
    return range(_FRESH, _FRESH + problems)


def _not_following(level: str, seed: int, step: int, accuracy: float, wanted: float, loss: float) -> str:
    return (
        f"the warm start for level {level!r}, seed {seed} solves {accuracy:.2f} of the hinted problems after {step} "
        f"steps (wanted {wanted}; loss {loss:.3f}): raise max_steps or p_hint, or take another seed"
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
