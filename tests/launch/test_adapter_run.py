"""A run that trains an adapter: only it travels, a checkpoint's policy is whole, and a resume goes on with it."""

import pytest
import torch
from launch_runs import metrics, milkweed, settings

from services.demo.warm_start import demo_model
from services.models import load_model

RANK = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    demo_model("easy")  # once, before anything is timed
    root = tmp_path_factory.mktemp("runs")
    arguments = settings(
        root, "adapter", "tune.kind=lora", f"tune.rank={RANK}", "sdpo.hinted.weights=ema", "trainer.steps=2"
    )
    done = milkweed("run", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    done = milkweed("resume", root / "adapter", "--set", "trainer.steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "adapter"


def test_only_the_adapter_travels_and_generators_play_with_it_merged(finished):
    model = load_model(str(demo_model("easy")))
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    trained = sum(RANK * (m.in_features + m.out_features) for m in linear)
    rows = metrics(finished)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["weights/bytes"] == pytest.approx(4 * trained, rel=0.05)  # aligned
        assert row["mismatch/kl"] < 1e-2


def test_the_policy_of_a_checkpoint_is_the_initial_model_with_the_adapter_merged(finished):
    from peft import PeftModel

    checkpoint = finished / "checkpoints" / "step-3"
    policy, ids = load_model(str(checkpoint / "policy")), torch.arange(3, 20)[None]
    adapted = PeftModel.from_pretrained(load_model(str(demo_model("easy"))), str(checkpoint / "adapter")).eval()
    with torch.no_grad():
        assert torch.allclose(policy(ids).logits, adapted(ids).logits, atol=1e-4)
        assert not torch.allclose(policy(ids).logits, load_model(str(demo_model("easy")))(ids).logits, atol=1e-4)
