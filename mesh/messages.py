"""What travels between actors: plain dataclasses, cheap to pickle, free of torch.

Token positions are half-open `[start, stop)` indices into the `token_ids` of one `Sequence`. Nothing is re-tokenized
after it was sampled: training reads the exact ids recorded here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

RolloutStatus = Literal["finished", "truncated", "failed"]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem of the environment. A group is `group_size` rollouts of the same task."""

    id: str
    index: int  # position in the task stream; the stream is a pure function of the run's seed
    seed: int  # given to the environment's `reset`: the same seed is the same problem in every session


@dataclass(frozen=True, slots=True)
class Lease:
    """The right, until it expires, to produce one member of a task's group. Returned with the rollout."""

    id: str
    task: Task
    member: int  # 0 .. group_size - 1
    expires_in_s: float
    attempt: int = 0  # earlier ones of this member that ended by what was sampled, or by their time

    @property
    def rollout_id(self) -> str:
        return f"{self.task.id}/{self.member}"

    @property
    def sampled_as(self) -> str:
        """What decides the random numbers: the same for a lease that takes the place of one that was given back."""
        return f"{self.task.seed} {self.rollout_id} {self.attempt}"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, stop)` of a sequence were sampled by weights `version`."""

    version: int
    start: int
    stop: int


@dataclass(slots=True)
class Sequence:
    """One token sequence as the model saw it. Only tokens inside `sampled` were chosen by the policy."""

    token_ids: list[int]
    logprobs: list[float]  # one per token id: the behaviour policy's at the sampling temperature, 0.0 where not sampled
    sampled: list[tuple[int, int]]  # half-open spans, ascending, not touching each other's tokens
    versions: list[VersionSpan]  # cover exactly the sampled tokens


@dataclass(slots=True)
class ErrorSite:
    """A turn that the environment refused, and where a hint would have stood in front of it.

    The hinted context is `token_ids[:cut] + hint_ids` of the turn's sequence; it ends exactly where the turn's first
    token is predicted, so turn token `j` is predicted at `turn.start - 1 + j` by the student and at
    `cut + len(hint_ids) - 1 + j` by the hinted teacher.
    """

    kind: str  # tool_not_found | json_decode | type_error | runtime_error | repeated_failure | the environment's own
    error_text: str
    hint: str | None = None
    hint_layer: str | None = None  # "template" | "raw_error": the layer that produced the hint
    cut: int = 0
    hint_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Turn:
    """One action of the agent and what came of it."""

    sequence: int  # index into Rollout.sequences
    start: int
    stop: int  # half-open span of the action's sampled tokens, the end-of-turn token included
    text: str  # the action as the environment received it
    observation: str  # what the environment answered
    reward: float | None = None
    error: ErrorSite | None = None


@dataclass(slots=True)
class Rollout:
    """One finished episode. `reward is None` means unscorable: excluded from baselines, counted, never 0."""

    id: str
    task: Task
    member: int
    lease_id: str
    sequences: list[Sequence]
    turns: list[Turn]
    messages: list[dict[str, str]]  # the chat as the environment and the agent wrote it: {"role", "content"}
    status: RolloutStatus
    env_reward: float | None = None
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)  # by reward function
    reason: str = ""  # why it was truncated, failed or could not be scored
    flags: list[str] = field(default_factory=list)  # forbidden actions, "<kind>/<rule>@<turn>"; see services.safety
    generator: str = ""
    seconds: float = 0.0

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that produced a token of this rollout; None when nothing was sampled."""
        return min((s.version for q in self.sequences for s in q.versions), default=None)

    @property
    def sampled_tokens(self) -> int:
        return sum(stop - start for q in self.sequences for start, stop in q.sampled)


@dataclass(slots=True)
class TraceState:
    """A moment at which somebody acted: what was visible, and what the student did."""

    state_id: str  # "<rollout id>#<turn>"
    messages: list[dict[str, str]]  # everything before the action
    student_action: str


@dataclass(slots=True)
class TeacherCallResult:
    """One teacher's answer about one state, or why there is none."""

    state_id: str
    teacher: str
    text: str | None
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    from_ledger: bool = False  # answered from the ledger of an earlier, paid call


@dataclass(slots=True)
class PreferencePair:
    """Teachers agreed on `chosen` where the student did `rejected`; `prompt_ids` and `rejected_ids` are exact."""

    state_id: str
    rollout_id: str
    messages: list[dict[str, str]]
    chosen: str  # the original text of the first teacher of the consensus
    rejected: str
    teachers: list[str]  # who agreed on `chosen`
    prompt_ids: list[int] = field(default_factory=list)
    rejected_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DelayedReward:
    """What the teachers said about one finished rollout; arrives whenever they are done."""

    rollout_id: str
    states: int  # states that were replayed
    answered: int  # (state, teacher) calls that got an answer
    pairs: list[PreferencePair]
    cost_usd: float = 0.0


@dataclass(slots=True)
class Group:
    """All rollouts of one task with their advantages, ready to be trained."""

    task: Task
    rollouts: list[Rollout]
    advantages: list[float]  # one per rollout; exactly 0.0 for unscorable ones and for dead groups
    dead: bool  # every scorable reward equal, or fewer than two of them
    staleness: int


@dataclass(slots=True)
class TrainBatch:
    """What one optimizer step trains: whole groups, and the preference pairs that arrived since the last one."""

    id: int  # consecutive from 0; batch `id` is trained by step `id`, whose weights are version `id`
    groups: list[Group]
    pairs: list[PreferencePair]
    counts: dict[str, float] = field(default_factory=dict)  # buffer's figures at the time, for the metrics


@dataclass(slots=True)
class HintedContext:
    """One error site as the SDPO teacher gets it."""

    prompt_ids: list[int]  # the hinted context, up to and including the position that predicts the first turn token
    turn_ids: list[int]  # the student's sampled tokens of the failing turn
    task: Task
    actions: list[str]  # texts of the turns before this one, to bring an environment to the same state


@dataclass(slots=True)
class RegionRef:
    """Where a registered, read-only byte region can be read from."""

    nbytes: int
    host: str
    shm_path: str | None  # readers on the same host map this file
    rdma: Any | None  # a tuple of monarch.rdma.RDMABuffer: consecutive blocks, each read whole


@dataclass(slots=True)
class TensorSpec:
    """One tensor inside a flat snapshot, or the box of it that one rank of a sharded trainer holds.

    `offset` and `nbytes` are bytes; offsets are 64-byte aligned. A box may be empty.
    """

    name: str
    shape: tuple[int, ...]  # of what lies here
    dtype: str  # "float32", "bfloat16", …
    offset: int
    nbytes: int
    full_shape: tuple[int, ...]  # of the whole tensor; equal to `shape` where it is not sharded
    start: tuple[int, ...]  # index of the box's first element in the whole tensor; `start[0]` is its first row


@dataclass(slots=True)
class DeltaSegment:
    """The changed words of one block: where they lie in the delta's region, and how many there are."""

    offset: int
    words: int
    gap_bytes: int  # the positions, as `services.weights.delta` writes them; the words follow


@dataclass(slots=True)
class DeltaRef:
    """What turns the blocks of one version of a shard into those of the next."""

    region: RegionRef
    word_bytes: int
    base_checksums: list[int]  # per block: of the bytes that the delta is to be applied to
    segments: list[DeltaSegment | None]  # per block; None: so much changed that the block is better read whole


@dataclass(slots=True)
class ShardRef:
    """One rank's part of a published version. Its flat bytes are read and verified in blocks of `block_bytes`."""

    specs: list[TensorSpec]
    region: RegionRef | None  # None: the tensors are in the store of the version
    block_bytes: int = 0
    checksums: list[int] = field(default_factory=list)  # one per block
    density: float | None = None  # share of words that differ from the version before; None: not compared
    delta: DeltaRef | None = None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


@dataclass(slots=True)
class WeightsRef:
    """A published version of the policy. Readers pull it; its bytes never change under this version number."""

    version: int
    shards: list[ShardRef]  # one per rank of the trainer; together they make whole tensors
    lease_id: str = ""  # held while reading: the publisher does not reuse the memory before it is released or expires
    store: Any | None = None  # a torchstore that holds the tensors: the reference of its controller, an actor


@dataclass(slots=True)
class LogitsRef:
    """Hint-conditioned logits of the aligned positions only: `rows` rows over `vocab` tokens in registered memory.

    Context `i` of the request owns rows `row_offsets[i] : row_offsets[i + 1]`: one per aligned turn token, from the
    turn's first on.
    """

    id: str
    region: RegionRef
    rows: int
    vocab: int
    dtype: Literal["float32", "bfloat16"]  # of the values
    row_offsets: list[int]
    teacher_version: int  # version of the policy weights the teacher holds; 0 = initial
    hinted_accuracy: float | None = None  # share of probed sites where the hinted teacher acts rightly
    top_k: int = 0  # 0: whole rows; else each has this many likeliest tokens and what all others have together
