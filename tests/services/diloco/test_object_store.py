"""DiLoCo over an object store: equal to the formula, equal between replicas, and healing."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import object_store_replica
import pytest
import torch
from object_store_replica import INNER_LR, MOMENTUM, OUTER_LR, Replica
from torch import nn

from services.diloco.config import DilocoConfig
from services.diloco.object_store import ObjectStoreManager
from services.diloco.replicas import Outer

LIMIT_S = 120.0  # of anything that a test waits for; nothing is judged by it


def config(uri, **options) -> DilocoConfig:
    defaults = {"poll_s": 0.01, "grace_s": 60.0, "first_grace_s": 60.0, "give_up_s": LIMIT_S}
    return DilocoConfig(uri=uri, **defaults | options)


@pytest.fixture
def uri():
    return f"memory://{uuid.uuid4().hex}"


def alone(uri, rank, world, **options) -> Replica:
    """A replica, or `min_replicas` of them, whose first round does not wait for the others, but all later ones do."""
    manager = ObjectStoreManager(config(uri, **options), rank, world)
    manager._rounds.first_grace_s = 0.05
    return Replica(manager, rank)


def together(*calls):
    """Results of calls that run at the same time."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        return [future.result(timeout=LIMIT_S) for future in futures]


def run(replica: Replica, steps: int, weight=lambda step: 1.0) -> list[list[np.ndarray]]:
    """The parameters after every one of `steps` inner steps."""
    end = replica.step + steps
    return [
        [parameter.detach().numpy().copy() for parameter in replica.parameters]
        for _ in replica.train(lambda: replica.step >= end, weight)
    ]


def reference(world, steps, fragments, sync_every, delay, alpha, weights) -> list[list[list[np.ndarray]]]:
    """Streaming DiLoCo in numpy: by replica, step and parameter. `weights[r](step)` is read at the step that sends."""
    start = [
        [p.detach().numpy().astype(np.float64) for p in object_store_replica.Fragment(f).parameters()]
        for f in range(fragments)
    ]
    local = [[[p.copy() for p in fragment] for fragment in start] for _ in range(world)]
    originals = [[p.copy() for p in fragment] for fragment in start]
    momenta = [[np.zeros_like(p) for p in fragment] for fragment in start]
    period, rounds, sent = sync_every // fragments, 0, None
    history = [[] for _ in range(world)]
    for step in range(steps):
        for rank in range(world):
            index = 0
            for fragment in local[rank]:
                for parameter in fragment:
                    parameter -= INNER_LR * object_store_replica.gradient(rank, step, parameter, index)
                    index += 1
        f = rounds % fragments
        if (step + 1) % period == (period - delay) % period:
            share = np.array([weights[rank](step) for rank in range(world)])
            share = share / share.sum()
            sent = [
                sum(share[rank] * (original - local[rank][f][i]) for rank in range(world))
                for i, original in enumerate(originals[f])
            ]
        if (step + 1) % period == 0:
            for i, gradient in enumerate(sent):
                momenta[f][i] = MOMENTUM * momenta[f][i] + gradient if rounds >= fragments else gradient
                originals[f][i] = originals[f][i] - OUTER_LR * (gradient + MOMENTUM * momenta[f][i])
                for rank in range(world):
                    local[rank][f][i] = originals[f][i] + alpha * (local[rank][f][i] - originals[f][i])
            rounds += 1
        for rank in range(world):
            history[rank].append([p.copy() for fragment in local[rank] for p in fragment])
    return history


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("fragments", "sync_every", "delay", "alpha"), [(1, 4, 0, 0.0), (3, 6, 0, 0.0), (1, 4, 2, 0.5), (2, 6, 1, 0.0)]
)
def test_every_inner_step_equals_the_reference(uri, world, fragments, sync_every, delay, alpha):
    weights = [lambda step, rank=rank: 50.0 * rank + step + 1 for rank in range(world)]

    def replica(rank):
        manager = ObjectStoreManager(config(uri), rank, world)
        one = Replica(manager, rank, fragments=fragments, sync_every=sync_every, delay=delay, alpha=alpha)
        history = run(one, 24, weights[rank])
        assert manager.current_step() == 24 // (sync_every // fragments)
        assert manager.num_participants() == world
        assert manager.left_out == 0
        manager.shutdown()
        return history, one.digest()

    results = together(*(lambda rank=rank: replica(rank) for rank in range(world)))
    expected = reference(world, 24, fragments, sync_every, delay, alpha, weights)
    for rank, (history, _) in enumerate(results):
        for step, (got, want) in enumerate(zip(history, expected[rank], strict=True)):
            for mine, theirs in zip(got, want, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-6, err_msg=f"replica {rank} after step {step}")
    if not delay and fragments == 1:  # the last step synced everything
        assert len({digest for _, digest in results}) == 1


def test_a_world_of_one_writes_nothing(tmp_path):
    manager = ObjectStoreManager(config(str(tmp_path / "store")), 0, 1)
    run(Replica(manager, 0), 12)
    assert manager.round_state() == {"round": 3}
    assert list(tmp_path.iterdir()) == []


def waiting(manager: ObjectStoreManager) -> threading.Event:
    """Set once the manager has nothing left to do but to wait for peers."""
    entered = threading.Event()
    pause = manager._rounds.pause
    manager._rounds.pause = lambda: (entered.set(), pause())[1]
    return entered


def after(event: threading.Event, replica: Replica, steps: int) -> None:
    assert event.wait(LIMIT_S)
    run(replica, steps)


def test_who_starts_late_heals_then_equals_its_source_and_contributes_only_then(uri):
    pair = [alone(uri, r, 3, min_replicas=2) for r in range(2)]
    together(*(lambda r=r: run(r, 8) for r in pair))
    late = Replica(ObjectStoreManager(config(uri), 2, 3), 2)
    # It trains four steps of its own and then waits; the peers are in inner steps meanwhile.
    entered = waiting(late.manager)
    together(lambda: run(late, 4), *(lambda r=r: after(entered, r, 4) for r in pair))
    assert late.digest() == pair[0].digest() == pair[1].digest()
    assert late.manager.round_state() == pair[0].manager.round_state() == {"round": 3}
    assert [r.manager.num_participants() for r in (*pair, late)] == [2, 2, 2]
    assert late.step == pair[0].step == 12
    together(*(lambda r=r: run(r, 4) for r in (*pair, late)))
    assert late.digest() == pair[0].digest() == pair[1].digest()
    assert [r.manager.num_participants() for r in (*pair, late)] == [3, 3, 3]


def test_who_is_back_while_its_peer_waits_for_it_heals_in_that_round(uri):
    """With two of two needed the peer cannot go on alone: the healed replica counts as present."""
    options = config(uri, min_replicas=2)
    pair = [Replica(ObjectStoreManager(options, r, 2), r) for r in range(2)]
    together(*(lambda r=r: run(r, 8) for r in pair))
    again = Replica(ObjectStoreManager(options, 1, 2), 1)
    entered = waiting(pair[0].manager)
    together(lambda: run(pair[0], 4), lambda: after(entered, again, 4))
    assert again.digest() == pair[0].digest()
    assert pair[0].manager.num_participants() == again.manager.num_participants() == 1
    together(*(lambda r=r: run(r, 4) for r in (pair[0], again)))
    assert again.digest() == pair[0].digest()
    assert pair[0].manager.num_participants() == 2


def test_a_state_is_written_only_for_those_who_ask(tmp_path):
    pair = [Replica(ObjectStoreManager(config(str(tmp_path), keep_rounds=9), r, 2), r) for r in range(2)]
    together(*(lambda r=r: run(r, 16) for r in pair))
    assert {path.name.split("-")[0] for path in tmp_path.glob("round-*/*")} == {"contribution", "MEMBERS"}


def test_who_came_too_late_to_a_round_takes_its_average_and_counts_it(uri, caplog):
    pair = [Replica(ObjectStoreManager(config(uri, grace_s=0.05), r, 2), r) for r in range(2)]
    together(*(lambda r=r: run(r, 4) for r in pair))
    slow = pair[1].manager
    newest, entered = slow._rounds.folders.newest, threading.Event()

    def looked():
        """It finds the round open, and the other decides before it has written anything."""
        seen = newest()
        entered.set()
        peer.join(LIMIT_S)
        return seen

    slow._rounds.folders.newest = looked
    peer = threading.Thread(target=lambda: after(entered, pair[0], 4))
    peer.start()
    run(pair[1], 4)
    assert pair[1].digest() == pair[0].digest()
    assert slow.num_participants() == pair[0].manager.num_participants() == 1
    assert slow.left_out == 1
    assert "replica 1 came too late to round 2" in caplog.text


def test_a_peer_that_never_comes_is_a_time_out_that_names_it(uri):
    replica = Replica(ObjectStoreManager(config(uri, min_replicas=2), 0, 2), 0)
    replica.manager._rounds.timeout_s = 0.3
    with pytest.raises(TimeoutError, match=r"replicas 1 did not come within 0.3 s.*min_replicas"):
        run(replica, 4)
    assert replica.manager.current_step() == 0


def test_a_round_that_timed_out_is_taken_up_again_by_the_next_attempt(uri):
    """The contribution is in the store already; the peer decided on it meanwhile."""
    managers = [ObjectStoreManager(config(uri, min_replicas=2), r, 2) for r in range(2)]
    managers[0]._rounds.timeout_s = 0.2
    tensors = [torch.tensor([1.0]), torch.tensor([3.0])]
    managers[0].start_quorum()
    with pytest.raises(TimeoutError):
        managers[0].allreduce(tensors[0]).wait()
    managers[1].start_quorum()
    assert managers[1].allreduce(tensors[1]).wait()
    assert managers[1].should_commit()
    managers[0].start_quorum()
    assert managers[0].allreduce(tensors[0]).wait()
    assert managers[0].should_commit()
    assert tensors[0].item() == tensors[1].item() == 2.0
    assert managers[0].left_out == 0


def test_with_nobody_to_heal_from_the_error_says_what_to_do(uri):
    run(alone(uri, 0, 2), 8)
    new = Replica(ObjectStoreManager(config(uri), 1, 2), 1)
    new.manager._rounds.timeout_s = 0.3
    with pytest.raises(TimeoutError, match=r"is at round 0 and .* at 2; nobody came .*\(1 wait for it\)"):
        run(new, 4)


def from_checkpoint(uri, rank, world, source: Replica, number: int) -> Replica:
    """A new process of a rank, from a checkpoint that `source` took after a round."""
    replica = Replica(ObjectStoreManager(config(uri), rank, world), rank)
    replica.load(source.save())
    for theirs, mine in zip(source.loop._fragments, replica.loop._fragments, strict=True):
        for name, original in theirs.original_parameters.items():
            mine.original_parameters[name].copy_(original)
    for theirs, mine in zip(source.outer, replica.outer, strict=True):
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    replica.manager.load_round_state({"round": number})
    return replica


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("store", ["the same", "an empty"])
def test_when_all_were_restarted_the_older_checkpoint_heals_from_the_newer(uri, store, late):
    """Whoever is first. In the same store nobody has the state of its last round; a new line of rounds begins there."""
    pair = [Replica(ObjectStoreManager(config(uri), r, 2), r) for r in range(2)]
    together(*(lambda r=r: run(r, 8) for r in pair))
    older = [from_checkpoint(uri, 0, 2, pair[0], 2)]
    together(*(lambda r=r: run(r, 4) for r in pair))
    newer = from_checkpoint(uri, 1, 2, pair[1], 3)
    together(*(lambda r=r: run(r, 8) for r in pair))
    again = [*older, newer]
    if store == "an empty":
        fresh = config(f"memory://{uuid.uuid4().hex}")
        for rank, replica in enumerate(again):
            replica.manager._rounds.folders = ObjectStoreManager(fresh, rank, 2)._rounds.folders
    entered = waiting(again[1 - late].manager)

    def reach(replica):
        """Until the first round that both are in: it is the same for both."""
        for _ in replica.train(lambda: replica.manager.num_participants() == 2):
            time.sleep(0.01)

    def second():
        assert entered.wait(LIMIT_S)
        reach(again[late])

    together(lambda: reach(again[1 - late]), second)
    assert again[0].digest() == again[1].digest()
    assert again[0].manager.current_step() == again[1].manager.current_step() >= 5
    together(*(lambda r=r: run(r, 16) for r in again))
    names = again[0].manager._rounds.folders.store.names()
    assert (names == ["again-0001"]) == (store == "the same")  # and what it follows on is gone
    assert again[0].manager.newest_round() == again[1].manager.current_step()


def test_a_mark_that_an_earlier_process_left_is_taken_back(uri):
    managers = [ObjectStoreManager(config(uri), r, 2) for r in range(2)]
    folders = managers[0]._rounds.folders
    folders.mark(1, "rejoin")
    managers[0].start_quorum()
    assert folders.store.names(folders.path(1)) == []


def test_a_state_that_would_run_code_is_refused_and_the_next_round_heals(tmp_path, caplog):
    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    store = str(tmp_path / "store")
    old = alone(store, 0, 3)
    run(old, 8)
    torch.save({"model": Bomb()}, tmp_path / "store" / "state")
    (tmp_path / "store" / "round-00000003").mkdir()
    (tmp_path / "store" / "state").rename(tmp_path / "store" / "round-00000003" / "state-0002.pt")
    new = Replica(ObjectStoreManager(config(store), 1, 3), 1)
    entered = waiting(new.manager)

    def go_on():
        after(entered, old, 4)  # a state is there, as it seems, so this round heals nobody
        end = time.monotonic() + LIMIT_S
        while 1 not in old.manager._rounds.folders.look(4).rejoining and time.monotonic() < end:
            time.sleep(0.01)
        run(old, 4)

    together(lambda: run(new, 4), go_on)
    assert new.digest() == old.digest()
    assert new.manager.current_step() == old.manager.current_step() == 4
    assert "state-0002.pt" in caplog.text
    assert not (tmp_path / "ran").exists()


def test_states_of_different_parts_are_refused(uri):
    old = alone(uri, 0, 2)
    run(old, 8)
    new = Replica(ObjectStoreManager(config(uri), 1, 2), 1, fragments=2)
    entered = waiting(new.manager)

    def heal():
        with pytest.raises(RuntimeError, match="the same configuration"):
            run(new, 4)

    together(heal, lambda: after(entered, old, 4))


def test_an_all_reduce_of_a_delayed_sync_moves_while_inner_steps_go_on(uri):
    managers = [ObjectStoreManager(config(uri), r, 2) for r in range(2)]
    tensors = [torch.tensor([1.0]), torch.tensor([3.0])]
    works = []
    for manager, tensor in zip(managers, tensors, strict=True):
        manager.start_quorum()
        works.append(manager.allreduce(tensor))
        manager.disallow_state_dict_read()  # the next inner step begins
    for manager in managers:
        assert manager._sync.over.wait(LIMIT_S)  # nobody waits for it, and it is there
    assert [tensor.item() for tensor in tensors] == [1.0, 3.0]
    assert all(work.wait() for work in works)
    assert [tensor.item() for tensor in tensors] == [2.0, 2.0]
    assert all(manager.should_commit() for manager in managers)


def test_contradictions_are_refused(uri, tmp_path):
    with pytest.raises(ValueError, match=r"needs diloco.uri"):
        ObjectStoreManager(DilocoConfig(), 0, 2)
    with pytest.raises(ValueError, match="rank 2 is not among 2 replicas"):
        ObjectStoreManager(config(uri), 2, 2)
    manager = ObjectStoreManager(config(uri), 0, 2)
    with pytest.raises(ValueError, match=r"diloco.compression"):
        manager.allreduce(torch.ones(1), should_quantize=True)
    manager.register_state_dict_fn("a", print, dict)
    with pytest.raises(ValueError, match="registered already"):
        manager.register_state_dict_fn("a", print, dict)


def test_leaving_is_idempotent_and_ends_a_wait(uri):
    manager = ObjectStoreManager(config(uri, min_replicas=2), 0, 2)
    manager.start_quorum()
    work = manager.allreduce(torch.ones(1))
    threading.Timer(0.2, manager.shutdown).start()
    with pytest.raises(RuntimeError, match="left"):
        work.wait()
    manager.shutdown()


class Trainer:
    """The outer loop as trainers use it, with AdamW inside."""

    def __init__(self, manager: ObjectStoreManager, rank: int, **options) -> None:
        self.rank, self.manager = rank, manager
        generator = torch.Generator().manual_seed(0)
        self.parameters = {f"layer.{i}": nn.Parameter(torch.randn(4, 3, generator=generator)) for i in range(4)}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.05)
        settings = config("memory://", sync_every=4, fragments=2, **options)
        self.outer = Outer(settings, self.parameters, self.optimizer, manager)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for index, parameter in enumerate(self.parameters.values()):
                wave = object_store_replica.gradient(self.rank, self.outer.step, parameter.detach().numpy(), index)
                parameter.grad = torch.from_numpy(wave)
            self.outer.step += 1
            self.outer.trained(10 * (self.rank + 1))
            self.optimizer.step()

    def shared(self) -> dict[str, list]:
        """Originals and momenta; what a compression owes is each replica's own."""
        state = self.outer.state_dict()
        return {name: value.tolist() for name, value in state.items() if not name.endswith("residual")}


@pytest.mark.parametrize("options", [{}, {"fragment_sync_delay": 1, "compression": "bf16"}, {"compression": "topk"}])
def test_trainers_over_the_store_stay_equal_and_one_that_comes_again_catches_up(uri, options):
    pair = [Trainer(ObjectStoreManager(config(uri), r, 2), r, **options) for r in range(2)]
    together(*(lambda t=t: t.train(12) for t in pair))
    assert [t.outer.rounds for t in pair] == [6, 6]
    assert pair[0].outer.metrics()["diloco/participants"] == 2
    assert pair[0].shared() == pair[1].shared()

    again = Trainer(ObjectStoreManager(config(uri), 1, 2), 1, **options)
    entered = waiting(again.manager)

    def peer():
        assert entered.wait(LIMIT_S)
        pair[0].train(2)

    healed, _ = together(lambda: again.outer.catch_up(6), peer)
    assert healed
    again.train(options.get("fragment_sync_delay", 0))  # while that sync's bytes move
    assert again.outer.rounds == pair[0].outer.rounds == 7
    assert again.outer.step == pair[0].outer.step == 14
    assert again.shared() == pair[0].shared()
    together(lambda: pair[0].train(4), lambda: again.train(4))
    assert again.outer.rounds == pair[0].outer.rounds == 9
    assert again.outer.metrics()["diloco/participants"] == 2
    assert again.shared() == pair[0].shared()
