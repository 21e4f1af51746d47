"""Settings of the outer loop that contradict each other are refused, and the message says what to set."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.diloco.config import DilocoConfig


def test_the_defaults_fit_each_other() -> None:
    assert DilocoConfig().join_s > DilocoConfig().heartbeat_timeout_s


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"heartbeat_s": 2.0}, "heartbeat_timeout_s 5 must be at least 3 x heartbeat_s .* raise heartbeat_timeout_s"),
        ({"join_s": 5.0}, "join_s 5 must be longer than heartbeat_timeout_s .* raise join_s"),
        ({"quorum_s": 60.0}, "quorum_s 60 must be longer than join_s .* raise quorum_s"),
        ({"collective_s": 90.0}, "quorum_s 90 must be longer than collective_s .* raise quorum_s"),
        ({"connect_s": 100.0}, "quorum_s 90 must be longer than connect_s .* raise quorum_s"),
        ({"give_up_s": 90.0}, "give_up_s 90 must be longer than quorum_s .* raise give_up_s"),
        ({"poll_s": 30.0}, "grace_s 30 must be longer than poll_s .* raise grace_s"),
        ({"first_grace_s": 10.0}, "first_grace_s 10 is shorter than grace_s 30.* raise first_grace_s"),
        ({"sync_every": 10, "fragments": 3}, "set it to e.g. 9"),
        ({"sync_every": 10, "fragments": 2, "fragment_sync_delay": 5}, "fragment_sync_delay 5 must be less than"),
    ],
)
def test_contradictions_are_refused_with_the_fix(settings: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        DilocoConfig(**settings)


def test_three_heartbeats_in_the_time_out_are_enough() -> None:
    assert DilocoConfig(heartbeat_s=1.0, heartbeat_timeout_s=3.0).heartbeat_s == 1.0
