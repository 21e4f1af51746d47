import asyncio
import os
import threading

import pytest
import torch

from services.weights import region as region_module
from services.weights.logits import LogitsConfig, LogitsGone, LogitsStore, read_logits


def rows_of(count: int, vocab: int = 50, base: float = 0.0) -> torch.Tensor:
    return torch.arange(count * vocab, dtype=torch.float32).view(count, vocab) + base


async def collect(ref, chunk_rows):
    return [(start, rows.clone()) async for start, rows in read_logits(ref, chunk_rows)]


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100])
def test_chunks_arrive_in_order_and_hold_exactly_the_rows(chunk_rows, files_left):
    async def scenario():
        store = LogitsStore()
        ref = await store.put(rows_of(7), [0, 3, 3, 7], teacher_version=5, hinted_accuracy=0.5)
        assert (ref.rows, ref.vocab, ref.dtype, ref.row_offsets) == (7, 50, "float32", [0, 3, 3, 7])
        assert (ref.teacher_version, ref.hinted_accuracy) == (5, 0.5)
        chunks = await collect(ref, chunk_rows)
        assert [start for start, _ in chunks] == list(range(0, 7, chunk_rows))
        assert torch.equal(torch.cat([rows for _, rows in chunks]), rows_of(7))
        await store.close()

    asyncio.run(scenario())
    assert not files_left(os.getpid())


def test_half_precision_rows_are_stored_as_float32():
    async def scenario():
        store = LogitsStore()
        half = torch.randn(4, 9).to(torch.bfloat16)
        ((_, rows),) = await collect(await store.put(half, [0, 4], teacher_version=0), 4)
        assert rows.dtype == torch.float32
        assert torch.equal(rows, half.float())
        await store.close()

    asyncio.run(scenario())


def test_memory_of_a_released_reference_is_reused():
    async def scenario():
        store = LogitsStore()
        first = await store.put(rows_of(10), [0, 10], teacher_version=0)
        second = await store.put(rows_of(10), [0, 10], teacher_version=0)
        assert first.region.shm_path != second.region.shm_path
        await store.release(first.id)
        await store.release("unknown")
        before = store.nbytes
        third = await store.put(rows_of(6, base=100.0), [0, 6], teacher_version=0)
        assert third.region.shm_path == first.region.shm_path
        assert store.nbytes == before
        assert torch.equal((await collect(third, 4))[0][1], rows_of(6, base=100.0)[:4])
        await store.close()

    asyncio.run(scenario())


def test_a_released_reference_cannot_be_read_even_when_its_memory_holds_other_rows():
    async def scenario():
        store = LogitsStore()
        old = await store.put(rows_of(10), [0, 10], teacher_version=0)
        await store.release(old.id)
        with pytest.raises(LogitsGone, match="released or expired"):
            await collect(old, 4)
        new = await store.put(rows_of(10), [0, 10], teacher_version=0)
        assert new.region.shm_path == old.region.shm_path
        with pytest.raises(LogitsGone):
            await collect(old, 4)
        await store.close()

    asyncio.run(scenario())


def test_a_reference_released_in_the_middle_of_a_read_yields_no_wrong_row():
    async def scenario():
        store = LogitsStore()
        ref = await store.put(rows_of(12), [0, 12], teacher_version=0)
        seen = []

        async def read():
            async for start, rows in read_logits(ref, 2):
                seen.append(torch.equal(rows, rows_of(12)[start : start + 2]))
                if start == 2:
                    await store.release(ref.id)
                    await store.put(rows_of(12, base=1e6), [0, 12], teacher_version=1)

        with pytest.raises(LogitsGone):
            await read()
        assert seen
        assert all(seen)
        await store.close()

    asyncio.run(scenario())


def test_references_of_a_dead_reader_expire():
    async def scenario():
        store = LogitsStore(LogitsConfig(ttl_s=0.05))
        ref = await store.put(rows_of(10), [0, 10], teacher_version=0)
        await asyncio.sleep(0.1)
        await store.put(rows_of(10), [0, 10], teacher_version=0)
        assert store.held == 1
        with pytest.raises(LogitsGone):
            await collect(ref, 10)
        await asyncio.sleep(0.1)
        assert store.expire() == 1
        assert store.held == 0
        await store.close()

    asyncio.run(scenario())


def test_memory_is_bounded_and_small_free_regions_make_room():
    async def scenario():
        store = LogitsStore(LogitsConfig(max_bytes=50_000))
        small = await store.put(rows_of(100), [0, 100], teacher_version=0)  # 20 kB
        with pytest.raises(RuntimeError, match="max_bytes=50000 with 1 references"):
            await store.put(rows_of(200), [0, 200], teacher_version=0)  # 40 kB
        await store.release(small.id)
        large = await store.put(rows_of(200), [0, 200], teacher_version=0)
        assert store.nbytes <= 50_000
        assert torch.equal((await collect(large, 200))[0][1], rows_of(200))
        await store.close()
        assert store.nbytes == 0

    asyncio.run(scenario())


def test_the_next_chunk_travels_while_the_caller_computes(monkeypatch):
    copies: list[int] = []
    second_chunk = threading.Event()
    copy = region_module._copy_from_file

    def watched(descriptor, out, offset, ref):
        copy(descriptor, out, offset, ref)
        copies.append(offset)
        if len([o for o in copies if o > 0]) == 2:
            second_chunk.set()

    monkeypatch.setattr(region_module, "_copy_from_file", watched)

    async def scenario():
        store = LogitsStore()
        ref = await store.put(rows_of(12), [0, 12], teacher_version=0)
        async for start, _ in read_logits(ref, 4):
            if start == 0:
                assert second_chunk.wait(10), "the second chunk did not start before the first was done with"
            elif start == 4:
                break
        await store.close()

    asyncio.run(scenario())


def test_bad_input_is_refused():
    async def scenario():
        store = LogitsStore()
        for rows in (torch.zeros(3), torch.zeros(0, 5), torch.zeros(2, 5, dtype=torch.int64)):
            with pytest.raises(ValueError, match="non-empty float"):
                await store.put(rows, [0, 2], teacher_version=0)
        for offsets in ([0, 1], [1, 2], [2], [0, 2, 1, 2]):
            with pytest.raises(ValueError, match="row_offsets"):
                await store.put(torch.zeros(2, 5), offsets, teacher_version=0)
        ref = await store.put(torch.zeros(2, 5), [0, 2], teacher_version=0)
        with pytest.raises(ValueError, match="chunk_rows"):
            await collect(ref, 0)
        await store.close()

    asyncio.run(scenario())
