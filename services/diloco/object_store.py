"""A manager of the outer loop for replicas with no network between them: they meet in a store of files.

`ObjectStoreManager` has the surface of torchft's manager that DiLoCo uses, over `ObjectStoreAllReduce`. DiLoCo asks for
one all-reduce per parameter; they are collected and make one file per round and replica, written when the first is
waited for, or when the next inner step begins (a delayed sync): then it moves in a thread beside the training.

Healing. A replica is behind when the store shows a round that it has not applied: after a restart, after a long stop,
or when it came too late to a round. In `start_quorum` it then

1. leaves the mark rejoin-RANK in the folder of the round that its peers come to next, and waits for them there, so that
   from then on it is in step with them;
2. a peer that comes to that round and sees the mark writes its state (what the registered functions return) beside it,
   before its own contribution or while it waits for others: the state of the last commit, in whatever inner steps the
   peers were, and at the price of one upload only when somebody needs it;
3. the replica loads it, leaves the mark healed-RANK, which counts for `min_replicas`, and takes the round's average
   like everybody else, with no contribution of its own.

So it heals with its peers' next round, or the one after if they were just deciding on it (where rounds are longer than
`poll_s`); TimeoutError after `give_up_s`. When every replica was restarted from a checkpoint there is nobody to heal
from: all of them wait, see that of each other, and begin a new line of rounds, in which those with older checkpoints
heal from those with newer.

hf and gs were not tried against the real services; s3 against a server of its protocol.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from services.diloco.config import DilocoConfig
from services.diloco.object_store_files import MalformedFileError
from services.diloco.object_store_folders import Look, RoundFolders
from services.diloco.object_store_rounds import Average, LeftBehindError, ObjectStoreAllReduce

__all__ = ["LeftBehindError", "MalformedFileError", "ObjectStoreAllReduce", "ObjectStoreManager"]

logger = logging.getLogger(__name__)

State = Any  # of tensors and plain values
CLOSE_S = 10.0


class ObjectStoreManager:
    """Replica `rank` of the `world_size` that share `config.uri`, as DiLoCo drives it; see the module.

    `left_out` counts the rounds that this replica contributed to and that do not contain it, because it came too late.
    ValueError for a missing uri, a rank out of range or contradictory times; for the store's errors see `Store`.
    """

    _use_async_quorum = False

    def __init__(self, config: DilocoConfig, rank: int, world_size: int) -> None:
        if config.uri is None and world_size > 1:
            raise ValueError("transport object_store needs diloco.uri: a path or URL that all replicas can write to")
        self._rounds = ObjectStoreAllReduce(
            config.uri or "",
            rank,
            world_size,
            min_replicas=config.min_replicas,
            grace_s=config.grace_s,
            first_grace_s=config.first_grace_s,
            timeout_s=config.give_up_s,
            poll_s=config.poll_s,
            keep_rounds=config.keep_rounds,
        )
        self.rank = rank
        self.left_out = 0
        self._functions: dict[str, tuple[Callable[[State], None], Callable[[], State]]] = {}
        self._weight = 1.0
        self._participants = 0
        self._contributed = self._served = 0  # the last rounds that this replica did so in
        self._sync = _Sync(self._weight)

    def register_state_dict_fn(self, key: str, load: Callable[[State], None], save: Callable[[], State]) -> None:
        """`save` returns tensors and plain values; `load` takes them when this replica heals, in registered order."""
        if key in self._functions:
            raise ValueError(
                f"state functions {key!r} are registered already: give every part of the state its own key"
            )
        self._functions[key] = (load, save)

    def allow_state_dict_read(self) -> None:
        """The state is read on the thread that calls the manager only, so it is never read in the middle of a step."""

    def disallow_state_dict_read(self) -> None:
        """An inner step begins: a sync that is applied later moves beside it."""
        if self._sync.tensors and self._sync.thread is None:
            self._launch()

    def contribute(self, weight: float) -> None:
        """What the rounds that begin from now on count this replica for. ValueError unless finite and not negative."""
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weight {weight} of a contribution: give a finite number that is not negative")
        self._weight = weight

    def start_quorum(self, limit_s: float | None = None) -> None:
        """Begin the next round; heals here when the others are ahead.

        TimeoutError when that takes longer than `limit_s`, or `give_up_s`; another call goes on with it.
        """
        self._sync.join(self._rounds.timeout_s)
        self._sync = _Sync(self._weight)
        folders = self._rounds.folders
        if folders is None:
            return
        folders.line = folders.last_line()
        ahead = folders.newest()
        # A round that this replica contributed to, and did not get to apply, is taken up again instead.
        if ahead > max(self._rounds.rounds, self._contributed):
            self._heal(folders, ahead + 1, self._rounds.timeout_s if limit_s is None else limit_s)
        else:
            if self.rank in folders.look(self._rounds.rounds + 1).rejoining:
                folders.unmark(self._rounds.rounds + 1)
            self._serve()

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> _Work:
        """A work; once `wait()` returns the tensor (floating, any device) holds the average. All go in one file."""
        if should_quantize:
            raise ValueError("should_quantize is torchft's: set diloco.compression instead")
        if self._sync.thread is not None:
            raise RuntimeError("this round is under way: start_quorum comes before the next all-reduce")
        self._sync.tensors.append(tensor)
        return _Work(self)

    def should_commit(self) -> bool:
        """Whether the round's average is there, the same for everybody. False: the peers went on long ago."""
        if self._finished() is None:
            return False
        self._rounds.finish()
        return True

    def current_step(self) -> int:
        return self._rounds.rounds

    def newest_round(self) -> int:
        """The last round that the store shows to be over, if this replica is not further. From any thread."""
        if self._rounds.folders is None:
            return self.current_step()
        look = RoundFolders(self._rounds.folders.store)
        look.line = look.last_line()
        return max(self.current_step(), look.newest())

    def num_participants(self) -> int:
        """Of the last round; 0 before the first."""
        return self._participants

    def round_state(self) -> dict[str, int]:
        return {"round": self._rounds.rounds}

    def load_round_state(self, state: dict[str, int]) -> None:
        self._rounds.rounds = state["round"]

    def shutdown(self) -> None:
        """Leave. The files of the last rounds stay in the store, for those who still read them."""
        self._rounds.close()
        self._sync.join(CLOSE_S)

    # ---- a round on its way --------------------------------------------------------------------------------------

    def _launch(self) -> None:
        sync, number = self._sync, self._rounds.rounds + 1
        if not sync.follow:
            self._contributed = number
        sync.launch(lambda: self._rounds.collect(sync.tensors, sync.weight, follow=sync.follow))

    def _finished(self) -> Average | None:
        """The round's average, put into the tensors; None where it was over long ago. Heals others while it waits."""
        sync = self._sync
        if sync.applied:
            return sync.applied
        if sync.thread is None:
            self._launch()
        self._serve()
        while not sync.over.wait(self._rounds.poll_s):
            self._serve()
        match sync.result:
            case LeftBehindError() as error:
                logger.warning("replica %d: %s", self.rank, error)
                self._contributed = 0
                return None
            case Average() as average:
                self._apply(sync, average)
                return average
            case error:
                assert error is not None
                raise error

    def _apply(self, sync: _Sync, average: Average) -> None:
        with torch.no_grad():
            for tensor, averaged in zip(sync.tensors, average.tensors, strict=True):
                tensor.copy_(averaged)
        sync.applied = average
        self._participants = len(average.members)
        if not average.counted and not sync.follow:
            self.left_out += 1
            logger.warning(
                "replica %d came too late to round %d: its part of it is lost; a longer diloco.grace_s waits longer",
                self.rank,
                self._rounds.rounds + 1,
            )

    # ---- healing -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Write this replica's state for those who wait for it in this round, unless somebody did."""
        folders, number = self._rounds.folders, self._rounds.rounds + 1
        if folders is None or self._served == number:
            return
        look = folders.look(number)
        if look.states or not look.rejoining - look.healed - {self.rank}:
            return
        self._served = number
        state = {key: save() for key, (_, save) in self._functions.items()}
        try:
            folders.store.save(folders.path(number, f"state-{self.rank:04d}.pt"), state)
        except OSError as error:  # another replica may have more luck, or the next round
            logger.warning("replica %d could not give its state to %s: %s", self.rank, look.rejoining, error)

    def _heal(self, folders: RoundFolders, number: int, limit_s: float) -> None:
        """Wait for the peers in round `number`, or the one after if they decide on it unseen, and take their state."""
        end = time.monotonic() + limit_s
        while (state := self._state(folders, number, look := folders.look(number))) is None:
            if look.fixed:
                number += 1
                continue
            if self.rank not in look.rejoining:
                folders.mark(number, "rejoin")
            if look.nobody_else and len(look.rejoining) == self._rounds.world_size:
                folders.begin_line()
            if folders.last_line() > folders.line:
                return self.start_quorum(max(end - time.monotonic(), 0.0))
            if time.monotonic() > end:
                waiting = ", ".join(map(str, sorted(look.rejoining)))
                raise TimeoutError(
                    f"replica {self.rank} is at round {self._rounds.rounds} and {self._rounds.uri} at {number - 1}; "
                    f"nobody came to give it that state within {limit_s:g} s ({waiting} wait for it): "
                    "start a replica that has it, or all that are missing, or raise diloco.give_up_s"
                )
            self._rounds.pause()
        if state.keys() != self._functions.keys():
            raise RuntimeError(
                f"the state in round {number} of {self._rounds.uri} has the parts {sorted(state)}, replica {self.rank} "
                f"has {sorted(self._functions)}: start all replicas with the same configuration and version"
            )
        for key, (load, _) in self._functions.items():
            load(state[key])
        logger.info("replica %d healed from round %d to %d", self.rank, self._rounds.rounds, number - 1)
        self._rounds.rounds = number - 1
        self._sync.follow = True
        folders.mark(number, "healed")

    def _state(self, folders: RoundFolders, number: int, look: Look) -> dict[str, State] | None:
        for name in look.states:
            try:
                state = folders.store.load(folders.path(number, name))
            except FileNotFoundError:
                continue
            except MalformedFileError as error:
                logger.warning("replica %d cannot heal from it: %s", self.rank, error)
                continue
            if isinstance(state, dict):
                return state
        return None


class _Sync:
    """The tensors of one round and, once it is launched, the thread that averages them."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.tensors: list[torch.Tensor] = []
        self.follow = False
        self.thread: threading.Thread | None = None
        self.over = threading.Event()
        self.result: Average | BaseException | None = None
        self.applied: Average | None = None

    def launch(self, collect: Callable[[], Average]) -> None:
        def run() -> None:
            try:
                self.result = collect()
            except BaseException as error:  # raised where it is waited for
                self.result = error
            finally:
                self.over.set()

        self.thread = threading.Thread(target=run, name="object-store-round", daemon=True)
        self.thread.start()

    def join(self, timeout_s: float) -> None:
        if self.thread is not None:
            self.thread.join(timeout_s)


class _Work:
    """What DiLoCo waits for; the first of a round to be waited for waits for all."""

    def __init__(self, manager: ObjectStoreManager) -> None:
        self._manager = manager

    def wait(self, timeout: object = None) -> bool:
        """Whether the tensor holds the average. TimeoutError names the replicas that did not come in `give_up_s`."""
        return self._manager._finished() is not None
