"""What a configuration may say, and what is said back when it may not."""

import tomllib
from pathlib import Path

import pytest

from launch.config import PRESETS, Config, ConfigError, load_config, settings_of, validated
from services.runs.folder import RunFolder


def refused(*settings):
    with pytest.raises(ConfigError) as error:
        load_config(None, settings)
    return str(error.value)


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_preset_is_valid(preset):
    assert load_config(preset).trainer.steps > 0


def test_settings_on_the_command_line_win_over_the_file():
    config = load_config(None, ["trainer.steps=7", "run.name=clover", "sdpo.loss.beta = 0.5", "policy.objective=grpo"])
    assert (config.trainer.steps, config.run.name) == (7, "clover")
    assert (config.sdpo.loss.beta, config.policy.objective) == (0.5, "grpo")


def test_an_engine_can_be_chosen_by_its_name_alone():
    assert load_config(None, ["generator.engine=vllm"]).generator.engine.engine == "vllm"


def test_an_unknown_setting_is_refused_with_the_ones_that_exist():
    message = refused("trainer.stepz=7")
    assert "trainer.stepz is no setting" in message
    assert "steps" in message


def test_a_wrong_type_names_the_setting():
    assert "trainer.steps" in refused("trainer.steps=many")


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (["generator.episodes=500"], "environment.max_sessions"),
        (["generator.episode.max_tokens=4000"], "generator.engine.max_length"),
        (["teachers.backend=none"], "replay.beta = 0"),
        (["generator.episode.hint_layers=[]"], "sdpo.alpha = 0"),
        (["rollouts.total_batches=3"], "set trainer.steps"),
        (["rollouts.keep_saves=3"], "trainer.keep_checkpoints"),
        (["policy.kl_in_reward=true"], "set kl_beta > 0"),
        (["policy.kl_in_reward=true", "policy.kl_beta=0.1", "policy.objective=grpo"], 'policy.objective = "dr_grpo"'),
        (["rollouts.min_group_size=9"], "set min_group_size to 8 or less"),
        (["teachers.pool.agreement_threshold=3", "teachers.local.count=2"], "teachers.local.count"),
        (["sdpo.loss.support=student"], "top_k"),
        (["model.path=/m", "model.bundled=demo"], "path and bundled name two models"),
        (["environment.toolbox.words=plain"], "set model.path or model.bundled"),
        (["trainer"], "is not section.key=value"),
        (["run.name.first=a", "run.name=b", "run.name.last=c"], "is a value, not a section"),
    ],
)
def test_contradictions_are_refused_with_the_fix(settings, fix):
    assert fix in refused(*settings)


def test_a_missing_or_broken_file_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[trainer\nsteps = 3")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(tmp_path / "broken.toml")


@pytest.mark.parametrize("name", ["hard", "hard.toml", "presets/hard.toml"])
def test_a_bundled_preset_is_found_by_its_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hard").mkdir()  # a folder of that name is no config file
    assert load_config(Path(name)).environment.toolbox.level == "hard"


def test_a_file_of_ones_own_comes_before_the_preset_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hard.toml").write_text("[trainer]\nsteps = 3")
    assert load_config(Path("hard.toml")).trainer.steps == 3


@pytest.mark.parametrize("name", ["harder", "/elsewhere/hard.toml"])
def test_where_neither_file_nor_preset_is_the_presets_are_listed(name):
    with pytest.raises(ConfigError, match="no bundled preset of that name; there are: demo, hard, smollm2-toolbox"):
        load_config(Path(name))


def test_only_models_that_are_not_the_demos_may_be_spoken_to_plainly():
    assert load_config(None, ["model.bundled=smollm2-135m-instruct", "environment.toolbox.words=plain"])
    assert load_config(None, ["model.path=/some/model", "environment.toolbox.words=plain"])


def test_every_setting_is_documented():
    undocumented = [name for name, field in settings_of(Config) if not field.description]
    assert undocumented == []


def test_a_resolved_config_reads_back_equal(tmp_path):
    config = load_config(None, ["trainer.steps=3", "teachers.local.count=2", "policy.objective=grpo"])
    run = RunFolder(tmp_path, "clover")
    run.write_config(config.resolved())
    assert validated(run.read_config()) == config
    assert tomllib.loads(run.config.read_text())["trainer"]["steps"] == 3


def test_the_buffer_takes_what_other_sections_decide():
    buffer = load_config(None, ["trainer.steps=5", "policy.objective=grpo", "replay.beta=0"]).buffer()
    assert (buffer.total_batches, buffer.advantage_scaling, buffer.replay_which) == (5, "group_std", "none")


def test_a_changed_objective_changes_what_follows_from_it_on_resume(tmp_path):
    run = RunFolder(tmp_path, "clover")
    run.write_config(load_config(None).resolved())
    assert validated(run.read_config(), settings=["policy.objective=grpo"]).buffer().advantage_scaling == "group_std"
