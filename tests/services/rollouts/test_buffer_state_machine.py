"""The buffer under random claims, puts, deaths and rewinds: nothing is lost, trained twice, or trained too old."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rollout_builders import Clock, balanced, heard, opened, rollout

from services.rollouts.buffer import RolloutBuffer


def durable(accounts):
    return {name: value for name, value in accounts.items() if name not in ("leases", "replay", "refusals")}


class BufferMachine(RuleBasedStateMachine):
    @initialize(
        bound=st.integers(0, 2),
        stale=st.sampled_from(["drop", "retry"]),
        incomplete=st.sampled_from(["refill", "ship"]),
        dead=st.sampled_from(["keep", "drop"]),
        size=st.integers(2, 3),
        total=st.none() | st.integers(3, 6),
    )
    def begin(self, bound, stale, incomplete, dead, size, total):
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.bound, self.total = bound, total
        self.settings = {
            "max_staleness": bound,
            "stale_tasks": stale,
            "incomplete": incomplete,
            "dead_groups": dead,
            "group_size": size,
            "min_group_size": 1 if incomplete == "ship" else 2,
            "max_attempts": 2,
            "total_batches": total,
            "replay_lease_s": 7.0,
            "keep_saves": 2,
        }
        self.buffer = opened(self.folder / "run", self.clock, **self.settings)
        self.frontier = 0  # the trainer's step
        self.taken = {}  # batch -> what take returned, not trained
        self.trained = {}  # batch -> task ids
        self.leases = []  # every lease a generator may still use, dead or alive
        self.put = []  # rollouts delivered at some time
        self.saves = []
        self.heard = set()

    @property
    def next_batch(self):
        return self.frontier + len(self.taken)

    @rule(lag=st.integers(0, 3), count=st.integers(1, 6))
    def claim(self, lag, count):
        version = max(0, self.frontier - lag)
        for lease in self.buffer.claim(f"g{lag}", version, count):
            self.leases.append((lease, version))
        assert sum(self.buffer.accounts()["leases"].values()) <= len(self.leases)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0, None]), fresh=st.booleans())
    def deliver(self, data, reward, fresh):
        lease, version = data.draw(st.sampled_from(self.leases), label="lease")
        newest = self.frontier if fresh else version  # weights changed while the episode ran
        status = data.draw(st.sampled_from(["finished", "finished", "truncated", "failed"]), label="status")
        made = rollout(lease, min(version, newest), reward, newest=newest, status=status, error=True)
        before = self.buffer.accounts()["counts"].get("put", 0)
        accepted = self.buffer.put(made)
        assert self.buffer.accounts()["counts"].get("put", 0) - before == (accepted and status != "failed")
        if accepted and status != "failed":
            self.put.append(made)

    @rule(lag=st.integers(0, 2), member_reward=st.sampled_from([0.0, 0.5, None]), leave_out=st.integers(0, 3))
    def generate(self, lag, member_reward, leave_out):
        """A generator that works, and now and then leaves a member of a group behind."""
        version = max(0, self.frontier - lag)
        for number, lease in enumerate(self.buffer.claim("worker", version, 8)):
            self.leases.append((lease, version))
            if leave_out and number % 4 == leave_out:
                continue
            made = rollout(lease, version, member_reward if lease.member else 1.0, error=True)
            assert self.buffer.put(made)
            self.put.append(made)

    @precondition(lambda self: self.put)
    @rule(data=st.data())
    def deliver_again(self, data):
        assert not self.buffer.put(data.draw(st.sampled_from(self.put), label="known"))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def abandon(self, data):
        lease, _ = data.draw(st.sampled_from(self.leases), label="lease")
        self.buffer.abandon([lease.id], "changed my mind")

    @rule(seconds=st.sampled_from([3.0, 11.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.buffer.expire()

    @precondition(lambda self: len(self.taken) < 2 and (self.total is None or self.next_batch < self.total))
    @rule(ahead=st.booleans())
    def take(self, ahead):
        """Take the next batch; train what was taken before, unless this one is a prefetch."""
        if self.taken and not ahead:
            self.train()
        batch_id = self.next_batch
        if self.total is not None and batch_id >= self.total:
            return
        batch = self.buffer.take(batch_id)
        if batch is None:
            return
        self.taken[batch_id] = batch
        for group in batch.groups:
            oldest = min(r.oldest_version for r in group.rollouts)
            assert batch_id - oldest == group.staleness <= self.bound
            assert len(group.advantages) == len(group.rollouts)
            assert {r.task.id for r in group.rollouts} == {group.task.id}

    @rule(steps=st.integers(1, 3), lag=st.integers(0, 1))
    def train_on(self, steps, lag):
        """A healthy stretch of the run."""
        for _ in range(steps):
            self.generate(lag=lag, member_reward=0.0, leave_out=0)
            self.generate(lag=0, member_reward=0.0, leave_out=0)
            if len(self.taken) < 2:
                self.take(ahead=False)
            if self.taken:
                self.train()

    @precondition(lambda self: self.taken)
    @rule()
    def train(self):
        batch = self.taken.pop(self.frontier)
        self.trained[self.frontier] = [group.task.id for group in batch.groups]
        self.buffer.trained(self.frontier)
        self.buffer.trained(self.frontier)
        self.frontier += 1

    @precondition(lambda self: self.put)
    @rule(data=st.data())
    def teachers_answer(self, data):
        rollout_id = data.draw(st.sampled_from(self.put), label="answered").id
        if self.buffer.delayed(heard(rollout_id)):
            assert rollout_id not in self.heard
            self.heard.add(rollout_id)
        assert not self.buffer.delayed(heard(rollout_id))

    @rule(count=st.integers(1, 3))
    def replay(self, count):
        lent = [r.id for r in self.buffer.to_replay(count)]
        assert len(set(lent)) == len(lent)
        assert not self.heard & set(lent)

    @rule()
    def crash(self):
        before = durable(self.buffer.accounts())
        self.buffer.close()
        self.buffer = opened(self.folder / "run", self.clock, **self.settings)
        assert durable(self.buffer.accounts()) == before
        for batch_id, batch in self.taken.items():
            assert self.buffer.take(batch_id) == batch

    @rule()
    def save(self):
        path = self.folder / f"step-{self.frontier}"
        self.buffer.save(path, self.frontier)
        self.saves = [*(step for step in self.saves if step != self.frontier), self.frontier][-2:]

    @precondition(lambda self: self.saves)
    @rule(data=st.data(), from_checkpoint=st.booleans())
    def restart_from_save(self, data, from_checkpoint):
        step = data.draw(st.sampled_from(self.saves), label="step")
        if from_checkpoint:
            self.buffer.close()
            self.buffer = RolloutBuffer.load(
                self.folder / f"step-{step}", self.folder / "run", self.buffer.config, self.clock
            )
            # The leases and rollouts after the checkpoint belong to a run that this buffer never saw.
            self.leases, self.put, self.heard, self.saves = [], [], set(), [step]
        else:
            self.buffer.rewind(step)
            newer = [r for r in self.put if max(s.version for q in r.sequences for s in q.versions) > step]
            assert not any(self.buffer.put(r) for r in newer)
        self.saves = [kept for kept in self.saves if kept <= step]
        self.frontier, self.taken = step, {}
        self.trained = {batch: tasks for batch, tasks in self.trained.items() if batch < step}

    @invariant()
    def every_task_has_one_fate(self):
        if not hasattr(self, "buffer"):
            return
        accounts = self.buffer.accounts()
        assert balanced(accounts), accounts
        assert accounts["frontier"] == self.frontier
        assert accounts["next_batch"] == self.next_batch
        every = [task for tasks in self.trained.values() for task in tasks]
        every += [group.task.id for batch in self.taken.values() for group in batch.groups]
        assert len(every) == len(set(every)), "a task is in two batches"
        assert accounts["trained"] == sum(map(len, self.trained.values()))
        assert accounts["taken"] == sum(len(batch.groups) for batch in self.taken.values())
        if self.total is not None and self.frontier == self.total:
            assert accounts["in_work"] == accounts["ready"] == 0

    def teardown(self):
        if hasattr(self, "buffer"):
            self.buffer.close()
            shutil.rmtree(self.folder)


def test_random_histories_keep_the_accounts():
    run_state_machine_as_test(
        BufferMachine,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
