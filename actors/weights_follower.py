"""How generators and the SDPO teacher keep up with the trainer's weights."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from mesh import roles
from mesh.binding import Binding
from services.tuning import Merger
from services.weights.config import WeightsConfig
from services.weights.plane import new_reader
from services.weights.reader import Pulled, pull_newest


class WeightsFollower:
    """Pulls the trainer's versions, one `newer` call at a time; `version` is the last one pulled.

    Whoever could not load what it pulled says so with `not_loaded`. `merge` is for a trainer of an adapter, which is
    all that then travels: what comes out are weights of the model without one.
    """

    def __init__(
        self,
        trainer: Binding[Any],
        config: WeightsConfig | None = None,
        version: int = -1,
        merge: Merger | None = None,
    ) -> None:
        self.version = version
        self.last = Pulled()  # what the last pull cost
        self._before = version  # the last pull
        self._config, self._trainer, self._reader = config, trainer, new_reader(config)
        self._merge = merge
        self._life = trainer.incarnations

    async def newer(self, wait_s: float) -> dict[str, torch.Tensor] | None:
        """The tensors of a newer version, which must be loaded before the next call; None when none came in time.

        Raises BindingError, VersionGone or RegionError; the next call tries again. ValueError for an adapter that does
        not fit `merge`.
        """
        if self._life != self._trainer.incarnations:
            # The trainer stands at its last checkpoint again: its versions are older than ours, and the right ones.
            self._life, self.version = self._trainer.incarnations, -1
        self._before = self.version

        newest = await pull_newest(
            self._reader,
            lambda newer_than: self._trainer.call(roles.Trainer.weights, newer_than, wait_s),
            lambda lease_id: self._trainer.call(roles.Trainer.release_weights, lease_id, self._reader.last.nbytes),
            self.version,
        )
        if newest is None:
            return None
        self.last = self._reader.last
        self.version, tensors = newest
        return tensors if self._merge is None else await asyncio.to_thread(self._merge, tensors)

    def not_loaded(self) -> None:
        """The last pull is not in use, so its version is asked for again.

        A load that was given up may still read the tensors: they stay as they are, and the next pull gets a buffer of
        its own.
        """
        self.version, self._reader = self._before, new_reader(self._config)
