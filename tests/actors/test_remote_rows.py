"""The teacher's rows as the learner's thread reads them: in order, without a copy where they lie together."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from actors.remote_rows import RemoteRows
from services.losses.topk import top_k_rows
from services.weights.logits import LogitsConfig, LogitsGone, LogitsStore

LIMIT_S = 30.0
ROWS = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))


def with_rows(read, *, top_k=0, sites=None, released=False, **settings):
    """What `read(remote)` returns in a thread of its own, as the learner runs, while the loop reads for it."""

    async def scenario():
        store = LogitsStore(LogitsConfig(top_k=top_k))
        ref = await store.put(ROWS, [0, 6, 6, 9, 20], teacher_version=0)
        if released:
            await store.release(ref.id)
        loop = asyncio.get_running_loop()
        if sites is None:
            remote = RemoteRows(ref, loop, chunk_rows=4, via="shm", **settings)
        else:
            plan = SimpleNamespace(micro_batches=[SimpleNamespace(sites=[None] * count) for count in sites])
            remote = RemoteRows.of_plan(ref, plan, loop, chunk_rows=4, via="shm")
        try:
            return await asyncio.wait_for(asyncio.to_thread(read, remote), LIMIT_S)
        finally:
            await store.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("counts", [[20], [4, 4, 4, 4, 4], [1] * 20, [3, 0, 3, 5, 9], [0, 7, 13], [6, 2]])
def test_rows_come_in_order_whatever_is_asked_for(counts, top_k):
    def read(remote):
        parts = []
        for count in counts:
            rows = remote(count)
            assert len(rows) == count
            parts.append(rows.clone())
        return parts

    parts = with_rows(read, top_k=top_k)
    expected = ROWS[: sum(counts)]
    if top_k:
        cut = top_k_rows(expected, top_k)
        assert torch.equal(torch.cat([part.values for part in parts]), cut.values)
        assert torch.equal(torch.cat([part.indices for part in parts]).long(), cut.indices)
        assert torch.equal(torch.cat([part.tail for part in parts]), cut.tail)
    else:
        assert torch.equal(torch.cat(parts), expected)


def storages(remote, counts):
    return [remote(count).untyped_storage().data_ptr() for count in counts]


def test_rows_of_one_chunk_are_not_copied():
    found = with_rows(lambda remote: storages(remote, [4, 1, 3, 4, 2, 2, 4]))
    assert len(set(found)) == 2  # the reader's two buffers


def test_a_learner_that_reads_each_micro_batch_in_chunks_never_has_to_copy():
    # Rows by context: 6, 0, 3, 11. Micro-batches of 1, 0, 2 and 1 contexts have 6, 0, 3 and 11 of them.
    found = with_rows(lambda remote: storages(remote, [4, 2, 3, 4, 4, 3]), sites=[1, 0, 2, 1])
    assert len(set(found)) == 2


def test_only_the_ranges_that_are_wanted_are_read():
    rows = with_rows(lambda remote: remote(7).clone(), ranges=[(9, 12), (0, 4)])
    assert torch.equal(rows, torch.cat([ROWS[9:12], ROWS[:4]]))


def test_more_rows_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="3 more rows were asked for"):
        with_rows(lambda remote: (remote(18), remote(5)))


def test_rows_that_are_gone_are_told_to_the_thread_that_reads():
    with pytest.raises(LogitsGone, match="released or expired"):
        with_rows(lambda remote: remote(2), released=True)
