"""The trainer's part of a checkpoint: the policy in Hugging Face form, and what continues the optimization.

    policy/        for everybody: `from_pretrained` reads it; float32, whole, written by the leader
    adapter/       where an adapter is trained: peft reads it; it is merged into policy/ already
    trainer/       for the trainer: float32 parameters and moments by name, as torch.distributed.checkpoint writes them,
                   each proc its shards; any number of procs reads them back
    trainer.json   what is no tensor
    (of a replica among several, what its outer loop holds is in the last two as well)

Whoever calls this makes the folder appear whole or not at all (`services.runs.checkpoints`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from services.training.learner import Learner
from services.training.sharding import ALONE, Replica, gathered, like
from services.tuning import save_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POLICY, ADAPTER, TENSORS, PROGRESS = "policy", "adapter", "trainer", "trainer.json"
ONE_FILE = "trainer.pt"  # in the place of the last two, from a trainer that knew one proc only; read, never written
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # what AdamW knows of a parameter


def save_state(
    path: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, step: int, replica: Replica = ALONE
) -> None:
    """Write all of it into the folder `path`, which every proc of the replica sees. A collective."""
    policy = gathered(learner.model, replica)
    if replica.leads:
        save_policy(learner.model, policy, path / POLICY, path / ADAPTER)
        tokenizer.save_pretrained(path / POLICY)
        progress = {"step": step, "taid": learner.taid.state_dict()}
        if learner.outer is not None:
            progress["outer"] = learner.outer.progress()
        (path / PROGRESS).write_text(json.dumps(progress))
    del policy
    tensors = {**_parameters(learner), **_moments(learner), **_outer(learner), "rng": torch.get_rng_state()}
    with _no_advice():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path / TENSORS), no_dist=replica.size == 1)


def load_state(path: Path, learner: Learner, replica: Replica = ALONE) -> int:
    """Continue from what `save_state` wrote, with any number of procs; returns the step. A collective.

    Moments are continued; settings are those of the learner's configuration, which a resume may have changed.
    ValueError when the checkpoint is of another model.
    """
    if (path / ONE_FILE).exists():
        return _load_one_file(path / ONE_FILE, learner)
    reader = dcp.FileSystemReader(path / TENSORS)
    saved = reader.read_metadata().state_dict_metadata
    outer = _outer(learner)
    tensors: dict[str, Any] = {**_parameters(learner), **outer, "rng": torch.get_rng_state()}
    _check_same_model(path, tensors, saved)
    known = [name for name in _trained(learner) if f"{name} exp_avg" in saved]  # the others had no gradient yet
    for name in known:
        parameter = _trained(learner)[name].detach()
        fresh = (torch.zeros_like(parameter), torch.zeros_like(parameter), torch.tensor(0.0))
        learner.optimizer.state[_trained(learner)[name]] = dict(zip(MOMENTS, fresh, strict=True))
    tensors |= _moments(learner)
    with _no_advice():
        dcp.load(tensors, storage_reader=reader, no_dist=replica.size == 1)
    torch.set_rng_state(tensors["rng"])
    progress = json.loads((path / PROGRESS).read_text())
    learner.taid.load_state_dict(progress["taid"])
    if learner.outer is not None:
        learner.outer.load({name: tensors[name] for name in outer}, progress["outer"])
    return int(progress["step"])


def rounds_of(path: Path) -> int:
    """How many syncs with other replicas the checkpoint in the folder `path` has behind it, as far as it tells."""
    try:
        return int(json.loads((path / PROGRESS).read_text())["outer"]["rounds"])
    except (OSError, ValueError, KeyError):  # of a trainer alone, or of one before there were replicas, or damaged
        return 0


def _load_one_file(file: Path, learner: Learner) -> int:
    state = torch.load(file, map_location="cpu", weights_only=True)
    moments = state["optimizer"]["state"]  # by the parameter's number; the parameters themselves are the policy's
    if len(state["optimizer"]["param_groups"][0]["params"]) != len(learner.parameters):
        raise ValueError(f"{file} was written for another model: resume with the model it was written with")
    for number, parameter in enumerate(learner.parameters):
        if number in moments:
            fresh = {name: like(moments[number][name], parameter) for name in ("exp_avg", "exp_avg_sq")}
            learner.optimizer.state[parameter] = {**fresh, "step": moments[number]["step"]}
    learner.taid.load_state_dict(state["taid"])
    torch.set_rng_state(state["rng"])
    return int(state["step"])


def _trained(learner: Learner) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in learner.model.named_parameters() if p.requires_grad}


def _parameters(learner: Learner) -> dict[str, Tensor]:
    """What is trained, by name; the rest is in the model that a checkpoint's policy is made of."""
    return {name: parameter.detach() for name, parameter in _trained(learner).items()}


def _outer(learner: Learner) -> dict[str, Tensor]:
    """What the outer loop holds, by name."""
    return learner.outer.state_dict() if learner.outer is not None else {}


def _moments(learner: Learner) -> dict[str, Tensor]:
    state = learner.optimizer.state
    return {
        f"{name} {moment}": state[parameter][moment]
        for name, parameter in _trained(learner).items()
        for moment in MOMENTS
        if parameter in state
    }


def _check_same_model(path: Path, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    there = {name: tuple(each.size) for name, each in saved.items() if name.rpartition(" ")[2] not in MOMENTS}
    different = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    if different:
        name = different[0]
        raise ValueError(
            f"{path} was written for another model: {len(different)} tensors differ, {name} is {wanted.get(name)} here "
            f"and {there.get(name)} there; resume with the model it was written with"
        )


@contextmanager
def _no_advice() -> Iterator[None]:
    """Without torch's warnings that one proc is one proc, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        yield
