"""The configuration of a run: every section, the rules between sections, and how it is read.

Each section's model stands beside the class it configures; this module only puts them together. A run is started from
a TOML file, one of yours or one of `launch/presets`, plus `--set section.key=value`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from actors.generator import GeneratorConfig
from actors.rewarder import RewarderConfig
from actors.teacher_pool import TeacherPoolConfig
from actors.trainer_part import TrainerConfig
from mesh.supervision import SupervisionConfig
from services.diloco.config import DilocoConfig
from services.environments.config import EnvironmentConfig
from services.losses.policy import ADVANTAGE_SCALING, PolicyConfig
from services.rollouts.buffer import BufferConfig
from services.safety.config import SafetyConfig
from services.training.config import ReplayConfig, SDPOConfig
from services.tuning import TuneConfig
from services.weights.config import WeightsConfig

DEMO_LENGTH = 400  # tokens that the demo's model is asked to handle where nothing else is set
PRESETS = Path(__file__).parent / "presets"


class ConfigError(ValueError):
    """The configuration cannot be used. The message has one line per fault, each with its fix."""


class RunConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(None, description="Name of the run's folder; unset: the time and a word.")
    root: str = Field("runs", description="Folder that holds the runs.")
    seed: int = Field(0, description="Seed of the task stream and of everything that is drawn.")
    evaluate: int = Field(0, ge=0, description="Held-out tasks played with the final policy at the end of the run.")
    sample_every: int = Field(5, ge=1, description="Steps between two readable rollout samples.")


class ModelConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str | None = Field(None, description="Folder of a Hugging Face causal LM with a chat template.")
    bundled: Literal["demo", "smollm2-135m-instruct"] | None = Field(
        None,
        description="Instead of a path, a model that is made or converted on first use and cached: demo, the tiny one "
        "of the toolbox (also when neither is set), or smollm2-135m-instruct (extra smollm2).",
    )

    @model_validator(mode="after")
    def _one_model(self) -> ModelConfig:
        if self.path is not None and self.bundled is not None:
            raise ValueError(f"path and bundled name two models: remove bundled = {self.bundled!r}, or path")
        return self

    @property
    def is_demo(self) -> bool:
        return self.path is None and self.bundled in (None, "demo")


class Config(BaseModel):
    """A whole run."""

    model_config = ConfigDict(extra="forbid")

    run: RunConfig = Field(default_factory=lambda: RunConfig(), description="The run as a whole.")
    model: ModelConfig = Field(default_factory=lambda: ModelConfig(), description="The policy's starting point.")
    environment: EnvironmentConfig = Field(
        default_factory=lambda: EnvironmentConfig(), description="The OpenEnv environment."
    )
    generator: GeneratorConfig = Field(default_factory=lambda: GeneratorConfig(), description="Who plays episodes.")
    rollouts: BufferConfig = Field(default_factory=lambda: BufferConfig(), description="Groups, leases and staleness.")
    rewarder: RewarderConfig = Field(default_factory=lambda: RewarderConfig(), description="Who scores rollouts.")
    trainer: TrainerConfig = Field(default_factory=lambda: TrainerConfig(), description="Steps and checkpoints.")
    diloco: DilocoConfig = Field(
        default_factory=lambda: DilocoConfig(), description="How trainer replicas average what they learned."
    )
    tune: TuneConfig = Field(default_factory=lambda: TuneConfig(), description="What is trained of the policy.")
    policy: PolicyConfig = Field(default_factory=lambda: PolicyConfig(), description="Channel 1: the policy objective.")
    sdpo: SDPOConfig = Field(default_factory=lambda: SDPOConfig(), description="Channel 2: hint distillation.")
    replay: ReplayConfig = Field(default_factory=lambda: ReplayConfig(), description="Channel 3: teacher preferences.")
    teachers: TeacherPoolConfig = Field(
        default_factory=lambda: TeacherPoolConfig(), description="Outside models that replay the student's turns."
    )
    weights: WeightsConfig = Field(default_factory=lambda: WeightsConfig(), description="How weights travel.")
    safety: SafetyConfig = Field(
        default_factory=lambda: SafetyConfig(), description="Evaluation beside training, and the guard that reads it."
    )
    supervision: SupervisionConfig = Field(
        default_factory=lambda: SupervisionConfig(), description="When an actor counts as dead, and what then."
    )

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        episode, engine = self.generator.episode, self.generator.engine
        if self.model.is_demo and "max_length" not in engine.model_fields_set:
            engine.max_length = DEMO_LENGTH
        if self.model.is_demo and self.environment.toolbox and self.environment.toolbox.words != "terse":
            raise ValueError(
                f'the demo\'s model does not know environment.toolbox.words "{self.environment.toolbox.words}": set '
                'model.path or model.bundled to a language model, or words = "terse"'
            )
        if self.generator.episodes > self.environment.max_sessions:
            raise ValueError(
                f"generator.episodes {self.generator.episodes} exceeds environment.max_sessions "
                f"{self.environment.max_sessions}: every episode needs a session; raise the one or lower the other"
            )
        if episode.max_tokens > engine.max_length:
            raise ValueError(
                f"generator.episode.max_tokens {episode.max_tokens} exceeds generator.engine.max_length "
                f"{engine.max_length}: lower the first or raise the second"
            )
        if self.replay.beta and self.teachers.backend == "none":
            raise ValueError("replay.beta > 0 needs teachers: set teachers.backend, or replay.beta = 0")
        if self.sdpo.alpha and not episode.hint_layers:
            raise ValueError("sdpo.alpha > 0 needs hints: set generator.episode.hint_layers, or sdpo.alpha = 0")
        if self.rollouts.total_batches not in (None, self.trainer.steps):
            raise ValueError("rollouts.total_batches follows trainer.steps: remove it, and set trainer.steps")
        if "keep_saves" in self.rollouts.model_fields_set:
            raise ValueError("rollouts.keep_saves follows trainer.keep_checkpoints: remove it, and set the latter")
        self._check_replicas()
        self._check_safety()
        scaling = _scaling(self.policy)
        if "advantage_scaling" in self.rollouts.model_fields_set and self.policy.kl_in_reward:
            scaling = self.rollouts.advantage_scaling
        if self.policy.kl_in_reward and scaling != "none":
            raise ValueError(
                f"policy.kl_in_reward is exact only without standard-deviation scaling (it is {scaling}): "
                'set policy.objective = "dr_grpo", or policy.kl_in_reward = false'
            )
        return self

    @property
    def averages(self) -> bool:
        """Whether trainers average with others: with each other, or with those of other runs over an object store."""
        return self.trainer.replicas > 1 or self.diloco.transport == "object_store"

    def share(self, replica: int) -> tuple[int, int]:
        """Which part of the tasks is that replica's, of how many parts.

        Runs that share an object store have one seed, so that they start alike, and deal its tasks out among them.
        """
        return self.diloco.first_rank + replica, self.diloco.world_size or self.trainer.replicas

    def _check_replicas(self) -> None:
        trainer, diloco = self.trainer, self.diloco
        if not self.averages:
            return
        if self.generator.count < trainer.replicas:
            raise ValueError(
                f"trainer.replicas {trainer.replicas} exceeds generator.count {self.generator.count}: each trainer "
                f"needs a generator of its own; set generator.count to {trainer.replicas} or more"
            )
        if trainer.steps % diloco.sync_every:
            raise ValueError(
                f"trainer.steps {trainer.steps} is no multiple of diloco.sync_every {diloco.sync_every}: the last "
                "steps would be averaged with nobody; change one of them"
            )
        world = trainer.replicas if diloco.world_size is None else diloco.world_size
        if diloco.first_rank + trainer.replicas > world:
            raise ValueError(
                f"diloco.world_size {world} has no room for trainer.replicas {trainer.replicas} from "
                f"diloco.first_rank {diloco.first_rank} on: raise diloco.world_size"
            )
        if diloco.min_replicas > world:
            raise ValueError(
                f"diloco.min_replicas {diloco.min_replicas} exceeds the {world} replicas there are: no sync could ever "
                f"happen; set it to {world} or less"
            )
        if diloco.transport == "object_store" and trainer.procs > 1:
            raise ValueError(
                'diloco.transport = "object_store" averages whole models, not shards: set trainer.procs = 1, or '
                'diloco.transport = "torchft"'
            )
        if diloco.transport == "torchft" and world != trainer.replicas:
            raise ValueError(
                'diloco.world_size and diloco.first_rank are for diloco.transport = "object_store": set that, or leave '
                "them out"
            )

    def _check_safety(self) -> None:
        safety, steps, update_limit_s = self.safety, self.trainer.steps, self.generator.engine.update_limit_s
        if not safety.on:
            return
        if max(safety.min_steps, safety.evaluate_every or 0) >= steps:
            raise ValueError(
                f"safety.min_steps {safety.min_steps} and safety.evaluate_every {safety.evaluate_every} must be less "
                f"than trainer.steps {steps}: the guard could never fire; lower them"
            )
        if safety.hold_s >= update_limit_s:
            raise ValueError(
                f"safety.hold_s {safety.hold_s:g} must be less than generator.engine.update_limit_s "
                f"{update_limit_s:g}: new weights wait for an evaluation; lower the first or raise the second"
            )

    def resolved(self) -> dict[str, Any]:
        """Every setting as this run uses it, to be written down; reads back as an equal configuration.

        What `buffer` derives from other sections is left out: it would stay behind when those are changed on resume.
        """
        data = self.model_dump(mode="json")
        for derived in {"advantage_scaling", "keep_saves"} - self.rollouts.model_fields_set:
            del data["rollouts"][derived]
        return data

    def buffer(self) -> BufferConfig:
        """The rollout buffer's settings with what other sections decide filled in."""
        derived: dict[str, Any] = {
            "total_batches": self.trainer.steps,
            "keep_saves": self.trainer.keep_checkpoints,
        }
        if "advantage_scaling" not in self.rollouts.model_fields_set:
            derived["advantage_scaling"] = _scaling(self.policy)
        if not self.replay.beta:
            derived["replay_which"] = "none"
        return self.rollouts.model_copy(update=derived)


def _scaling(policy: PolicyConfig) -> str:
    return {"group": "group_std", "batch": "batch_std", "none": "none"}[ADVANTAGE_SCALING[policy.objective]]


def load_config(path: Path | None = None, settings: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: the demo) and apply `section.key=value` settings. ConfigError says what to mend.

    A path where no file is may name a bundled preset: `hard`, `hard.toml` or `presets/hard.toml`.
    """
    path = _preset(path or Path("demo"))
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return validated(data, " and ".join([str(path), *(f"--set {setting}" for setting in settings)]), settings)


def _preset(path: Path) -> Path:
    """The path itself if a file is there, else the bundled preset of that name. ConfigError lists what there is."""
    if path.is_file():
        return path
    bundled = PRESETS / f"{path.name.removesuffix('.toml')}.toml"
    if str(path.parent) in (".", "presets") and bundled.is_file():
        return bundled
    names = ", ".join(sorted(preset.stem for preset in PRESETS.glob("*.toml")))
    raise ConfigError(f"no config file {path}, and no bundled preset of that name; there are: {names}")


def validated(data: dict[str, Any], source: str = "the configuration", settings: Sequence[str] = ()) -> Config:
    """A `Config` from nested data with `section.key=value` settings on top. ConfigError, one line per fault."""
    for setting in settings:
        _apply(data, setting)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [_fault(fault) for fault in error.errors()]
        raise ConfigError(f"{source}: " + "\n".join(lines)) from None


def _fault(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = ", ".join(_names_beside(fault["loc"]))
        return f"{where} is no setting; known there: {known}"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _names_beside(loc: tuple[Any, ...]) -> list[str]:
    """The settings that exist where an unknown one was given."""
    model: Any = Config
    for part in loc[:-1]:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        model = (section_of(field) if field else model) or model
    return sorted(model.model_fields)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model class of a field that is a section (also `Section | None` and `list[Section]`), else None."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def settings_of(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting by its dotted name, in the order of the sections."""
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is not None and field.annotation in (section,):
            yield from settings_of(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _apply(data: dict[str, Any], setting: str) -> None:
    """`a.b=value`, the value as TOML, or else as a plain string."""
    name, equals, text = setting.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {setting!r} is not section.key=value, e.g. --set trainer.steps=50")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for part in parts[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {setting!r}: {part} is a value, not a section")
    data[parts[-1]] = value
