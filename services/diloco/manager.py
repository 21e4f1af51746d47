"""Who takes part in a sync, and the average of what they bring: torchft's manager, made to carry on.

    start_quorum   a quorum from the lighthouse ─▶ a gloo group of its members ─▶ whoever is behind fetches a state
                   ─▶ members tell each other their weights and histories ─▶ the fetched state is taken over
    allreduce      tensor x own weight / mean weight ─▶ all-reduce ─▶ a vote: all members have it
    should_commit  only when the vote passed, in every proc of the replica

A quorum that fails is asked for again. The manager underneath is kept while it can be; it is opened anew, with a store
of its own, when the lighthouse was lost (a new one counts its quorums from 1 again, under keys that the old store still
holds) and after two failures in a row.

A lighthouse knows only who has come to it. One that has just begun may find one replica here and two there, and have
both go on. So replicas that were more do not accept a smaller quorum from a new lighthouse for a time; and each sync
gives its members a number by which they know each other's history, so that of two that meet with equal rounds and
different pasts the fewer step back and heal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

os.environ.setdefault("RUST_LOG", "error")  # before torchft is imported, whose threads report every missed heartbeat

import torch.distributed as dist
from torch import Tensor
from torchft.manager import Manager

from services.diloco.config import DilocoConfig
from services.diloco.members import exchange, introduce, leave, prevailing, told
from services.diloco.procs import Procs, Share
from services.diloco.sockets import HostGloo, Tether, serving_on
from services.diloco.transport import StateTransport
from services.meeting import open_store

logger = logging.getLogger(__name__)
logging.getLogger("torchft").setLevel(logging.CRITICAL)  # what it reports is handled here, and reported once

_LOOK_S = 0.05  # between two looks at whether a pending quorum can still come
_PAUSE_S = 0.5  # between two tries
_LONGEST_PAUSE_S = 60.0
_KEEP, _REOPEN, _GIVE_UP = 0, 1, 2  # what the first proc has all do next


class HealingError(RuntimeError):
    """A peer's state could not be taken over completely: this replica holds parts of two states."""


def open_manager(
    config: DilocoConfig,
    *,
    replica: int,
    rank: int = 0,
    procs: int = 1,
    lighthouse: str,
    share: Share = lambda value: value,
) -> ReplicaManager:
    """Take part in the syncs of the replicas that meet at `lighthouse` (its address), as number `replica`.

    Peers wait for whoever is open and has not come to the sync (up to `config.join_s`, and of two replicas for ever):
    open when training is about to begin. In a replica of several procs each opens its own; `share` hands a value of
    proc 0 (the others give None) to all of them. TimeoutError when the lighthouse is not to be reached in
    `config.give_up_s`.
    """
    limit_s = config.quorum_s + config.collective_s
    return ReplicaManager(config, replica, Procs(rank, procs, config.host, share, limit_s), lighthouse)


class ReplicaManager:
    """See `open_manager`. What DiLoCo needs of torchft's manager, and the weights."""

    _use_async_quorum = False  # asked by DiLoCo: a quorum stands, and healing is over, when start_quorum returns

    def __init__(self, config: DilocoConfig, replica: int, procs: Procs, lighthouse: str) -> None:
        self.config, self.replica = config, replica
        self._procs, self._lighthouse = procs, lighthouse
        self._states: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self._staged: dict[str, Any] | None = None  # a peer's state, fetched and not yet taken over
        self._rounds = {"step": 0, "history": 0}
        self._weight = self._factor = 1.0
        self._next_history = 0
        self._members, self._no_fewer_until = 0, 0.0  # of the last sync; for how long fewer of them are no quorum
        self._failures = 0  # in a row, with the same manager underneath
        self._troubles = 0  # since the last sync: quorums that failed because of this replica
        self._lost_lighthouse = False
        self._unfinished = False  # a quorum stands, whose sync is not over
        self._problem = ""
        self._inner: Manager | None = None
        self._store: dist.TCPStore | None = None
        self._tether: Tether | None = None
        self._exchanges = ThreadPoolExecutor(1, thread_name_prefix="diloco")
        self._until(self._opened, "opened", config.give_up_s)

    # ---- what is healed, and the round ---------------------------------------------------------------------------

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """`save` returns tensors and plain values in dicts and lists; a healing replica calls `load` with them.

        Loaded in the order of registration. ValueError for a key that is taken.
        """
        if key in self._states:
            raise ValueError(f"{key!r} is registered already: give each part of the state a key of its own")
        self._states[key] = load, save

    def allow_state_dict_read(self) -> None:
        """Nothing to allow: the state is read inside start_quorum, when no step is under way."""

    def disallow_state_dict_read(self) -> None: ...

    def current_step(self) -> int:
        """Syncs committed so far by this replica, or by the peer that it healed from."""
        return self._rounds["step"]

    def newest_round(self) -> int:
        """Of those it knows of, its own: others' rounds are only learned in a quorum."""
        return self.current_step()

    def num_participants(self) -> int:
        """Replicas in the quorum of the last sync."""
        return self._inner.num_participants() if self._inner is not None else 0

    def round_state(self) -> dict[str, int]:
        return dict(self._rounds)

    def load_round_state(self, state: dict[str, int]) -> None:
        self._rounds = {name: int(state[name]) for name in self._rounds}

    # ---- a sync --------------------------------------------------------------------------------------------------

    def contribute(self, weight: float) -> None:
        """What this replica's next contribution counts for. ValueError unless it is finite and not negative."""
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weight {weight} of a contribution must be finite and not negative")
        self._weight = float(weight)

    def start_quorum(self, limit_s: float | None = None) -> None:
        """Join the next sync; returns when its members stand, and this replica has healed if it was behind.

        TimeoutError when no quorum came about in `limit_s`, or `config.give_up_s`; another call tries again.
        HealingError when the state that was fetched does not fit: the replica must be started again.
        """
        limit_s = self.config.give_up_s if limit_s is None else limit_s
        self._until(partial(self._quorum, time.monotonic() + limit_s), "got a quorum", limit_s)
        if self._staged is not None:
            self._take_over(self._staged)

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Exchange:
        """Average `tensor` (floating point, any shape) over the members by weight, in place, while the caller goes on.

        After `wait` of what is returned the average is there, if `should_commit` then says so.
        """
        if should_quantize:
            raise ValueError("torchft's quantized all-reduce fails without a sign on CPUs: use diloco.compression")
        return Exchange(self._exchanges.submit(self._exchange, self._manager, tensor))

    def _exchange(self, inner: Manager, tensor: Tensor) -> None:
        self._next_history = exchange(inner, tensor, self._factor)

    def should_commit(self) -> bool:
        """Whether every member has every average of this sync. If not, the sync is to be tried again or left."""
        inner = self._manager
        fine = inner.should_commit()
        self._unfinished = False
        if fine:
            self._rounds = {"step": inner.current_step(), "history": self._next_history}
            self._members, self._failures, self._troubles = inner.num_participants(), 0, 0
        else:
            self._failures += 1
            logger.warning("replica %d: a sync failed: %s", self.replica, told(inner))
        return fine

    def shutdown(self) -> None:
        """Leave: peers stop waiting for this replica within `config.heartbeat_timeout_s`. Idempotent."""
        self._close()
        self._exchanges.shutdown(wait=False, cancel_futures=True)
        self._procs.close()

    # ---- trying again --------------------------------------------------------------------------------------------

    def _until(self, attempt: Callable[[bool], bool], what: str, limit_s: float) -> None:
        """Make attempts until one succeeds in every proc. The first proc decides how each goes on."""
        deadline = time.monotonic() + limit_s
        while True:
            order = None
            if self._procs.leads:
                order = _REOPEN if self._must_reopen() else _KEEP
                order = _GIVE_UP if time.monotonic() > deadline else order
            order = self._procs.tell(order)
            if order == _GIVE_UP:
                raise TimeoutError(
                    f"replica {self.replica} has not {what} in {limit_s:g} s ({self._problem}): see that "
                    f"the lighthouse at {self._lighthouse} runs, and that {self.config.min_replicas} replica(s) live "
                    "and sync (diloco.min_replicas); a longer diloco.give_up_s waits longer"
                )
            try:
                fine = attempt(order == _REOPEN)
            except HealingError:
                raise
            except Exception as error:  # torchft's servers and clients raise what they like
                fine, self._problem = False, f"{type(error).__name__}: {error}"
            if self._procs.agree(fine):
                return
            self._failed(fine)
            self._pause()

    def _must_reopen(self) -> bool:
        """Whether the manager underneath must be opened anew."""
        if self._tether is not None and self._tether.broken:
            self._lost_lighthouse = True
            return True
        return self._inner is None or self._failures > 1

    def _failed(self, fine_here: bool) -> None:
        """Put back what an attempt that failed somewhere has changed here."""
        self._staged = None
        if fine_here:
            self._troubles += 1
            self._problem = "another proc of this replica failed"
        logger.warning("replica %d tries again: %s", self.replica, self._problem)
        if self._inner is not None:
            # torchft would raise the same error for ever, and has taken the peer's round number already.
            self._inner._quorum_future = None

    def _pause(self) -> None:
        """Before the next try. Who cannot take part leaves for a while, each time longer, so that the others can."""
        pause_s = _PAUSE_S
        if self._troubles > 2:
            self._close()
            pause_s = min(_LONGEST_PAUSE_S, self.config.heartbeat_timeout_s * 2 ** (self._troubles - 2))
        time.sleep(pause_s)

    # ---- one attempt ---------------------------------------------------------------------------------------------

    def _opened(self, reopen: bool) -> bool:
        if reopen:
            self._open()
        return True

    def _quorum(self, deadline: float, reopen: bool) -> bool:
        """One quorum. The state of a peer that is ahead is fetched and staged, and taken over by all procs or none."""
        self._opened(reopen)
        inner, self._staged = self._manager, None
        inner.load_state_dict({"step": self._rounds["step"], "batches_committed": 0})
        if self._unfinished:
            # The sync was left. Members that are still in it must fail now, and all make a new group: in the old one
            # their collectives would meet others of ours, at which gloo ends the process.
            inner._commit_failures += 1
            leave(inner)
            self._unfinished = False
        wait_s = max(1.0, min(self.config.quorum_s, deadline - time.monotonic()))
        pending: Future[None] = Future()
        ask = partial(inner.start_quorum, timeout=timedelta(seconds=wait_s))
        threading.Thread(target=_run, args=(ask, pending), daemon=True).start()
        while True:
            with contextlib.suppress(TimeoutError):
                error = pending.exception(_LOOK_S)
                if error is None:
                    self._unfinished = True
                    return self._met(inner)
                self._problem = f"{type(error).__name__}: {error}"
                # Who merely waited goes on with the same manager: a new one would meet its own registration, and take
                # it for a peer.
                self._failures += not isinstance(error, TimeoutError)
                return False
            if (self._tether is not None and self._tether.broken) or self._procs.called_off():
                # Its call cannot be ended from here, so it is left behind together with its manager.
                self._procs.call_off() if self._procs.leads else None
                self._problem, self._lost_lighthouse = f"the lighthouse at {self._lighthouse} is gone", True
                self._close()
                return False

    def _met(self, inner: Manager) -> bool:
        """Whether the quorum that came about is one to go on with."""
        if inner.num_participants() < self._members and time.monotonic() < self._no_fewer_until:
            self._problem = "the new lighthouse does not know all replicas yet"
            return False
        if inner.errored() is not None:  # it could not connect to the members, or not fetch a state
            self._failures += 1
            self._troubles += 1
            self._problem = told(inner)
            return False
        weight, history = self._weight, self._rounds["history"]
        if self._staged is not None:
            weight, history = 0.0, self._staged["history"]
        self._factor, histories = introduce(inner, weight, history)
        if inner.errored() is not None:
            self._failures += 1
            self._problem = told(inner)
            return False
        if history != prevailing(histories):
            self._rounds["step"] -= 1  # behind, so that the next quorum heals it
        if len(set(histories)) > 1:
            self._problem = f"{len(histories)} replicas met with equal rounds and different pasts, the fewer will heal"
            return False
        return True

    @property
    def _manager(self) -> Manager:
        if self._inner is None:
            raise RuntimeError("the manager is closed: open another one")
        return self._inner

    def _open(self) -> None:
        """A new manager underneath, that stands at the same round. Proc 0's comes first: the others' connect to it."""
        self._close()
        store = None
        try:
            if self._procs.leads:
                self._tether = Tether(self._lighthouse, self.config.connect_s)
                store = open_store(self.config.host, self.config.collective_s)
                self._inner = self._made(store.port)
        finally:
            port = self._procs.tell((store.port if self._inner and store else 0) if self._procs.leads else None)
        if not port:
            raise ConnectionError("proc 0 of this replica could not open its manager")
        self._store = store
        if self._inner is None:
            self._inner = self._made(port)
        self._failures, self._unfinished = 0, False
        if self._lost_lighthouse:
            # In this time even a replica in the midst of its inner steps has told the new one that it lives: torchft
            # tries to connect ever more rarely, up to a third of connect_s apart.
            known_s = self.config.heartbeat_timeout_s + self.config.connect_s / 2
            self._lost_lighthouse, self._no_fewer_until = False, time.monotonic() + known_s

    def _made(self, port: int) -> Manager:
        config, collective = self.config, timedelta(seconds=self.config.collective_s)
        with serving_on(config.host):
            inner = Manager(
                pg=HostGloo(config.host, collective),
                load_state_dict=None, state_dict=None,
                min_replica_size=config.min_replicas, use_async_quorum=False, init_sync=False,
                timeout=collective,
                quorum_timeout=timedelta(seconds=config.quorum_s),
                connect_timeout=timedelta(seconds=config.connect_s),
                heartbeat_interval=timedelta(seconds=config.heartbeat_s),
                rank=self._procs.rank, world_size=self._procs.size,
                store_addr=config.host, store_port=port,
                lighthouse_addr=self._lighthouse, replica_id=f"replica_{self.replica}", hostname=config.host,
                checkpoint_transport=StateTransport(config.host, config.collective_s),
            )  # fmt: skip
        inner.register_state_dict_fn("replica", lambda state: self._stage(inner, state), self._saved)
        return inner

    def _close(self) -> None:
        inner, self._inner, self._store = self._inner, None, None
        tether, self._tether = self._tether, None
        if inner is not None:
            inner.shutdown(wait=False)
            leave(inner)
        if tether is not None:
            tether.close()

    # ---- healing -------------------------------------------------------------------------------------------------

    def _saved(self) -> dict[str, Any]:
        return {"history": self._rounds["history"], "parts": {key: save() for key, (_, save) in self._states.items()}}

    def _stage(self, inner: Manager, state: dict[str, Any]) -> None:
        if inner is self._inner:  # not one that was left behind
            self._staged = state

    def _take_over(self, state: dict[str, Any]) -> None:
        parts = state["parts"]
        try:
            if parts.keys() != self._states.keys():
                raise ValueError(f"the peer's state has the parts {sorted(parts)}, here are {sorted(self._states)}")
            for key, (load, _) in self._states.items():
                load(parts[key])
        except Exception as error:
            raise HealingError(
                f"replica {self.replica} could not take over a peer's state ({type(error).__name__}: {error}): start "
                "it again with the same configuration and version as its peers"
            ) from error
        finally:
            self._staged = None
        self._rounds = {"step": self._manager.current_step(), "history": state["history"]}


class Exchange:
    """An all-reduce under way."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> bool:
        """Returns when it is over, one way or the other: `should_commit` tells. Bounded by `config.collective_s`."""
        self._future.result()
        return True


def _run(function: Callable[[], None], future: Future[None]) -> None:
    try:
        function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
