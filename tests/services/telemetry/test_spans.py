import asyncio
import threading

import pytest

from services.telemetry.spans import Spans


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spans(clock: Clock) -> Spans:
    return Spans(clock)


def spend(spans: Spans, clock: Clock, name: str, seconds: float, waiting: bool = False) -> None:
    with spans(name, waiting=waiting):
        clock.now += seconds


def test_a_spans_name_is_the_metrics_name_and_its_seconds_add_up(spans: Spans, clock: Clock) -> None:
    spend(spans, clock, "trainer/forward", 2.0)
    spend(spans, clock, "trainer/forward", 3.0)
    spend(spans, clock, "trainer/optimizer", 1.0)
    assert spans.drain() == {"trainer/forward": 5.0, "trainer/optimizer": 1.0}


def test_a_drain_begins_a_new_interval(spans: Spans, clock: Clock) -> None:
    spend(spans, clock, "trainer/forward", 2.0)
    spans.drain()
    assert spans.drain() == {}


def test_an_open_span_is_split_between_intervals(spans: Spans, clock: Clock) -> None:
    with spans("generator/episode"):
        clock.now += 4.0
        assert spans.drain() == {"generator/episode": 4.0}
        clock.now += 1.5
    assert spans.drain() == {"generator/episode": 1.5}


def test_overlapping_spans_add_up_in_seconds_but_cover_the_time_once(spans: Spans, clock: Clock) -> None:
    with spans("generator/episode"), spans("generator/episode"):
        clock.now += 3.0
    clock.now += 1.0
    assert spans.idle_share("generator") == pytest.approx(0.25)
    assert spans.drain() == {"generator/episode": 6.0}


def test_nested_spans_keep_their_own_names_and_parents_are_not_reported(spans: Spans, clock: Clock) -> None:
    with spans("trainer/step"):
        clock.now += 1.0
        spend(spans, clock, "trainer/step/forward", 2.0)
    assert spans.drain() == {"trainer/step": 3.0, "trainer/step/forward": 2.0}


def test_waiting_is_reported_but_leaves_the_role_idle(spans: Spans, clock: Clock) -> None:
    spend(spans, clock, "trainer/forward", 1.0)
    spend(spans, clock, "trainer/wait_batch", 3.0, waiting=True)
    assert spans.idle_share("trainer") == pytest.approx(0.75)
    assert spans.drain() == {"trainer/forward": 1.0, "trainer/wait_batch": 3.0}


def test_a_role_that_never_ran_is_idle_and_no_time_is_no_idleness(spans: Spans, clock: Clock) -> None:
    assert spans.idle_share("rewarder") == 0.0
    clock.now += 1.0
    assert spans.idle_share("rewarder") == 1.0


def test_idleness_counts_from_the_last_drain(spans: Spans, clock: Clock) -> None:
    clock.now += 10.0
    spans.drain()
    spend(spans, clock, "trainer/forward", 2.0)
    assert spans.idle_share("trainer") == 0.0


def test_a_span_closes_when_its_block_raises(spans: Spans, clock: Clock) -> None:
    @spans("trainer/forward")
    def forward() -> None:
        clock.now += 1.0
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        forward()
    clock.now += 5.0
    assert spans.drain() == {"trainer/forward": 1.0}


def test_a_span_decorates_a_function(spans: Spans, clock: Clock) -> None:
    @spans("rewarder/score")
    def score(seconds: float) -> float:
        clock.now += seconds
        return seconds

    assert score(1.0) + score(2.0) == 3.0
    assert spans.drain() == {"rewarder/score": 3.0}


def test_threads_lose_no_time(spans: Spans, clock: Clock) -> None:
    inside, leave = threading.Barrier(9), threading.Barrier(9)

    def work() -> None:
        for _ in range(50):
            with spans("generator/warm"):
                clock.now += 0.0
        with spans("generator/tool"):
            inside.wait(timeout=30)
            leave.wait(timeout=30)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    inside.wait(timeout=30)
    clock.now += 2.0
    leave.wait(timeout=30)
    for thread in threads:
        thread.join(timeout=30)
    assert spans.drain() == {"generator/tool": 16.0}


def test_asyncio_tasks_share_the_spans(spans: Spans, clock: Clock) -> None:
    async def episode(start: asyncio.Event) -> None:
        with spans("generator/episode"):
            await start.wait()

    async def run() -> None:
        start = asyncio.Event()
        tasks = [asyncio.create_task(episode(start)) for _ in range(3)]
        await asyncio.sleep(0)
        clock.now += 1.0
        start.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert spans.idle_share("generator") == 0.0
    assert spans.drain() == {"generator/episode": 3.0}
