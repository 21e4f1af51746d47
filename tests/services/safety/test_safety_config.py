"""What [safety] may say, and what is said back when it may not."""

import pytest
from pydantic import ValidationError

from launch.config import ConfigError, load_config, validated
from services.runs.folder import RunFolder
from services.safety import SafetyConfig


def test_it_is_off_unless_configured():
    assert not SafetyConfig().on
    assert SafetyConfig(evaluate_every=5).on


@pytest.mark.parametrize(
    "setting", [{"kl_hard_stop": 0.5}, {"patience": 2}, {"on_fire": "warn"}, {"held_out_tasks": 8}]
)
def test_a_guard_without_an_evaluation_is_refused_with_the_fix(setting):
    (name,) = setting
    with pytest.raises(ValidationError, match=rf"{name} = .* set evaluate_every, e.g. 10, or leave {name} out"):
        SafetyConfig(**setting)


def test_an_evaluation_of_no_task_is_refused():
    with pytest.raises(ValidationError, match="held_out_tasks"):
        SafetyConfig(evaluate_every=5, held_out_tasks=0)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (["safety.gap_limit=0.3"], "set evaluate_every"),
        (["safety.evaluate_every=5", "trainer.steps=10"], "safety.min_steps 20 and safety.evaluate_every 5 must be"),
        (["safety.evaluate_every=90", "safety.min_steps=5"], "less than trainer.steps"),
        (["safety.evaluate_every=5", "safety.hold_s=200"], "generator.engine.update_limit_s 120: new weights wait"),
    ],
)
def test_what_contradicts_other_sections_is_refused_with_the_fix(settings, fix):
    with pytest.raises(ConfigError) as error:
        load_config(None, settings)
    assert fix in str(error.value)


def test_a_resolved_config_with_and_without_a_guard_reads_back_equal(tmp_path):
    for number, settings in enumerate([[], ["safety.evaluate_every=5", "safety.kl_hard_stop=0.5"]]):
        config, run = load_config(None, settings), RunFolder(tmp_path, f"clover{number}")
        run.write_config(config.resolved())
        assert validated(run.read_config()) == config
