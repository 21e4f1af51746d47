"""torchstore 0.1.2 beside the Monarch version in use, and the few of its calls that the weight plane makes.

The package was written for an earlier Monarch. What has to be different is here, as subclasses that any process can
import by name, so that nothing has to be patched in it:

- its controller mixes endpoints that are coroutines with some that are not, which Monarch refuses: all are coroutines;
- its own set-up keeps a controller per name in the driver's process, for ever, and wants all volumes in one mesh: here
  the controller and a volume per rank live in the trainer's procs, are reached by reference, and go when these do;
- which volume a process writes to is its rank, and no environment variable;
- importing it turns the root logger to INFO: that is undone by telling it that a limit which it wants is set already;
- over RDMA hardware it cannot read a part of a stored tensor: it is told to use messages.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import torch
from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import endpoint, this_proc

from services.weights.layout import Box
from services.weights.region import RegionError, in_monarch

_FRAME_LIMIT = "HYPERACTOR_CODEC_MAX_FRAME_LENGTH"
_was_set = os.environ.setdefault(_FRAME_LIMIT, "") != ""
from torchstore.client import LocalClient  # noqa: E402  after the variable that its import looks at
from torchstore.controller import Controller  # noqa: E402
from torchstore.storage_volume import StorageVolume  # noqa: E402
from torchstore.strategy import TorchStoreStrategy  # noqa: E402
from torchstore.transport import Pipe, Request, TensorSlice  # noqa: E402

if not _was_set:
    del os.environ[_FRAME_LIMIT]
os.environ["TORCHSTORE_RDMA_ENABLED"] = "0"  # looked up at every call

# What torchstore says of a tensor that it does not have, not all of, or of which a volume does not have its part.
_MISSING = ("Unable to locate", "only partially committed", "not found. ")
T = TypeVar("T")


class KeyGone(RuntimeError):
    """The store does not have this tensor, or not all of it (any more)."""


def _as_coroutine(method: Callable[..., T]) -> Callable[..., Awaitable[T]]:
    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> T:
        return method(self, *args, **kwargs)

    return call


class Volume(StorageVolume):
    """The memory of one rank. A class of this module, so that a process which gets one imports the rest of it too."""

    def __init__(self, rank: int) -> None:
        super().__init__(lambda: str(rank))


class Ranks(TorchStoreStrategy):
    """A volume per rank. Who writes is told its rank, and writes to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.volumes: dict[str, Any] = {}
        self.rank: int | None = None

    def select_storage_volume(self) -> tuple[Any, str]:
        return self.volumes[str(self.rank)], str(self.rank)

    def get_storage_volume(self, volume_id: str) -> Any:
        return self.volumes[volume_id]


class AsyncController(Controller):
    """Knows which volume has which part of which tensor, and the volumes of the ranks that took part so far."""

    def __init__(self) -> None:
        super().__init__()
        self.strategy, self.is_initialized = Ranks(), True

    @endpoint
    async def add_volume(self, rank: int, volume: Any) -> None:
        self.strategy.volumes[str(rank)] = volume


for _name, _endpoint in vars(Controller).items():
    if isinstance(_endpoint, EndpointProperty) and not inspect.iscoroutinefunction(_endpoint._method):
        setattr(AsyncController, _name, endpoint(_as_coroutine(_endpoint._method)))


def spawn_store() -> Any:
    """A new, empty store in the calling actor's proc; its controller, which others need to `connect`.

    RegionError outside of an actor.
    """
    if not in_monarch():
        raise RegionError("a store lives in the procs of a trainer's actor: call this in one of its endpoints")
    return this_proc().spawn("torchstore_controller", AsyncController)


class StoreClient:
    """A process's access to a store. Every call is bounded; RegionError says what did not answer."""

    def __init__(self, client: LocalClient) -> None:
        self._client = client

    @classmethod
    async def connect(cls, controller: Any, rank: int | None = None, limit_s: float = 60.0) -> StoreClient:
        """As reader; or, once, as the writer of this `rank`, whose volume is then made in the calling actor's proc."""
        what = "the controller of the store"
        if rank is not None:
            volume = this_proc().spawn("torchstore_volume", Volume, rank)
            await _bounded(volume.initialized, limit_s, "the volume of this rank")
            await _bounded(controller.add_volume.call_one(rank, volume), limit_s, what)
        strategy = await _bounded(controller.get_controller_strategy.call_one(), limit_s, what)
        strategy.rank = rank
        return cls(LocalClient(controller, strategy))

    async def put(self, key: str, box: Box, limit_s: float) -> None:
        """Store this rank's part of a tensor. The whole can be had once every part of its grid is stored."""
        local = box.tensor
        where = TensorSlice(box.start, box.place, box.full_shape, tuple(local.shape), box.grid)

        async def put() -> None:
            request = Request(tensor_val=local, tensor_slice=where)
            volume, volume_id = self._client.strategy.select_storage_volume()
            await Pipe(volume).put_to_storage_volume(key, request)
            await self._client._controller.notify_put.call_one(key, request.meta_only(), volume_id)

        await _bounded(put(), limit_s, f"the store, given {key},")

    async def get(self, key: str, into: torch.Tensor | None, limit_s: float) -> torch.Tensor:
        """The whole tensor; or `into`, filled: of a DTensor its local part, of which alone the data is fetched.

        KeyGone when the tensor is not there.
        """
        return await _bounded(self._client.get(key, into), limit_s, f"the store, asked for {key},")

    async def delete(self, key: str, limit_s: float) -> None:
        """Forget this rank's part of a tensor, also of one that the other ranks never stored. KeyGone without one."""
        volume, volume_id = self._client.strategy.select_storage_volume()

        async def delete() -> None:
            # The controller first, so that nobody is sent to a volume that does not have it any more.
            await self._client._controller.notify_delete.call_one(key, volume_id)
            await volume.delete.call_one(key)

        await _bounded(delete(), limit_s, f"the store, told to delete {key},")


async def _bounded(call: Awaitable[T], limit_s: float, what: str) -> T:
    try:
        return await asyncio.wait_for(call, limit_s)
    except TimeoutError:
        raise RegionError(f"{what} did not answer within {limit_s:g} s: its trainer is dead or cut off") from None
    except Exception as error:  # torchstore and Monarch raise whatever they met, inside of one another
        if any(phrase in str(error) for phrase in _MISSING):
            raise KeyGone(f"{what} does not have it") from error
        raise RegionError(f"{what} failed: {error}") from error
