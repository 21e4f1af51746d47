"""The outer loop as a trainer uses it: one `Outer` in each proc of a replica, around the inner optimizer.

    outer.step = k + 1;  outer.trained(tokens);  optimizer.step()
        ├─ mostly nothing more
        └─ at the end of a round: a sync. A replica that was behind has healed: `outer.step` is its source's

A replica that comes late calls `catch_up` before its first batch. A checkpoint holds `state_dict` and `progress`, and
is taken while `settled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from services.diloco.compression import BF16, Compression, TopK
from services.diloco.config import DilocoConfig
from services.diloco.fragment import Fragment, local
from services.diloco.outer_loop import make_diloco_outer_loop

ORIGINAL, MOMENTUM, RESIDUAL = "original", "momentum_buffer", "residual"


class Extra(Protocol):
    """What else belongs to a replica's state, heals with it and is checkpointed by its owner."""

    def save(self) -> dict[str, Any]:
        """Tensors and plain values."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...


class Outer:
    """See the module. `step`: inner steps done once the running optimizer step is over."""

    def __init__(
        self,
        config: DilocoConfig,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        manager: Any,
        *,
        extra: Extra | None = None,
    ) -> None:
        """`parameters`: the trained ones by name, in the model's order, float32, equal in all replicas at the start.

        ValueError for other dtypes, or for fewer parameters than `config.fragments`.
        """
        self.config, self._manager, self._extra = config, manager, extra
        self._parameters = parameters
        self.step = 0
        # torch's modules allow no dots in a parameter's name.
        self._names = {_plain(name): name for name in parameters}
        self._loop = make_diloco_outer_loop(
            manager,
            [_module(part) for part in split_evenly(parameters, config.fragments)],
            optimizer,
            config.outer_lr, config.outer_momentum, config.nesterov,
            config.sync_every, config.fragment_sync_delay, config.fragment_update_alpha,
            compression=_compression(config),
            weigh_tokens=config.weighting == "tokens",
            give_up_s=config.give_up_s,
        )  # fmt: skip
        # After the outer loop's own, which sets the model.
        manager.register_state_dict_fn("replica", self._load_replica, self._save_replica)
        self._reported = (0, 0.0)  # syncs and their seconds that `metrics` has told of
        self._loop.attach()

    # ---- training ------------------------------------------------------------------------------------------------

    def trained(self, tokens: int) -> None:
        """Before `optimizer.step`: the tokens of this inner step, of the whole replica, equal on all its procs."""
        self._loop.trained(tokens)

    def catch_up(self, at_least: int, limit_s: float = 600.0) -> bool:
        """Join the peers' next sync now, without having trained; before the first step, or instead of one.

        Peers are known to stand at round `at_least` or later. True when this replica healed: parameters, optimizers
        and `step` are then a peer's, and it takes part in that sync with nothing to add. False when nobody was ahead,
        or nobody, or only peers that are behind as well, came for about `limit_s`.
        """
        return self._loop.join(at_least, limit_s)

    def finish(self) -> None:
        """After the last step: bring the fragments whose turn it was not to what all replicas agree on."""
        self._loop.finish()

    @property
    def settled(self) -> bool:
        """Whether no fragment's bytes are under way: a checkpoint may be taken."""
        return self._loop.settled

    @property
    def at_boundary(self) -> bool:
        """Whether nothing was trained since the last sync."""
        return self._loop.local_step == 0

    @property
    def rounds(self) -> int:
        """Syncs committed, by this replica or before it joined."""
        return int(self._manager.current_step())

    @property
    def newest_round(self) -> int:
        """The newest round that is known without a sync: an object store shows what peers have done."""
        return int(self._manager.newest_round())

    def metrics(self) -> dict[str, float]:
        """Of the syncs since the last call; empty where there was none. The norm is of this proc's share.

        A contribution's weight is in tokens; of a uniform one it is 1. `sent_bytes` is of one sync, as
        `Compression.nbytes` counts it.
        """
        loop = self._loop
        syncs, seconds = self._reported
        if loop.syncs == syncs:
            return {}
        self._reported = loop.syncs, loop.seconds
        return {
            "diloco/participants": float(self._manager.num_participants()),
            "diloco/rounds": float(self.rounds),
            "diloco/retries": float(loop.retries),
            # An object store takes a contribution and may leave it out, because it came too late.
            "diloco/rounds_lost": float(loop.rounds_lost + getattr(self._manager, "left_out", 0)),
            "diloco/pseudo_gradient_norm": loop.last.norm,
            "diloco/weight": loop.last_weight,
            "diloco/sent_bytes": float(loop.last.sent_bytes),
            "seconds/diloco/sync": loop.seconds - seconds,
        }

    def close(self) -> None:
        """Leave, so that peers do not wait for this replica. Idempotent, bounded."""
        self._loop.detach()
        self._manager.shutdown()

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Originals and outer momenta by parameter, and what top-k still owes; sharded as the parameters are.

        On the parameters' device; to be loaded into in place, and then handed to `load`.
        """
        found: dict[str, Tensor] = {}
        for fragment in self._loop.fragments:
            for kind, flat in _kinds(fragment).items():
                for name, part in fragment.by_name(flat).items():
                    found[f"outer/{self._names[name]} {kind}"] = _like(part.clone(), fragment.parameters[name])
        return found

    def progress(self) -> dict[str, Any]:
        """The rest, as json can hold it."""
        return {
            "step": self.step,
            "rounds": self.rounds,
            "manager": self._manager.round_state(),
            "local_step": self._loop.local_step,
            "tokens": list(self._loop.tokens),
        }

    def load(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; the parameters themselves are the trainer's to load.

        ValueError for a checkpoint of another number of fragments, KeyError for one of other parameters.
        """
        if len(progress["tokens"]) != len(self._loop.fragments):
            raise ValueError(
                f"the checkpoint was written with diloco.fragments = {len(progress['tokens'])}: resume with that"
            )
        for fragment in self._loop.fragments:
            for kind, flat in _kinds(fragment).items():
                for name, part in fragment.by_name(flat).items():
                    part.copy_(local(tensors[f"outer/{self._names[name]} {kind}"]))
        self._manager.load_round_state(progress["manager"])
        self._loop.resume(int(progress["local_step"]), progress["tokens"])
        self.step = int(progress["step"])

    def synced_only(self) -> None:
        """Forget what was trained since the last syncs: parameters := originals, `step` is that of the last sync.

        For a replica that starts from another one's checkpoint.
        """
        self.step -= self._loop.local_step
        self._loop.forget_local()

    # ---- healing -------------------------------------------------------------------------------------------------

    def _save_replica(self) -> dict[str, Any]:
        return {"step": self.step, "extra": self._extra.save() if self._extra else {}}

    def _load_replica(self, saved: dict[str, Any]) -> None:
        self.step = int(saved["step"])
        if self._extra:
            self._extra.load(saved["extra"])


def split_evenly(parameters: Mapping[str, nn.Parameter], parts: int) -> list[dict[str, nn.Parameter]]:
    """Consecutive parameters in `parts` parts of about equal elements, none empty. ValueError when they do not suffice.

    Counted are whole parameters, sharded or not, so that all procs make the same parts.
    """
    if len(parameters) < parts:
        raise ValueError(f"{len(parameters)} parameters make no {parts} fragments: set diloco.fragments lower")
    left, found = dict(parameters), []
    for still in range(parts, 0, -1):
        share = sum(p.numel() for p in left.values()) / still
        part: dict[str, nn.Parameter] = {}
        size = 0
        # Take one more while that comes closer to the share; leave one for each part to come.
        while left and (
            not part or (len(left) >= still and (still == 1 or size + next(iter(left.values())).numel() / 2 < share))
        ):
            name = next(iter(left))
            part[name] = left.pop(name)
            size += part[name].numel()
        found.append(part)
    return found


def _compression(config: DilocoConfig) -> Compression | None:
    return {"none": None, "bf16": BF16(), "topk": TopK(config.topk_ratio)}[config.compression]


def _plain(name: str) -> str:
    return name.replace(".", "/")


def _module(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    module = nn.Module()
    for name, parameter in parameters.items():
        module.register_parameter(_plain(name), parameter)
    return module


def _kinds(fragment: Fragment) -> dict[str, Tensor]:
    kinds = {ORIGINAL: fragment.original, MOMENTUM: fragment.momentum}
    if fragment.compression.residual is not None:
        kinds[RESIDUAL] = fragment.compression.residual
    return kinds


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """A proc's part of a tensor as the whole thing that `parameter` is."""
    part = part.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
