import asyncio
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch

from services.losses.topk import top_k_rows
from services.weights import region as region_module
from services.weights.logits import LogitsConfig, LogitsFull, LogitsGone, LogitsStore, read_logits
from services.weights.row_format import RowFormat

HEADER = 4096


def rows_of(count: int, vocab: int = 50, base: float = 0.0) -> torch.Tensor:
    return torch.arange(count * vocab, dtype=torch.float32).view(count, vocab) + base


def random_rows(count: int, vocab: int = 50) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(0)) * 4


async def collect(ref, chunk_rows, ranges=None):
    return [(start, rows.clone()) async for start, rows in read_logits(ref, chunk_rows, ranges=ranges)]


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_rows_are_written_as_they_are_made_and_readable_once_sealed():
    async def scenario():
        store = LogitsStore()
        writer = await store.open(7, 50)
        for part in rows_of(7).split(3):
            writer.write(part)
        ref = writer.seal([0, 3, 3, 7], teacher_version=5, hinted_accuracy=0.5)
        assert torch.equal((await collect(ref, 100))[0][1], rows_of(7))
        assert (ref.row_offsets, ref.teacher_version, ref.hinted_accuracy) == ([0, 3, 3, 7], 5, 0.5)
        await store.close()

    asyncio.run(scenario())


def test_what_is_missing_or_too_much_is_refused():
    async def scenario():
        store = LogitsStore()
        writer = await store.open(4, 50)
        writer.write(rows_of(3))
        with pytest.raises(ValueError, match="only 3 of 4 rows were written"):
            writer.seal([0, 4], teacher_version=0)
        for wrong in (rows_of(2), rows_of(1, vocab=49), rows_of(1)[0]):
            with pytest.raises(ValueError, match="does not continue 3 of 4 rows over 50 tokens"):
                writer.write(wrong)
        with pytest.raises(ValueError, match="at least one row"):
            await store.open(0, 50)
        await store.close()

    asyncio.run(scenario())


def test_nothing_is_written_to_memory_that_was_released_meanwhile():
    async def scenario():
        store = LogitsStore()
        late = await store.open(4, 50)
        late.write(rows_of(2))
        await store.release(late.ref_id)
        new = await store.put(rows_of(4, base=9.0), [0, 4], teacher_version=0)
        assert new.region.shm_path == str(late.region.path)
        for wrong in (lambda: late.write(rows_of(2)), lambda: late.seal([0, 4], teacher_version=0)):
            with pytest.raises(LogitsGone, match="memory for 4 rows was released"):
                await asyncio.to_thread(wrong)
            late.written = 4
        assert torch.equal((await collect(new, 4))[0][1], rows_of(4, base=9.0))
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("dtype", "top_k"), [("float32", 0), ("bfloat16", 0), ("float32", 3), ("bfloat16", 99)])
def test_rows_travel_in_the_form_that_is_configured(dtype, top_k):
    async def scenario():
        store = LogitsStore(LogitsConfig(dtype=dtype, top_k=top_k))
        logits = random_rows(7)
        ref = await store.put(logits, [0, 7], teacher_version=0)
        form = RowFormat(50, dtype, min(top_k, 50))
        assert RowFormat.of(ref) == form
        assert ref.region.nbytes == HEADER + 7 * form.row_bytes
        raw = torch.empty(7 * form.row_bytes, dtype=torch.uint8)
        form.write(logits, raw)
        chunks = await collect(ref, 3)
        assert [(start, len(rows)) for start, rows in chunks] == [(0, 3), (3, 3), (6, 1)]
        for start, rows in chunks:
            expected = form.read(raw)[start : start + 3]
            pairs = [(rows, expected)]
            if top_k:
                pairs = [(getattr(rows, name), getattr(expected, name)) for name in ("values", "indices", "tail")]
            assert all(torch.equal(*pair) for pair in pairs)
        await store.close()

    asyncio.run(scenario())


# ---- reading ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("top_k", [0, 5])
def test_any_ranges_of_rows_can_be_read_and_no_chunk_lies_in_two(top_k):
    async def scenario():
        store = LogitsStore(LogitsConfig(top_k=top_k))
        logits = random_rows(20)
        ref = await store.put(logits, [0, 20], teacher_version=0)
        chunks = await collect(ref, 4, [(14, 20), (3, 3), (0, 5), (5, 6)])
        assert [(start, len(rows)) for start, rows in chunks] == [(14, 4), (18, 2), (0, 4), (4, 1), (5, 1)]
        for start, rows in chunks:
            expected = logits[start : start + len(rows)]
            if top_k:
                assert torch.equal(rows.values, top_k_rows(expected, top_k).values)
            else:
                assert torch.equal(rows, expected)
        assert await collect(ref, 4, []) == []
        for wrong in ((3, 21), (-1, 2), (5, 4)):
            with pytest.raises(ValueError, match=r"outside of the answer's 20"):
                await collect(ref, 4, [wrong])
        await store.close()

    asyncio.run(scenario())


def test_two_buffers_take_turns_however_many_rows_there_are():
    async def scenario():
        store = LogitsStore()
        ref = await store.put(rows_of(100), [0, 100], teacher_version=0)
        seen = [rows.untyped_storage() async for _, rows in read_logits(ref, 4)]
        assert len(seen) == 25
        assert {storage.data_ptr() for storage in seen} == {seen[0].data_ptr(), seen[1].data_ptr()}
        assert {storage.nbytes() for storage in seen} == {4 * 50 * 4}
        await store.close()

    asyncio.run(scenario())


READER = """
import asyncio, pickle, resource, sys
import torch
from services.weights.logits import read_logits

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

async def read(ref, ranges=None):
    return [float(rows[:, 0].sum()) async for _, rows in read_logits(ref, 32, ranges=ranges)]

ref = pickle.load(sys.stdin.buffer)
asyncio.run(read(ref, [(0, 64)]))  # two chunks: everything is imported and both buffers were there once
before = peak()
sums = asyncio.run(read(ref))
print(sum(sums), peak() - before)
"""


def test_a_readers_memory_is_two_chunks_whatever_the_total():
    rows, vocab = 2048, 25_000  # 205 MB in chunks of 3.2 MB

    async def scenario():
        store = LogitsStore()
        writer = await store.open(rows, vocab)
        ones = torch.ones(256, vocab)
        for _ in range(rows // 256):
            writer.write(ones)
        ref = writer.seal([0, rows], teacher_version=0)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", READER], input=pickle.dumps(ref), capture_output=True, timeout=120,
            cwd=os.getcwd(), env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}, check=False,
        )  # fmt: skip
        await store.close()
        assert done.returncode == 0, done.stderr.decode()
        return [float(word) for word in done.stdout.split()]

    total, grown = asyncio.run(scenario())
    assert total == rows
    assert grown < 20 << 20


def test_a_backward_pass_that_comes_after_the_next_chunk_is_an_error_and_no_wrong_gradient():
    async def scenario(dtype, top_k):
        store = LogitsStore(LogitsConfig(dtype=dtype, top_k=top_k))
        ref = await store.put(random_rows(6), [0, 6], teacher_version=0)
        losses = []
        async for _, rows in read_logits(ref, 2):
            values = rows.values if top_k else rows
            student = torch.ones(values.shape, requires_grad=True)
            losses.append((student * values.float() if dtype == "bfloat16" else student * values).sum())
            if len(losses) == 1:
                losses[0].backward(retain_graph=True)  # in time
        await store.close()
        if dtype == "float32":  # the other is upcast by a copy, which nobody overwrites
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                losses[0].backward()
        losses[2].backward()

    for dtype in ("float32", "bfloat16"):
        for top_k in (0, 3):
            asyncio.run(scenario(dtype, top_k))


# ---- releasing -------------------------------------------------------------------------------------------------------


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


def test_all_that_a_dead_asker_was_given_is_released_at_once_and_nothing_of_the_others():
    async def scenario():
        store = LogitsStore()
        kept = await store.put(rows_of(4, base=5.0), [0, 4], teacher_version=0, asker="b")
        gone = await store.put(rows_of(4), [0, 4], teacher_version=0, asker="a")
        in_work = await store.open(4, 50, asker="a")
        in_work.write(rows_of(2))
        before = store.nbytes
        assert store.askers == {"a", "b"}
        assert store.release_asker("a") == 2
        assert (store.held, store.askers, store.nbytes) == (1, {"b"}, before)
        assert store.release_asker("a") == 0
        with pytest.raises(LogitsGone):
            await collect(gone, 4)
        with pytest.raises(LogitsGone):
            in_work.write(rows_of(2))
        assert torch.equal((await collect(kept, 4))[0][1], rows_of(4, base=5.0))
        again = await store.put(rows_of(4), [0, 4], teacher_version=0)
        assert store.nbytes == before
        assert again.region.shm_path in {gone.region.shm_path, str(in_work.region.path)}
        await store.close()

    asyncio.run(scenario())


def test_a_region_that_is_too_small_makes_room_for_the_one_that_is_needed(files_left):
    async def scenario():
        store = LogitsStore()
        for rows in range(10, 100, 10):  # ever more of them
            ref = await store.put(rows_of(rows), [0, rows], teacher_version=0)
            await store.release(ref.id)
        assert store.nbytes == HEADER + 90 * 50 * 4
        assert len(files_left(os.getpid())) == 1
        await store.close()

    asyncio.run(scenario())


def test_memory_is_bounded_and_small_free_regions_make_room():
    async def scenario():
        store = LogitsStore(LogitsConfig(max_bytes=50_000))
        small = await store.put(rows_of(100), [0, 100], teacher_version=0)  # 20 kB
        remedies = (
            r"max_bytes = 50000 beside 1 unreleased .*raise max_bytes, lower sdpo.max_sites, .*dtype = 'bfloat16'"
        )
        with pytest.raises(LogitsFull, match=remedies):
            await store.put(rows_of(200), [0, 200], teacher_version=0)  # 40 kB
        assert store.held == 1
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
