"""The log of deaths: what is written down at once, and how it reads afterwards."""

from services.runs.deaths import FILE, DeathLog, read_deaths


def test_a_death_reads_with_its_return_and_the_first_step_that_ended_after_it(tmp_path):
    log = DeathLog(tmp_path)
    log.lost("generator-1", "generator", 0, "its process 7 is gone")
    (noticed,) = read_deaths(tmp_path)
    assert (noticed.back_at, noticed.step_at) == (None, None)
    log.stepped([{"step": 3, "finished_at": noticed.noticed_at - 1}])  # it had ended before
    log.stepped(
        [{"step": 4, "finished_at": noticed.noticed_at + 1}, {"step": 5, "finished_at": noticed.noticed_at + 2}]
    )
    log.back("generator-1", 1)
    log.lost("rewarder-0", "rewarder", 2, "silent for 20 s")
    log.close()
    first, second = read_deaths(tmp_path)
    assert first.step_at == first.noticed_at + 1
    assert first.back_at >= first.noticed_at
    assert "generator-1 was lost (its process 7 is gone), back after" in str(first)
    assert (second.member, second.incarnation, second.back_at) == ("rewarder-0", 2, None)
    assert "not back" in str(second)


def test_a_line_that_was_cut_short_is_left_out_and_removed_by_the_next_driver(tmp_path):
    DeathLog(tmp_path).lost("trainer-0", "trainer", 0, "gone")
    with (tmp_path / FILE).open("a") as file:
        file.write('{"event": "los')
    assert [death.member for death in read_deaths(tmp_path)] == ["trainer-0"]
    DeathLog(tmp_path).back("trainer-0", 1)
    (death,) = read_deaths(tmp_path)
    assert death.back_at is not None
    assert read_deaths(tmp_path / "nowhere") == []
