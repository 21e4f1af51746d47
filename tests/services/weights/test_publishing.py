import asyncio

from plane_builders import Trainer, is_version, model

from services.telemetry.spans import Spans
from services.weights.config import WeightsConfig
from services.weights.publishing import Publishing
from services.weights.reader import SnapshotReader


class Held:
    """A writer whose seal waits until it is let go, or fails."""

    def __init__(self, writer):
        self.writer, self.go, self.error, self.order = writer, asyncio.Event(), None, []

    async def copy(self, slot, version):
        await self.writer.copy(slot, version)
        self.order.append(f"copied {version}")

    async def seal(self, slot, base):
        await self.go.wait()
        if self.error is not None:
            raise self.error
        shard = await self.writer.seal(slot, base)
        self.order.append("sealed")
        return shard

    async def close(self):
        await self.writer.close()


def make(trainer):
    held, troubles, spans = Held(trainer.writer), [], Spans()
    trainer.publisher._writers = [held]
    return held, troubles, spans, Publishing(trainer.publisher, spans, troubles.append)


def test_the_optimizer_goes_on_after_the_copy_while_the_version_is_sealed():
    async def scenario():
        trainer = Trainer(model(1))
        held, troubles, spans, publishing = make(trainer)
        await asyncio.wait_for(publishing.begin(1), 10)  # returns although the seal waits
        trainer.train(2)  # the next step
        assert trainer.lease(0) is None
        held.go.set()
        await publishing.settled()
        assert is_version(await SnapshotReader().pull(trainer.lease(0)), 1)
        assert not troubles
        assert {"trainer/publish", "weights/seal"} <= spans.drain().keys()
        await publishing.close()

    asyncio.run(scenario())


def test_a_version_that_is_current_or_under_way_is_not_copied_again():
    async def scenario():
        held, _, _, publishing = make(Trainer())
        for _ in range(3):
            await publishing.begin(1)
        held.go.set()
        await publishing.settled()
        await publishing.begin(1)
        assert held.order == ["copied 1", "sealed"]
        await publishing.close()

    asyncio.run(scenario())


def test_a_version_is_skipped_rather_than_waited_for_while_the_one_before_it_is_sealed():
    async def scenario():
        trainer = Trainer(model(1))
        held, troubles, _, publishing = make(trainer)
        await publishing.begin(1)
        for version in (2, 3):
            trainer.train(version)
            await asyncio.wait_for(publishing.begin(version), 1)
        assert held.order == ["copied 1"]
        assert publishing.metrics()["weights/skipped"] == 2.0
        held.go.set()
        await publishing.settled()
        assert is_version(await SnapshotReader().pull(trainer.lease(0)), 1)
        await publishing.begin(3)  # the trainer has time
        await publishing.settled()
        assert is_version(await SnapshotReader().pull(trainer.lease(1)), 3)
        assert publishing.metrics()["weights/skipped"] == 1.0
        assert not troubles
        await publishing.close()

    asyncio.run(scenario())


def test_slow_readers_hold_up_the_last_version_only():
    async def scenario():
        trainer = Trainer(config=WeightsConfig(max_lease_s=30.0))
        held, _, _, publishing = make(trainer)
        held.go.set()
        await publishing.finish(1)
        slow = trainer.lease(0)
        await publishing.finish(2)
        trainer.lease(1)
        await asyncio.wait_for(publishing.begin(3), 1)
        assert trainer.publisher.copied is None
        last = asyncio.create_task(publishing.finish(4))
        await asyncio.sleep(0.05)
        assert not last.done()
        trainer.release(slow.lease_id)
        await asyncio.wait_for(last, 10)
        assert trainer.publisher.version == 4
        await publishing.close()

    asyncio.run(scenario())


def test_a_seal_that_fails_is_counted_and_told_and_the_version_is_copied_anew_when_asked_for():
    async def scenario():
        trainer = Trainer()
        held, troubles, _, publishing = make(trainer)
        held.go.set()
        held.error = OSError("no space")
        await publishing.begin(1)
        await publishing.settled()
        assert publishing.metrics()["weights/publish_failures"] == 1.0
        assert troubles == ["publish of version 1: rank 0 did not seal its part of version 1: no space"]
        assert trainer.publisher.version is None
        held.error = None
        await publishing.begin(1)
        await publishing.settled()
        assert trainer.publisher.version == 1
        await publishing.close()

    asyncio.run(scenario())


def test_closing_gives_up_what_is_under_way():
    async def scenario():
        trainer = Trainer()
        _, _, _, publishing = make(trainer)
        await publishing.begin(1)
        await asyncio.wait_for(publishing.close(), 10)
        assert trainer.lease(-1) is None

    asyncio.run(scenario())
