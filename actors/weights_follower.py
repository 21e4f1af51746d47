"""How generators and the SDPO teacher keep up with the weights of the trainer that they follow."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from actors.following import followed
from mesh import roles
from mesh.binding import Binding
from services.tuning import Merger
from services.weights.config import WeightsConfig
from services.weights.plane import new_reader
from services.weights.reader import Pulled, pull_newest

PATIENCE_S = 2.0  # with a trainer that is gone: there may be another one to follow


class WeightsFollower:
    """Pulls a trainer's versions, one `newer` call at a time; `version` is the last one pulled, of `trainer`.

    Of several trainers it is follower `number`: see `actors.following`. Their versions are not comparable with one
    another. Whoever could not load what it pulled says so with `not_loaded`. `merge` is for trainers of an adapter,
    which is all that then travels: what comes out are weights of the model without one.
    """

    def __init__(
        self,
        trainers: Binding[Any],
        config: WeightsConfig | None = None,
        version: int = -1,
        merge: Merger | None = None,
        number: int = 0,
        replicas: int = 1,
    ) -> None:
        self._trainers, self._number, self._replicas = trainers, number, replicas
        self.trainer, self.version = self._followed(), version
        self.last = Pulled()  # what the last pull cost
        self._config, self._reader = config, new_reader(config)
        self._merge = merge
        self._life = self._life_of(self.trainer)
        self._newer_than = version
        self._before = (self.trainer, version, version)  # the last pull

    def _followed(self) -> str:
        return followed(self._number, self._replicas, self._trainers.names)

    def _life_of(self, trainer: str) -> tuple[str, tuple[int, ...]]:
        return trainer, self._trainers.only(trainer, PATIENCE_S).incarnations

    async def newer(self, wait_s: float) -> dict[str, torch.Tensor] | None:
        """The tensors of a newer version, which must be loaded before the next call; None when none came in time.

        Raises BindingError, VersionGone or RegionError; the next call tries again. ValueError for an adapter that does
        not fit `merge`.
        """
        trainer = self._followed()
        if (life := self._life_of(trainer)) != self._life:
            # Another trainer, or it stands at its last checkpoint again: its versions may be older than ours, and are
            # the right ones.
            self._life, self._newer_than = life, -1
        self._before = (self.trainer, self.version, self._newer_than)
        source = self._trainers.only(trainer)
        newest = await pull_newest(
            self._reader,
            lambda newer_than: source.call(roles.Trainer.weights, newer_than, wait_s),
            lambda lease_id: source.call(roles.Trainer.release_weights, lease_id, self._reader.last.nbytes),
            self._newer_than,
        )
        if newest is None:
            return None
        self.last = self._reader.last
        self.version, tensors = newest
        self.trainer, self._newer_than = trainer, self.version
        return tensors if self._merge is None else await asyncio.to_thread(self._merge, tensors)

    def not_loaded(self) -> None:
        """The last pull is not in use, so its version is asked for again.

        A load that was given up may still read the tensors: they stay as they are, and the next pull gets a buffer of
        its own.
        """
        self.trainer, self.version, self._newer_than = self._before
        self._reader = new_reader(self._config)
