"""Versioned snapshots of the policy: the trainer publishes, readers pull when they are ready.

    trainer                              generator, teacher
    publish(v) ──copy──▶ free slot       lease(newer_than) ──▶ WeightsRef(v, lease id)
                 then   current = slot   pull(ref): read ─▶ checksum ─▶ tensors
                                         release(lease id)

Each slot is one region, registered once. A slot is in one of three states: *current* (leases are given on it),
*retired* (its readers finish), *free*. A publish writes only into a slot that is neither current nor leased, and makes
it current only after every byte and the checksum are there, so a failed publish leaves the old version in use. A reader
that outlives its lease finds another checksum and learns that its version is gone; it never gets a mixture.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict, Field

from mesh.messages import TensorSpec, WeightsRef
from services.weights.checksum import checksum
from services.weights.region import Region, RegionError, Via, read_region

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_ALIGNMENT = 64  # a cache line, and enough for every dtype
_logger = logging.getLogger(__name__)


class WeightsConfig(BaseModel):
    """How weights travel from the trainer to its readers."""

    model_config = ConfigDict(extra="forbid")

    slots: int = Field(
        default=2, ge=2, description="Snapshots kept in memory: the current version and those still being read."
    )
    max_lease_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds a reader may take for one pull; a publish waits at most that long for it.",
    )
    block_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds without one RDMA block after which the owner of the weights counts as dead.",
    )
    attempts: int = Field(default=3, ge=1, description="Pulls tried before the reader stays on the version it has.")
    retry_pause_s: float = Field(default=0.2, ge=0, description="Seconds between two attempts; doubled each time.")
    via: Via = Field(
        default="auto", description='"auto": shared memory on one host, else RDMA; "shm" or "rdma" force one.'
    )


class VersionGone(RuntimeError):
    """The version was overwritten while it was read."""


def flat_layout(named_tensors: NamedTensors) -> list[TensorSpec]:
    """Where each tensor lies in a flat buffer, in the given order, 64-byte aligned.

    Tied tensors (the same view of the same storage) are listed once, under their first name: the reader's model ties
    the others itself. Raises ValueError for sparse or quantized tensors and when there is nothing to lay out.
    """
    return [spec for spec, _ in _laid_out(named_tensors)]


def views(flat: torch.Tensor, specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """The tensors inside a flat uint8 buffer, by name, without a copy."""
    return {
        spec.name: flat[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in specs
    }


@dataclass(slots=True)
class _Slot:
    region: Region
    version: int = -1
    checksum: int = 0
    leases: dict[str, float] = field(default_factory=dict)  # lease id -> the clock's time at which it expires


class SnapshotPublisher:
    """The owner's side: `slots` flat regions, of which one is the current version.

    Every method is called from one event loop. Made inside a Monarch actor its regions are registered with RDMA.
    """

    def __init__(self, named_tensors: NamedTensors, config: WeightsConfig | None = None) -> None:
        """Lays the regions out for these tensors, whose values are not read. ValueError as in `flat_layout`."""
        self.config = config or WeightsConfig()
        self.specs = flat_layout(named_tensors)
        nbytes = self.specs[-1].offset + max(self.specs[-1].nbytes, 1)
        self._slots = [_Slot(Region(nbytes)) for _ in range(self.config.slots)]
        self._current: _Slot | None = None
        self._publishing = asyncio.Lock()
        self._copying = threading.Lock()
        self._lease_ended = asyncio.Event()
        self._published = asyncio.Event()
        self._closed = False

    @property
    def version(self) -> int | None:
        """The current version; None before the first."""
        return self._current.version if self._current else None

    async def publish(self, version: int, named_tensors: NamedTensors) -> None:
        """Copy the tensors and make them the current version. They must not change before this returns.

        Waits for readers of the slot it needs, at most `max_lease_s`. Raises ValueError when the version does not
        increase or the tensors differ from the layout, RuntimeError after `close`; the old version then stays current.
        """
        async with self._publishing:
            if self._closed:
                raise RuntimeError("this publisher is closed: make a new one to publish again")
            if self._current and version <= self._current.version:
                raise ValueError(f"version {version} does not follow {self._current.version}: versions must increase")
            laid_out = _laid_out(named_tensors)
            self._check_layout([spec for spec, _ in laid_out])
            slot = await self._writable_slot()
            found = await asyncio.to_thread(self._copy, slot.region.tensor, [tensor for _, tensor in laid_out])
            # Only now, with every byte in place, does the version advance.
            slot.version, slot.checksum = version, found
            self._current = slot
            self._published.set()
            self._published = asyncio.Event()

    def lease(self, newer_than: int) -> WeightsRef | None:
        """The current version with a read lease if it is newer, else None. Give the lease back with `release`."""
        slot = self._current
        if slot is None or slot.version <= newer_than or self._closed:
            return None
        lease_id = secrets.token_hex(8)
        slot.leases[lease_id] = time.monotonic() + self.config.max_lease_s
        return WeightsRef(slot.version, slot.region.ref(), self.specs, slot.checksum, lease_id)

    async def lease_newer(self, newer_than: int, wait_s: float) -> WeightsRef | None:
        """As `lease`, but waits up to `wait_s` for a newer version."""
        deadline = time.monotonic() + wait_s
        while (ref := self.lease(newer_than)) is None and (left := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._published.wait(), left)
            except TimeoutError:
                return None
        return ref

    def release(self, lease_id: str) -> None:
        """End a lease. Unknown and expired ids are ignored."""
        for slot in self._slots:
            slot.leases.pop(lease_id, None)
        self._lease_ended.set()

    def readers(self) -> int:
        """Leases that are neither released nor expired."""
        now = time.monotonic()
        return sum(expires > now for slot in self._slots for expires in slot.leases.values())

    async def close(self) -> None:
        """Free the regions; reads that are under way fail or end well. Idempotent."""
        self._closed = True
        async with self._publishing:
            self._current = None
            for slot in self._slots:
                await slot.region.close()

    async def _writable_slot(self) -> _Slot:
        """A slot that is not current and has no live lease. New leases are given on the current slot only, so the wait
        ends with the last of those that exist."""
        while True:
            now = time.monotonic()
            retired = [slot for slot in self._slots if slot is not self._current]
            for slot in retired:
                slot.leases = {lease_id: expires for lease_id, expires in slot.leases.items() if expires > now}
                if not slot.leases:
                    return slot
            next_expiry = min(expires for slot in retired for expires in slot.leases.values())
            self._lease_ended.clear()
            try:
                await asyncio.wait_for(self._lease_ended.wait(), next_expiry - now)
            except TimeoutError:
                _logger.warning("a reader kept its lease for %g s: its version is overwritten", self.config.max_lease_s)

    def _copy(self, flat: torch.Tensor, tensors: list[torch.Tensor]) -> int:
        # A publish that was cancelled leaves its thread copying; the lock keeps the next one from writing beside it.
        with self._copying:
            for target, tensor in zip(views(flat, self.specs).values(), tensors, strict=True):
                target.copy_(tensor.detach())
            return checksum(flat)

    def _check_layout(self, specs: list[TensorSpec]) -> None:
        if specs == self.specs:
            return
        wanted, given = ({(s.name, s.shape, s.dtype) for s in side} for side in (self.specs, specs))
        what = (
            "their order differs"
            if wanted == given
            else (f"missing {sorted(wanted - given)[:3]}, unexpected {sorted(given - wanted)[:3]}")
        )
        raise ValueError(
            f"the tensors do not fit this publisher's layout: {what}; make a new publisher for a new model"
        )


class SnapshotReader:
    """The reader's side: one flat buffer of its own, filled anew by every pull."""

    def __init__(self, config: WeightsConfig | None = None) -> None:
        self.config = config or WeightsConfig()
        self.last_via = ""  # "shm" | "rdma": the way the last pull went
        self._flat: torch.Tensor | None = None

    async def pull(self, ref: WeightsRef) -> dict[str, torch.Tensor]:
        """The tensors of one version, by name: views into this reader's buffer.

        The next pull overwrites them: load them into the model before it. Raises VersionGone when the version was
        overwritten during the read, RegionError when the bytes cannot be had; tensors of earlier pulls are then void.
        """
        # The buffer is given back only after success: a late RDMA block may still be written to one that failed.
        flat, self._flat = self._flat, None
        if flat is None or flat.numel() != ref.region.nbytes:
            flat = torch.empty(ref.region.nbytes, dtype=torch.uint8)
        self.last_via = await read_region(ref.region, flat, timeout_s=self.config.block_timeout_s, via=self.config.via)
        if await asyncio.to_thread(checksum, flat) != ref.checksum:
            raise VersionGone(
                f"version {ref.version} was overwritten while it was read: its lease {ref.lease_id!r} ended first. "
                "Take the newest version; if that happens often, raise weights.max_lease_s or weights.slots"
            )
        self._flat = flat
        return views(flat, ref.specs)


async def pull_newest(
    reader: SnapshotReader,
    lease: Callable[[int], Awaitable[WeightsRef | None]],
    release: Callable[[str], Awaitable[None]],
    newer_than: int,
) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Lease, pull, release; the version and its tensors, or None when there is none newer than `newer_than`.

    A pull that fails is tried again with a new lease, `config.attempts` times in all; then its VersionGone or
    RegionError is raised, and the caller goes on with the version it has. `lease` and `release` bound their own waits;
    what `lease` raises goes through.
    """
    attempt = 0
    while True:
        attempt += 1
        ref = await lease(newer_than)
        if ref is None:
            return None
        try:
            return ref.version, await reader.pull(ref)
        except (VersionGone, RegionError) as error:
            if attempt == reader.config.attempts:
                raise
            _logger.warning("pull of version %d failed (attempt %d): %s", ref.version, attempt, error)
        finally:
            await _release_quietly(release, ref.lease_id)
        await asyncio.sleep(reader.config.retry_pause_s * 2 ** (attempt - 1))


async def _release_quietly(release: Callable[[str], Awaitable[None]], lease_id: str) -> None:
    try:
        await release(lease_id)
    except Exception as error:  # whatever the owner's actor raises: the lease ends by itself, the pull counts
        _logger.warning("lease %s was not released (%s); it expires by itself", lease_id, error)


def _laid_out(named_tensors: NamedTensors) -> list[tuple[TensorSpec, torch.Tensor]]:
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    found: list[tuple[TensorSpec, torch.Tensor]] = []
    seen: set[tuple[object, ...]] = set()
    offset = 0
    for name, tensor in pairs:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{name} is {tensor.layout}, quantized={tensor.is_quantized}: publish dense tensors only")
        identity = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if identity in seen:
            continue
        seen.add(identity)
        nbytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        found.append((TensorSpec(name, tuple(tensor.shape), dtype, offset, nbytes), tensor))
        offset = -(-(offset + nbytes) // _ALIGNMENT) * _ALIGNMENT
    if not found:
        raise ValueError("there is no tensor to lay out: pass the model's named_parameters() or state_dict()")
    return found
