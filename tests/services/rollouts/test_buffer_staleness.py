"""The bound on staleness, with slow generators and random interleavings."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_builders import balanced, opened, rollout


@settings(max_examples=40, deadline=None)
@given(
    bound=st.integers(0, 2),
    stale=st.sampled_from(["drop", "retry"]),
    choices=st.lists(
        st.tuples(st.sampled_from(["claim", "deliver", "deliver", "take"]), st.integers(0, 50)), max_size=60
    ),
)
def test_no_trained_token_is_older_than_the_bound(bound, stale, choices):
    with tempfile.TemporaryDirectory() as folder:
        buffer = opened(Path(folder), max_staleness=bound, stale_tasks=stale, groups_per_batch=1)
        in_flight, version = [], 0
        for what, number in choices:
            if what == "claim":
                in_flight += [(lease, version) for lease in buffer.claim("g", version, 1 + number % 3)]
            elif what == "deliver" and in_flight:
                lease, began = in_flight.pop(number % len(in_flight))
                buffer.put(rollout(lease, began, float(lease.member), newest=version))
            elif what == "take" and (batch := buffer.take(version)) is not None:
                for member in batch.groups[0].rollouts:
                    assert all(version - s.version <= bound for q in member.sequences for s in q.versions)
                buffer.trained(version)
                version += 1
        assert balanced(buffer.accounts())
        if stale == "retry":
            assert "stale" not in buffer.accounts()["dropped"]
        buffer.close()
