"""DiLoCo: replicas train on their own, and every few steps apply the average of how far each of them came.

    inner optimizer's step ─▶ hook: local step + 1
        at sync_every - delay     quorum (whoever is behind heals) ─▶ pseudo-gradient = original - local ─▶ all-reduce
        at sync_every             wait ─▶ commit? ─▶ outer SGD on the originals ─▶ they become the parameters
                                            └─ no: the same again with those who are left

With several fragments (Streaming DiLoCo) each sync moves one of them, in turn. The schedule is torchft's DiLoCo
(arXiv 2311.08105, 2501.18512); what is done at its two points is ours: a failed commit does not cost the round, a
replica that healed contributes nothing it did not train, and a sync makes half as many passes over memory.

Parameters may be sharded (DTensors): each proc syncs its shards with those of its peers' procs of the same rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchft.local_sgd import DiLoCo

from services.diloco.compression import Compression
from services.diloco.fragment import Fragment, local

_PAUSE_S = 0.1  # after a failed sync, before the next try


def make_diloco_outer_loop(
    manager: Any,
    model_fragments: Sequence[nn.Module],
    inner_optimizer: torch.optim.Optimizer,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    sync_every: int = 10,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    *,
    compression: Compression | None = None,
    weigh_tokens: bool = False,
    give_up_s: float = 600.0,
) -> OuterLoop:
    """The outer loop over `model_fragments`, one outer SGD each; every fragment is synced once in `sync_every` steps.

    Parameters that require no gradient are left alone. All replicas start with equal parameters. `weigh_tokens`: a
    contribution counts for the tokens that `OuterLoop.trained` was told of since the fragment's last sync, else for 1.
    A sync that does not succeed in `give_up_s` raises TimeoutError from the optimizer's step. ValueError for parameters
    narrower than float32, which would lose most of a small update, or for a schedule that does not come out even.
    """
    if not model_fragments:
        raise ValueError("there are no fragments to sync: pass the modules whose parameters are trained")
    outer = (outer_lr, outer_momentum, nesterov)
    fragments = [Fragment(module, *outer, alpha=fragment_update_alpha) for module in model_fragments]
    if compression is not None:
        for fragment in fragments:
            fragment.compression = compression.fresh(fragment.gradient)
    return OuterLoop(
        manager, list(model_fragments), fragments, inner_optimizer,
        sync_every, fragment_sync_delay, weigh_tokens, give_up_s,
    )  # fmt: skip


class OuterLoop(DiLoCo):
    """Use it as a context, or `attach` and `detach`: in between, steps of the inner optimizer sync.

    Its counters only grow: `syncs` committed here, `retries`, `rounds_lost` (healed with training of its own that
    nobody will see), `seconds` in syncs.
    """

    def __init__(
        self,
        manager: Any,
        modules: list[nn.Module],
        fragments: list[Fragment],
        inner_optimizer: torch.optim.Optimizer,
        sync_every: int,
        delay: int,
        weigh_tokens: bool,
        give_up_s: float,
    ) -> None:
        # Each fragment has its own outer optimizer (replicas would diverge over a shared one); no buckets and no
        # quantization (either syncs something else than it says, without an error).
        super().__init__(
            manager, modules, inner_optimizer, [each.optimizer for each in fragments], sync_every,
            pin_memory=False, use_bucketization=False, should_quantize=False, fragment_sync_delay=delay,
        )  # fmt: skip
        self._fragments: list[Fragment] = fragments
        self._weigh_tokens, self._give_up_s = weigh_tokens, give_up_s
        self._in_flight: Fragment | None = None
        self._just_healed = False
        self.tokens = [0.0] * len(fragments)  # by fragment, trained since its last sync
        self.syncs = self.retries = self.rounds_lost = 0
        self.seconds = 0.0
        self.last, self.last_weight = fragments[0], 0.0  # of the last sync: its fragment, this replica's weight in it
        for number, fragment in enumerate(fragments):
            manager.register_state_dict_fn(f"fragment {number}", fragment.load, fragment.save)
        # After the fragments, whose originals become the parameters: the peer's own parameters hold training that is
        # its alone, and would make this replica's first contribution a second one of the peer's.
        manager.register_state_dict_fn("inner", self._load_inner, self._save_inner)

    def _register_state_dict_fn(self) -> None:
        """Later: DiLoCo's constructor calls this, before there are the fragments whose state is to be healed."""

    def attach(self) -> None:
        if not self._hooks:
            self.__enter__()

    def detach(self) -> None:
        self.__exit__(None, None, None)

    # ---- what the caller asks and tells --------------------------------------------------------------------------

    @property
    def fragments(self) -> list[Fragment]:
        return self._fragments

    @property
    def settled(self) -> bool:
        """Whether no fragment's bytes are under way."""
        return self._in_flight is None

    @property
    def local_step(self) -> int:
        """Inner steps since the last sync."""
        return self._local_step

    def trained(self, tokens: float) -> None:
        """The running inner step is of so many tokens; before the optimizer's step."""
        self.tokens = [each + tokens for each in self.tokens]

    def resume(self, local_step: int, tokens: Sequence[float]) -> None:
        """Continue a round that a checkpoint was taken in; what was under way then is sent again after a step."""
        self._local_step = min(local_step, self._sync_every - self._fragment_sync_delay - 1)
        self.tokens = list(tokens)

    def forget_local(self) -> None:
        """Drop what was trained since the last syncs: the originals become the parameters, and a new round begins."""
        for fragment in self._fragments:
            fragment.restore_parameters()
        self.resume(0, [0.0] * len(self._fragments))

    def join(self, at_least: int, limit_s: float) -> bool:
        """Take part in the peers' next sync with nothing to contribute; returns whether this replica healed in it.

        Peers are known to stand at round `at_least` or later. A quorum of others that are behind as well is left again.
        False when none of those peers came for about `limit_s`.
        """
        began, deadline = time.monotonic(), time.monotonic() + limit_s
        while True:
            try:
                healed = self._quorum(0.0, limit_s)
            except TimeoutError:
                return False
            if self._manager.current_step() >= at_least:
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        if healed or self._manager.num_participants() > 1:
            self._send()
            if self._local_step == self._sync_every:
                self._perform()
        self.seconds += time.monotonic() - began
        return healed

    def finish(self) -> None:
        """At the end of training: sync the fragments that were trained since their last sync, so that all are equal."""
        began = time.monotonic()
        for _ in self._fragments[1:]:
            self._prepare()
            while self._in_flight is not None:  # again when it healed, and is in its peers' next sync
                self._perform()
        self.seconds += time.monotonic() - began

    # ---- the two points of a round -------------------------------------------------------------------------------

    def _step_post_hook(self, *_: Any) -> None:
        self._manager.allow_state_dict_read()
        self._local_step += 1
        began = time.monotonic()
        try:
            if self._local_step == self._sync_every - self._fragment_sync_delay:
                self._prepare()
            if self._local_step == self._sync_every:
                self._perform()
        except BaseException:
            self._abandon()
            raise
        self.seconds += time.monotonic() - began

    def _prepare(self) -> None:
        """Send the pseudo-gradient of the fragment whose turn it is; after healing that is zero."""
        self.rounds_lost += self._quorum(self.tokens[self._current_fragment()])
        self._send()

    def _send(self) -> None:
        """Start a fragment's all-reduce; wherever this replica stood in its round, it is now where its peers are."""
        self._local_step = self._sync_every - self._fragment_sync_delay
        self._in_flight = self._fragments[self._current_fragment()]
        self._in_flight.prepare(self._manager, keep=self._fragment_sync_delay > 0)

    def _perform(self) -> None:
        """Apply the average. When the sync failed, try again with those who are left, until it succeeds."""
        assert self._in_flight is not None
        deadline = time.monotonic() + self._give_up_s
        while not self._in_flight.perform(self._manager):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"a sync did not succeed in {self._give_up_s:g} s: see why in the log, or raise diloco.give_up_s"
                )
            self.retries += 1
            time.sleep(_PAUSE_S)
            if self._quorum(self.tokens[self._current_fragment()]):
                self.rounds_lost += 1  # peers went on without this replica, and are sending the next fragment
                self._send()
                if self._local_step < self._sync_every:
                    return
            else:
                self._in_flight.send_again(self._manager)
        number = self._fragments.index(self._in_flight)
        self.last = self._in_flight
        self.tokens[number] = 0.0
        self.syncs += 1
        self._in_flight = None
        self._local_step = 0

    def _quorum(self, tokens: float, limit_s: float | None = None) -> bool:
        """A quorum; returns whether this replica healed in it. TimeoutError as the manager raises it."""
        self._just_healed = False
        if self._weigh_tokens:
            self._manager.contribute(tokens)
        self._manager.start_quorum(*([limit_s] if limit_s is not None else []))
        self.last_weight = 0.0 if self._just_healed else tokens if self._weigh_tokens else 1.0
        return self._just_healed

    def _abandon(self) -> None:
        """After a sync that is given up: what was trained stays, and goes into the next one."""
        if self._in_flight is not None:
            self._in_flight.wait()
        self._in_flight = None
        self._local_step = 0

    # ---- healing -------------------------------------------------------------------------------------------------

    def _save_inner(self) -> dict[str, Any]:
        """The inner optimizer, by the parameter's number: local tensors, and which of them are shards."""
        optimizer, moments = self._local_optimizer, []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state.get(parameter, {})
            shards = [name for name, value in state.items() if isinstance(value, DTensor)]
            moments.append({"state": {name: _detached(value) for name, value in state.items()}, "shards": shards})
        return {"moments": moments, "rates": [float(group["lr"]) for group in optimizer.param_groups]}

    def _load_inner(self, saved: dict[str, Any]) -> None:
        optimizer = self._local_optimizer
        settings = optimizer.state_dict()["param_groups"]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = {}
        for number, (parameter, of) in enumerate(zip(parameters, saved["moments"], strict=True)):
            if of["state"]:
                state[number] = {
                    name: _sharded(value, parameter) if name in of["shards"] else value
                    for name, value in of["state"].items()
                }
        for group, rate in zip(settings, saved["rates"], strict=True):
            group["lr"] = rate
        optimizer.load_state_dict({"state": state, "param_groups": settings})
        self._in_flight = None
        self.forget_local()
        self._just_healed = True


def _detached(value: Any) -> Any:
    return local(value).cpu() if isinstance(value, Tensor) else value


def _sharded(value: Tensor, like: Tensor) -> DTensor:
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        value.to(local(like).device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
