"""What one proc of a trainer does, whether it is alone, the leader of several, or a peer. No Monarch here.

    load    meet the others ─▶ initial model or checkpoint ─▶ shard ─▶ learner ─▶ outer loop, where it is a replica
    step    its share of a step, at the same time as the others ─▶ metrics, equal on all
    save    its shards of the checkpoint; the leader also the policy for everybody
    source  its shards of what is published

All of it but `source` is a collective: see `services.training.sharding`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.remote_rows import RemoteRows
from mesh.messages import LogitsRef, TrainBatch
from services.diloco.config import DilocoConfig
from services.losses.policy import PolicyConfig
from services.models import load_model, load_tokenizer
from services.rollouts.chat import turn_ends
from services.telemetry.spans import Spans
from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
from services.training.hinted import HintedTeacher
from services.training.learner import Learner, needs_reference
from services.training.plan import Hinted, StepPlan
from services.training.policy_model import PolicyModel
from services.training.sharding import ALONE, ComputeDtype, alone, join, shard, whole
from services.training.state import load_state, save_state
from services.tuning import Merger, TuneConfig, prepare, published
from services.weights.config import WeightsConfig

if TYPE_CHECKING:
    from services.diloco.replicas import Outer


class TrainerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    steps: int = Field(60, ge=1, description="Optimizer steps of the run; of each replica, where there are several.")
    replicas: int = Field(
        1, ge=1, description="Trainers, each on rollouts of its own, that average what they learned (see diloco)."
    )
    prefetch: bool = Field(True, description="Take the next batch, and its teacher logits, while a step runs.")
    micro_batch_tokens: int = Field(
        16384, ge=16, description="Tokens per forward pass; padding counts, if there is any."
    )
    packing: bool = Field(
        True, description="Sequences end to end without padding. false: padded, for models that cannot be packed."
    )
    logits_chunk: int = Field(512, ge=1, description="Rows of logits (tokens x vocabulary) in memory at a time.")
    gradient_checkpointing: bool = Field(
        False, description="Compute each layer's activations again in backward: less memory, a third more time."
    )
    checkpoint_every: int = Field(20, ge=1, description="Steps between two checkpoints; one is written at the end too.")
    keep_checkpoints: int = Field(3, ge=1, description="Newest checkpoints that are kept.")
    procs: int = Field(
        1, ge=1, description="Procs of the trainer: the model, its gradients and moments are sharded over them (FSDP2)."
    )
    threads: int = Field(1, ge=1, description="CPU threads of each of the trainer's procs.")
    device: str = Field("cpu", description="Torch device of the trainer; with several procs cpu or cuda, one GPU each.")
    devices: tuple[str, ...] = Field(
        (), description="The GPU of each proc, replica by replica, as CUDA_VISIBLE_DEVICES names it; empty: the first."
    )
    dtype: ComputeDtype = Field(
        "float32", description="What is computed in. Parameters and moments are kept in float32 either way."
    )
    collective_s: float = Field(
        120.0, gt=0, description="Seconds that the trainer's procs wait for each other before the trainer fails."
    )
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(), description="AdamW and its schedule.")

    @model_validator(mode="after")
    def _each_proc_has_its_device(self) -> TrainerConfig:
        if self.devices and self.device != "cuda":
            raise ValueError(
                f'trainer.devices names GPUs and trainer.device is {self.device!r}: set trainer.device = "cuda", or '
                "leave trainer.devices out"
            )
        if self.devices and len(self.devices) != self.procs * self.replicas:
            raise ValueError(
                f"trainer.devices has {len(self.devices)} entries for trainer.procs = {self.procs} and "
                f"trainer.replicas = {self.replicas}: name one GPU per proc of each replica, or leave it out"
            )
        if self.procs > 1 and self.device not in ("cpu", "cuda"):
            raise ValueError(
                f"trainer.device {self.device!r} is one device and trainer.procs is {self.procs}: set trainer.device "
                '= "cuda" and name the GPUs in trainer.devices'
            )
        return self

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPU of each proc, replica by replica; empty where the procs see what there is."""
        procs = self.procs * self.replicas
        if self.devices or self.device != "cuda" or procs == 1:
            return self.devices
        return tuple(map(str, range(procs)))


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Everything that all procs of a trainer are told."""

    config: TrainerConfig
    policy: PolicyConfig
    sdpo: SDPOConfig
    replay: ReplayConfig
    weights: WeightsConfig
    model_path: str  # of the initial policy
    temperature: float  # that rollouts are sampled at
    advantage_scaling: str
    seed: int
    tune: TuneConfig = field(default_factory=TuneConfig)
    diloco: DilocoConfig | None = None  # None: this trainer averages with nobody
    replica: int = 0  # which trainer of the run it is
    lighthouse: str = ""  # its address, where replicas meet over torchft
    watch_kl: bool = False  # measure the KL to the initial policy though no loss has it

    @property
    def inline(self) -> bool:
        """Whether the trainer is its own hinted teacher."""
        return self.sdpo.teacher == "inline" and self.sdpo.alpha > 0


@dataclass(frozen=True, slots=True)
class Healed:
    """What heals with a replica beside its parameters and optimizers (`services.diloco.replicas.Extra`)."""

    save: Callable[[], dict[str, Any]]
    load: Callable[[dict[str, Any]], None]


def answer_to(share: StepPlan, ref: LogitsRef | None, settings: TrainerSettings) -> Hinted | None:
    """The SDPO teacher's answer to a share, to be read chunk by chunk on the event loop that this is called on."""
    if ref is None:
        return None
    loop, chunk_rows = asyncio.get_running_loop(), settings.config.logits_chunk
    rows = RemoteRows.of_plan(ref, share, loop, chunk_rows=chunk_rows, via=settings.weights.via)
    return Hinted.from_reader(rows, ref.row_offsets, accuracy=ref.hinted_accuracy, version=ref.teacher_version)


class TrainerPart:
    """One proc's part of a trainer. `load` first; every method blocks."""

    learner: Learner

    def __init__(self, settings: TrainerSettings, spans: Spans | None = None) -> None:
        self.settings, self.spans = settings, spans or Spans()
        self.replica = ALONE
        self.outer: Outer | None = None
        self.step_n = 0  # steps trained; a replica that heals takes over its peers'

    def load(self, rank: int, size: int, meeting: Any, checkpoint: Path | None, own: bool = True) -> int:
        """Become proc `rank` of `size`, from the checkpoint or as the initial policy; returns the step it stands at.

        `meeting` as in `sharding.join`. `own`: the checkpoint is this replica's; of another one it takes only what all
        share. ValueError for a model or a checkpoint that cannot be used.
        """
        self.close()
        settings, config = self.settings, self.settings.config
        torch.manual_seed(settings.seed)
        self.replica = (
            alone(config.device, config.dtype)
            if size == 1
            else join(rank, size, meeting, device=config.device, limit_s=config.collective_s)
        )
        self.tokenizer = load_tokenizer(settings.model_path)
        # A checkpoint's adapter is merged into its policy; it is trained on beside the initial model, as it began.
        beginning = checkpoint is None or settings.tune.kind == "lora"
        policy_model = self._model(settings.model_path if beginning else f"{checkpoint}/policy")
        reference = self._initial()
        shard(policy_model, self.replica, config.dtype)
        self.inline, self._merge = None, None
        if reference is not None and settings.inline:  # whole on every proc, which asks it about its own share
            self.inline = HintedTeacher(reference.model, reference.model, settings.sdpo.hinted)
            self._merge = Merger.of_model(settings.model_path, settings.tune)
        elif reference is not None:
            shard(reference, self.replica)
        self.learner = Learner(
            policy_model,
            reference,
            self._encode,
            turn_ends(self.tokenizer)[0],
            steps=config.steps,
            optimizer=config.optimizer,
            policy=settings.policy,
            sdpo=settings.sdpo,
            replay=settings.replay,
            temperature=settings.temperature,
            max_tokens=config.micro_batch_tokens,
            spans=self.spans,
            advantage_scaling=settings.advantage_scaling,
            total=self.replica.total,
            watch_kl=settings.watch_kl,
        )
        self.learner.outer = self.outer = self._open_outer(rank, size)
        self.step_n = load_state(checkpoint, self.learner, self.replica) if checkpoint else 0
        if self.outer is not None and checkpoint is not None and not own:
            self.outer.synced_only()
            self.step_n = self.outer.step
        return self.step_n

    def _open_outer(self, rank: int, size: int) -> Outer | None:
        """Join the other replicas. From here on they wait for this one in their syncs, so it comes last."""
        diloco = self.settings.diloco
        if diloco is None:
            return None
        # Here, because a trainer alone needs no torchft.
        from services.diloco.manager import open_manager
        from services.diloco.object_store import ObjectStoreManager
        from services.diloco.replicas import Outer

        number, learner = diloco.first_rank + self.settings.replica, self.learner
        manager: Any
        if diloco.transport == "object_store":
            manager = ObjectStoreManager(diloco, number, diloco.world_size or self.settings.config.replicas)
        else:
            manager = open_manager(
                diloco, replica=number, rank=rank, procs=size,
                lighthouse=self.settings.lighthouse, share=self.replica.shared,
            )  # fmt: skip
        trained = {name: p for name, p in learner.model.named_parameters() if p.requires_grad}
        taid = Healed(learner.taid.state_dict, learner.taid.load_state_dict)
        return Outer(diloco, trained, learner.optimizer, manager, extra=taid)

    def catch_up(self, rounds: int, limit_s: float) -> int:
        """Heal from a peer that stands at `rounds` syncs or more, at its next one; returns the step it stands at then.

        The step it stood at before when no peer came to a sync within `limit_s`.
        """
        assert self.outer is not None
        if self.outer.catch_up(rounds, limit_s):
            self.step_n = self.outer.step
        return self.step_n

    def leave(self) -> None:
        """Average with nobody from now on: the others need not wait for this replica."""
        if self.outer is not None:
            self.outer.close()

    def shares(self, batch: TrainBatch) -> list[StepPlan]:
        """What each proc does of a step, by rank."""
        plan = self.learner.plan(batch, self.replica.size)
        return [plan.share(rank, self.replica.size) for rank in range(self.replica.size)]

    def step(self, share: StepPlan, hinted: Hinted | None) -> tuple[dict[str, float], str]:
        """Train this proc's share; the step's metrics, and why teacher rows could not be read here ("": they were)."""
        if self.inline is not None and share.contexts:
            # Only now: what it says of the contexts holds as long as it has the weights that it has now.
            with self.spans("trainer/teacher"):
                rows = self.inline.align(share.contexts)
            hinted = Hinted.from_reader(rows.in_order(), rows.row_offsets, version=rows.version)
        metrics = self.learner.step(share, hinted)
        self.step_n = share.batch.id + 1 if self.outer is None else self.outer.step
        if self.inline is not None and self.settings.sdpo.hinted.weights != "initial":
            with self.spans("trainer/teacher"):
                weights = {name: whole(p.detach()) for name, p in self.source().items()}
                self.inline.follow(self.step_n, self._merge(weights) if self._merge else weights)
        return metrics, hinted.failure if hinted is not None else ""

    def save(self, path: Path, step: int) -> None:
        """Write this proc's part of the checkpoint of `step` into the folder `path`."""
        save_state(path, self.learner, self.tokenizer, step, self.replica)

    def source(self) -> dict[str, torch.nn.Parameter]:
        """What readers get: what is trained; the rest they have."""
        return published(self.learner.model)

    @property
    def computed(self) -> torch.dtype | None:
        """What is computed in, where that is not what parameters are kept in."""
        return None if self.settings.config.dtype == "float32" else getattr(torch, self.settings.config.dtype)

    def close(self) -> None:
        self.leave()
        self.replica.close()

    def _model(self, path: str) -> PolicyModel:
        """The policy in float32, whole. It is sharded from here on to its device, where that is more than one's."""
        config = self.settings.config
        device = config.device if self.replica.mesh is None else "cpu"
        return PolicyModel(
            prepare(load_model(path, "float32", device), self.settings.tune),
            packing=config.packing,
            logits_chunk=config.logits_chunk,
            checkpointing=config.gradient_checkpointing,
        )

    def _initial(self) -> PolicyModel | None:
        """The initial policy, where something is compared with it or it is shown hints."""
        settings, config = self.settings, self.settings.config
        if not settings.inline and not needs_reference(settings.policy, settings.replay, settings.watch_kl):
            return None
        dtype = settings.sdpo.hinted.dtype if settings.inline else config.dtype
        device = config.device if self.replica.mesh is None or settings.inline else "cpu"
        model = load_model(settings.model_path, dtype, device)
        return PolicyModel(model, packing=config.packing, logits_chunk=config.logits_chunk)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
