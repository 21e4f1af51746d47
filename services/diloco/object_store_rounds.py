"""Averaging among replicas that share nothing but a store of files.

Every replica writes its contribution and looks until those that it awaits are there, or until `grace_s` has passed
since there were enough. Then it proposes what it saw as MEMBERS; the first proposal stands, and everybody reads exactly
those files and averages them in the order of ranks, by multiplications and additions of single elements, so the results
are equal bit by bit, on every machine. A replica that is not in MEMBERS takes the same average: its own contribution to
that round is lost, its parameters are not.

Awaited are the replicas that took part in the round before. One that died costs the others one grace window, not one
per round; when it is back it is behind, and is awaited again once it has healed.

A round's files are deleted `keep_rounds` rounds later. Who still waits in it finds that out (`LeftBehindError`), and
heals.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from services.diloco.object_store_files import MalformedFileError, Store
from services.diloco.object_store_folders import CONTRIBUTION, MEMBERS, Look, RoundFolders, rank_of

logger = logging.getLogger(__name__)


class LeftBehindError(RuntimeError):
    """The peers are past this round, and its files are gone."""


@dataclass(frozen=True)
class Average:
    """What a round came to. `counted`: whether a contribution of this replica is in it."""

    members: list[int]
    tensors: list[torch.Tensor]
    counted: bool


@dataclass(frozen=True)
class _Contribution:
    weight: float
    tensors: list[torch.Tensor]


class ObjectStoreAllReduce:
    """The (weighted) average of tensors over `world_size` replicas, through the files under `uri`; see the module.

    `average` is a collective: every replica calls it once per round with tensors of the same number, shapes and dtypes.
    It needs `min_replicas` (unset: all) and raises TimeoutError naming who did not come within `timeout_s`. In the
    first round that a store sees, the grace is `first_grace_s`. `rounds` counts the rounds done, and may be set: where
    a replica that resumes or heals goes on. With a `world_size` of 1 nothing is opened or written, values pass through.

    A replica holds the contributions of a round in memory: members times the bytes of one.

    ValueError for a rank out of range and for contradictory numbers; for the store's errors see `Store`.
    """

    def __init__(
        self,
        uri: str,
        rank: int,
        world_size: int,
        *,
        min_replicas: int | None = None,
        grace_s: float = 30.0,
        first_grace_s: float = 300.0,
        timeout_s: float = 600.0,
        poll_s: float = 0.5,
        keep_rounds: int = 3,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"rank {rank} is not among {world_size} replicas: ranks go from 0 to {world_size - 1}; "
                "set diloco.first_rank and diloco.world_size so that every replica has its own"
            )
        if min_replicas is not None and not 1 <= min_replicas <= world_size:
            raise ValueError(f"min_replicas {min_replicas} of {world_size} replicas: set it between 1 and {world_size}")
        if keep_rounds < 2:
            raise ValueError(
                f"keep_rounds {keep_rounds}: a round is read while the next is written, so keep at least 2"
            )
        self.min_replicas = min_replicas or world_size
        longest = max(grace_s, first_grace_s)
        if self.min_replicas < world_size and longest >= timeout_s:
            raise ValueError(
                f"a round gives up after {timeout_s:g} s, before the grace of {longest:g} s is over: set grace_s and "
                "first_grace_s below timeout_s (diloco.give_up_s)"
            )
        self.uri, self.rank, self.world_size = uri, rank, world_size
        self.grace_s, self.first_grace_s, self.timeout_s, self.poll_s = grace_s, first_grace_s, timeout_s, poll_s
        self.keep_rounds = keep_rounds
        self.rounds = 0
        self.folders = RoundFolders(Store(uri, rank, world_size)) if world_size > 1 else None
        self._mine: set[str] = set()  # contributions written by this object, to the round it is in
        self._closed = threading.Event()

    def average(self, tensors: Sequence[torch.Tensor], weight: float = 1.0) -> list[int]:
        """Put the average of the next round into `tensors` (floating, any device); the ranks that it is made of."""
        result = self.collect(tensors, weight)
        for tensor, averaged in zip(tensors, result.tensors, strict=True):
            tensor.copy_(averaged)
        self.finish()
        return result.members

    def collect(self, tensors: Sequence[torch.Tensor], weight: float = 1.0, *, follow: bool = False) -> Average:
        """The average of round `rounds + 1`, on the CPU. With `follow` this replica adds nothing and takes it as it is.

        A second call for one round (the first one ran out of time) takes what the first one wrote, if that was counted.
        LeftBehindError when the round was over long ago.
        """
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weight {weight} of a contribution: give a finite number that is not negative")
        own = [_portable(tensor) for tensor in tensors]
        folders = self.folders
        if folders is None:
            return Average([self.rank], own, counted=True)
        number, begin = self.rounds + 1, time.monotonic()
        awaited, grace = self._awaited(number)
        loaded: dict[str, _Contribution] = {}
        enough_since: float | None = None
        look = folders.look(number)
        if not follow and not look.fixed:
            self._contribute(number, own, weight, loaded)
            look = folders.look(number)
        while not look.fixed:
            came = self._valid(number, look, own, loaded)
            now = time.monotonic()
            if came and len(came.keys() | look.healed) >= self.min_replicas:
                enough_since = now if enough_since is None else enough_since
                complete = awaited <= came.keys() | look.rejoining | look.healed
                if (complete and look.nobody_asks) or now - enough_since >= grace:
                    self._propose(number, came)
                    break
            if follow and not came and now - begin > grace:
                # Who healed this replica died before it contributed; somebody has to open the round.
                self._contribute(number, own, 0.0, loaded)
                follow = False
            if now - begin > self.timeout_s:
                raise TimeoutError(self._missing(number, came.keys() | look.healed))
            self._still_open(number)
            self.pause()
            look = folders.look(number)
        members = self._members(number)
        averaged = self._mean(number, members, own, loaded)
        if self._superseded() or next(iter(folders.numbers()), 0) >= number + self.keep_rounds:
            # The round's first MEMBERS may be deleted already, and the one just read a second that nobody else knows.
            raise self._left_behind(number)
        return Average(sorted(members), averaged, counted=bool(self._mine & set(members.values())))

    def finish(self) -> None:
        """The round's average is in use: go on to the next, and let the lowest rank of the last delete old ones."""
        self.rounds += 1
        self._mine.clear()
        if self.folders is not None:
            contributions = self.folders.look(self.rounds).contributions
            if self.rank == min(contributions, default=self.rank):
                self.folders.remove_until(self.rounds - self.keep_rounds)

    def pause(self) -> None:
        """Until the next look. RuntimeError once this replica has left."""
        if self._closed.wait(self.poll_s):
            raise RuntimeError(f"replica {self.rank} left {self.uri} in the middle of round {self.rounds + 1}")

    def close(self) -> None:
        """Leave: whoever waits in this object stops. Idempotent."""
        self._closed.set()

    def _contribute(
        self, number: int, tensors: list[torch.Tensor], weight: float, loaded: dict[str, _Contribution]
    ) -> None:
        assert self.folders is not None
        name = self.folders.new_contribution()
        value = {"weight": float(weight), "tensors": tensors}
        self.folders.store.save(self.folders.path(number, name), value)
        self._mine.add(name)
        loaded[name] = _Contribution(float(weight), tensors)  # what the others will read, so it need not be read here

    def _awaited(self, number: int) -> tuple[set[int], float]:
        """Who may still come to a round, and for how long it is worth waiting once there are enough."""
        assert self.folders is not None
        before = self.folders.look(number - 1)
        took_part = before.contributions.keys() | before.healed
        return (took_part, self.grace_s) if took_part else (set(range(self.world_size)), self.first_grace_s)

    def _valid(
        self, number: int, look: Look, own: list[torch.Tensor], loaded: dict[str, _Contribution]
    ) -> dict[int, str]:
        """The newest contribution of each rank that can be read; a broken one counts as not there yet."""
        came = {}
        for rank, names in look.contributions.items():
            for name in names:
                try:
                    if name not in loaded:
                        loaded[name] = self._load(number, name, own)
                    came[rank] = name
                    break
                except MalformedFileError as error:
                    logger.warning("replica %d does not count in round %d: %s", rank, number, error)
                except FileNotFoundError:
                    continue
        return came

    def _load(self, number: int, name: str, own: list[torch.Tensor]) -> _Contribution:
        assert self.folders is not None
        store, path, rank = self.folders.store, self.folders.path(number, name), rank_of(name)
        try:
            value = store.load(path)
        except MalformedFileError as error:
            raise MalformedFileError(f"contribution of replica {rank}: {error}") from error
        match value:
            case {"weight": float() as weight, "tensors": [*tensors]} if weight >= 0 and all(
                isinstance(tensor, torch.Tensor) for tensor in tensors
            ):
                pass
            case _:
                raise MalformedFileError(f"{store.where(path)} of replica {rank} holds no weight and tensors")
        mine, theirs = _shapes(own), _shapes(tensors)
        if mine != theirs:
            raise RuntimeError(
                f"{store.where(path)}: replica {rank} brings {theirs} and replica {self.rank} {mine}; give all "
                "replicas the same model, fragments and compression, and every run a uri of its own"
            )
        return _Contribution(weight, tensors)

    def _propose(self, number: int, came: dict[int, str]) -> None:
        assert self.folders is not None
        text = json.dumps({"members": {str(rank): came[rank] for rank in sorted(came)}})
        self.folders.store.put_if_absent(self.folders.path(number, MEMBERS), text.encode())

    def _members(self, number: int) -> dict[int, str]:
        """The files that a round averages, by rank, in order."""
        assert self.folders is not None
        store, path = self.folders.store, self.folders.path(number, MEMBERS)
        value = store.read_json(path)
        if value is None:
            raise self._left_behind(number)
        names: dict[str, str] = value.get("members", {}) if isinstance(value, dict) else {}
        well_formed = isinstance(names, dict) and all(
            isinstance(name, str) and CONTRIBUTION.fullmatch(name) and str(rank_of(name)) == rank
            for rank, name in names.items()
        )
        if not names or not well_formed:
            raise MalformedFileError(f"{store.where(path)} names no members: {value!r}; another program wrote it")
        return {int(rank): names[rank] for rank in sorted(names, key=int)}

    def _mean(
        self, number: int, members: dict[int, str], own: list[torch.Tensor], loaded: dict[str, _Contribution]
    ) -> list[torch.Tensor]:
        """sum(weight * tensor) / sum(weight) over the members, in their order; a plain mean where all weigh nothing.

        The weights are divided by their sum first, so that one member's average is its contribution exactly. Products
        and sums are separate operations: fused ones round differently on different machines.
        """
        try:
            parts = [loaded.get(name) or self._load(number, name, own) for name in members.values()]
        except FileNotFoundError as error:
            raise self._left_behind(number) from error
        total = math.fsum(part.weight for part in parts)
        shares = [part.weight / total if total > 0 else 1 / len(parts) for part in parts]
        averaged = []
        for index, tensor in enumerate(own):
            dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            result = parts[0].tensors[index].to(dtype) * shares[0]
            for part, share in zip(parts[1:], shares[1:], strict=True):
                result += part.tensors[index].to(dtype) * share
            averaged.append(result)
        return averaged

    def _still_open(self, number: int) -> None:
        """LeftBehindError when the others are in later rounds, or another line, and this one has no members."""
        assert self.folders is not None
        later = next(iter(self.folders.numbers()), 0) > number
        passed = later and self.folders.newest() >= number and not self.folders.look(number).fixed
        if passed or self._superseded():
            raise self._left_behind(number)

    def _superseded(self) -> bool:
        """Whether the others were all restarted, and began a new line of rounds."""
        return self.folders is not None and self.folders.last_line() > self.folders.line

    def _left_behind(self, number: int) -> LeftBehindError:
        return LeftBehindError(
            f"round {number} in {self.uri} is over and its files are gone: the others are ahead; heal, and raise "
            "diloco.keep_rounds if that happens often"
        )

    def _missing(self, number: int, came: Set[int]) -> str:
        missing = ", ".join(str(rank) for rank in range(self.world_size) if rank not in came)
        return (
            f"round {number} in {self.uri}: of {self.world_size} replicas {missing} did not come within "
            f"{self.timeout_s:g} s, and it takes {self.min_replicas}; start the missing ones, or lower "
            "diloco.min_replicas, or raise diloco.give_up_s"
        )


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU with no more storage than it needs: torch.save writes all of a storage."""
    tensor = tensor.detach().cpu().contiguous()
    if not tensor.is_floating_point():
        raise TypeError(f"a tensor of {tensor.dtype} cannot be averaged: give floating-point tensors")
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _shapes(tensors: list[torch.Tensor]) -> str:
    """Number, shapes and dtypes, short enough for a message; equal for equal lists."""
    kinds = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors]
    text = ", ".join(kinds)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{len(kinds)} tensors ({text if len(text) < 80 else text[:80] + '...'}; {digest})"
