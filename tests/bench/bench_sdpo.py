"""What the SDPO channel costs a step, by where the teacher is and in what form its rows travel.

    python tests/bench/bench_sdpo.py [--vocab 49152] [--hidden 128] [--sites 32] [--turn 40] [--via auto|shm|rdma]

Every arm runs the same step (policy channel and SDPO, the initial model as teacher) on procs of its own:

    no sdpo   the policy channel alone: what the others are compared with
    whole     the teacher in the trainer's process; all rows of teacher and student in memory at once
    inline    the same, rows made when they are read, a chunk at a time
    actor     the teacher in an actor of its own, asked one step ahead, by the form of its rows

Time is the median of the steps after the first; CPU seconds are those of a side's process per step, which other work on
the machine disturbs less. A side's memory is the peak of its private memory over all steps, above what it was with its
model loaded (large blocks go back to the system when they are freed, so that the peak is of what lives); registered
rows, which are shared, are listed as bytes on the wire. The last table is the way of the rows alone: written and read,
as a multiple of one memcpy of the whole rows, and how far the loss is from the exact one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(MALLOC_MMAP_THRESHOLD_=str(1 << 20), MALLOC_ARENA_MAX="2")  # of glibc, in the procs that are spawned

import sys  # noqa: E402

sys.path.insert(0, str(ROOT))  # the script may be started from any folder

import torch  # noqa: E402  after the environment that it and the spawned procs read
from monarch.actor import Actor, concurrent_endpoint  # noqa: E402

from actors.sdpo_teacher import SDPOTeacherActor  # noqa: E402  in every proc: the teacher of this bench derives from it
from services.weights.logits import LogitsConfig, LogitsStore, read_logits  # noqa: E402

TOP_K = 64
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    f"float32 top-{TOP_K}": {"top_k": TOP_K},
    f"bfloat16 top-{TOP_K}": {"dtype": "bfloat16", "top_k": TOP_K},
}
ALL_AT_ONCE = 1 << 30
CHUNK = 128


class PeakMemory:
    """The most private memory that this process had since `start`, above what it had then, in bytes."""

    def __init__(self) -> None:
        self._most = self._before = 0

    def start(self) -> None:
        self._most = self._before = _private_bytes()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, _private_bytes())
            time.sleep(0.002)

    @property
    def above(self) -> int:
        return self._most - self._before


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Teacher(SDPOTeacherActor):
    @concurrent_endpoint
    async def watch(self) -> None:
        self.memory, self.before = PeakMemory(), time.process_time()
        self.memory.start()

    @concurrent_endpoint
    async def spent(self) -> tuple[float, int]:
        """CPU seconds since `watch`, and the peak of private memory."""
        return time.process_time() - self.before, self.memory.above


class Trainer(Actor):
    """A learner on the model at `path`; `arm` as in the module's docstring."""

    def __init__(self, path: str, arm: str, logits: dict[str, Any], shape: dict[str, int], via: str) -> None:
        self.path, self.arm, self.logits, self.shape, self.via = path, arm, logits, shape, via

    @concurrent_endpoint
    async def load(self) -> None:
        from services.models import load_model
        from services.training.hinted import HintedTeacher

        torch.set_num_threads(1)
        self.learner = a_learner(load_model(self.path), self.arm, self.logits.get("top_k", 0))
        if self.arm in ("whole", "inline"):
            row_chunk = ALL_AT_ONCE if self.arm == "whole" else CHUNK
            self.inline = HintedTeacher(load_model(self.path), None, hinted_config({}, row_chunk))
        self.plan = self.learner.plan(a_batch(self.shape))
        self.memory = PeakMemory()
        self.memory.start()

    @concurrent_endpoint
    async def run(self, steps: int, teacher: Any) -> tuple[list[float], float, float, int]:
        """Seconds of each step, the SDPO loss of the first, CPU seconds, and the peak of private memory."""
        from actors.remote_rows import RemoteRows
        from services.training.plan import Hinted

        seconds, losses, before = [], [], time.process_time()
        upcoming = self._ask(teacher)
        for number in range(steps):
            began, ref, hinted = time.perf_counter(), None, None
            if self.arm == "actor":
                ref = await upcoming
                if number + 1 < steps:
                    upcoming = self._ask(teacher)
                loop = asyncio.get_running_loop()
                rows = RemoteRows.of_plan(ref, self.plan, loop, chunk_rows=CHUNK, via=self.via)
                hinted = Hinted.from_reader(rows, ref.row_offsets)
            elif self.arm != "no sdpo":
                made = await asyncio.to_thread(self.inline.align, self.plan.contexts)
                if self.arm == "whole":
                    hinted = Hinted.from_rows(made.read(0, len(made)), made.row_offsets)
                else:
                    hinted = Hinted.from_reader(made.in_order(), made.row_offsets)
            metrics = await asyncio.to_thread(self.learner.step, self.plan, hinted)
            if ref is not None:
                await teacher.release.call_one(ref.id)
            seconds.append(time.perf_counter() - began)
            losses.append(metrics.get("sdpo/loss", float("nan")))
        return seconds, losses[0], time.process_time() - before, self.memory.above

    def _ask(self, teacher: Any) -> asyncio.Task[Any] | None:
        if self.arm != "actor":
            return None

        async def asking() -> Any:
            return await teacher.logits.call_one(self.plan.contexts, "trainer-0/0")

        return asyncio.create_task(asking())


class Wire(Actor):
    """One end of the rows' way: writes them, or reads them."""

    @concurrent_endpoint
    async def write(self, rows: int, vocab: int, logits: dict[str, Any]) -> tuple[Any, float, float]:
        """The reference, seconds to write it, and those of one memcpy of the rows as float32."""
        torch.set_num_threads(1)
        self.store = LogitsStore(LogitsConfig(**logits))
        parts = [sharp_rows(CHUNK, vocab, seed) for seed in range(-(-rows // CHUNK))]
        await self.store.release((await self._written(parts, rows, vocab))[0].id)  # memory that was touched before
        ref, seconds = await self._written(parts, rows, vocab)
        source = torch.cat(parts)[:rows]
        target = torch.zeros_like(source)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - began)
        return ref, seconds, statistics.median(times)

    async def _written(self, parts: list[torch.Tensor], rows: int, vocab: int) -> tuple[Any, float]:
        began = time.perf_counter()
        writer = await self.store.open(rows, vocab)
        for number, part in enumerate(parts):
            writer.write(part[: rows - number * CHUNK])
        return writer.seal([0, rows], teacher_version=0), time.perf_counter() - began

    @concurrent_endpoint
    async def read(self, ref: Any, via: str) -> tuple[float, float, float]:
        """Seconds to read all rows, the loss of students near to them, and how far it is from the exact one."""
        from services.losses.sdpo import sdpo_loss

        torch.set_num_threads(1)
        seconds, found, exact = 0.0, 0.0, 0.0
        config = loss_config(ref.top_k)
        chunks, began = read_logits(ref, CHUNK, via=via), time.perf_counter()
        async for start, rows in chunks:
            seconds += time.perf_counter() - began
            teacher = sharp_rows(CHUNK, ref.vocab, start // CHUNK)[: len(rows)]
            student = teacher + torch.randn(teacher.shape, generator=torch.Generator().manual_seed(start)) / 2
            found += float(sdpo_loss(student, rows, config=config, normalizer=ref.rows).loss)
            exact += float(sdpo_loss(student, teacher, config=config, normalizer=ref.rows).loss)
            began = time.perf_counter()
        return seconds, exact, abs(found - exact)


def sharp_rows(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Logits as language models have them: most tokens far below a few likely ones, and all far from 0."""
    generator = torch.Generator().manual_seed(seed)
    return (
        20
        + torch.randn(rows, vocab, generator=generator) * 2.5
        + 8 * (torch.rand(rows, vocab, generator=generator) > 0.9999)
    )


def hinted_config(logits: dict[str, Any], row_chunk: int = CHUNK) -> Any:
    from services.training.hinted import HintedTeacherConfig

    probes = {"probe_every": 1 << 20, "probe_contexts": 1, "probe_tokens": 1}
    return HintedTeacherConfig(align="turn", row_chunk=row_chunk, logits=LogitsConfig(**logits), **probes)


def loss_config(top_k: int) -> Any:
    from services.losses.sdpo import SDPOLossConfig

    return SDPOLossConfig(support="teacher", top_k=top_k, tail=True) if top_k else SDPOLossConfig()


def a_learner(model: Any, arm: str, top_k: int) -> Any:
    from services.losses.policy import PolicyConfig
    from services.training.config import OptimizerConfig, ReplayConfig, SDPOConfig
    from services.training.learner import Learner
    from services.training.policy_model import PolicyModel

    chunk = ALL_AT_ONCE if arm == "whole" else CHUNK
    loss = loss_config(top_k)
    if arm == "whole":
        loss = loss.model_copy(update={"token_chunk": ALL_AT_ONCE, "vocab_chunk": ALL_AT_ONCE})
    sdpo = SDPOConfig(alpha=0.0 if arm == "no sdpo" else 1.0, loss=loss, max_sites=1 << 20)
    return Learner(
        PolicyModel(model, logits_chunk=chunk), None, lambda text: [], 1, steps=100, optimizer=OptimizerConfig(),
        policy=PolicyConfig(max_completion_length=1000), sdpo=sdpo, replay=ReplayConfig(beta=0.0),
    )  # fmt: skip


def a_batch(shape: dict[str, int]) -> Any:
    """Groups of four rollouts, each with a prompt and one failing turn with a hint in front of it."""
    from mesh.messages import ErrorSite, Group, Rollout, Sequence, Task, TrainBatch, Turn, VersionSpan

    rng, groups = random.Random(0), []
    for index in range(shape["sites"] // 4):
        task, rollouts = Task(f"t{index}", index, index), []
        for member in range(4):
            start, stop = shape["prompt"], shape["prompt"] + shape["turn"]
            ids = [rng.randrange(3, shape["vocab"]) for _ in range(stop)]
            site = ErrorSite("tool_not_found", "no", "h", "template", cut=start, hint_ids=ids[:20])
            turn = Turn(0, start, stop, "action", "seen", None, site)
            sequence = Sequence(ids, [-10.0] * stop, [(start, stop)], [VersionSpan(0, start, stop)])
            rollouts.append(
                Rollout(f"t{index}/{member}", task, member, "", [sequence], [turn], [], "finished", 0.0, 0.0)
            )
        groups.append(Group(task, rollouts, [1.0, -1.0, 0.5, -0.5], False, 0))
    return TrainBatch(0, groups, [])


def make_model(path: str, vocab: int, hidden: int, layers: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from services.demo.tokenizer import build_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, head_dim=hidden // 4, tie_word_embeddings=True,
        initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    build_tokenizer().save_pretrained(path)  # of the teacher's actor; nobody decodes anything here


def measure(
    host: Any, path: str, arm: str, logits: dict[str, Any], shape: dict[str, int], options: Any
) -> dict[str, Any]:
    """One arm: seconds per step, first loss, peaks in bytes."""
    from services.environments.config import EnvironmentConfig
    from services.weights.config import WeightsConfig

    procs = [host.spawn_procs(per_host={"gpus": 1}) for _ in range(1 + (arm == "actor"))]
    trainer = procs[0].spawn("trainer", Trainer, path, arm, logits, shape, options.via)
    trainer.load.call_one().get(timeout=300)
    teacher = None
    if arm == "actor":
        environment = ("http://127.0.0.1:9", EnvironmentConfig(), WeightsConfig())
        teacher = procs[1].spawn("teacher", Teacher, "sdpo-teacher-0", hinted_config(logits), path, *environment)
        teacher.start.call_one().get(timeout=300)
        teacher.watch.call_one().get(timeout=60)
    seconds, loss, cpu, peak = trainer.run.call_one(options.steps, teacher).get(timeout=1200)
    found = {"seconds": statistics.median(seconds[1:]), "loss": loss, "trainer": peak, "cpu": cpu, "teacher": 0}
    if teacher is not None:
        teacher_cpu, found["teacher"] = teacher.spent.call_one().get(timeout=60)
        found["cpu"] += teacher_cpu
        teacher.finish.call_one().get(timeout=60)
    for proc in procs:
        proc.stop().get(timeout=60)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sites", type=int, default=32, help="failing turns of a step, a multiple of 4")
    parser.add_argument("--prompt", type=int, default=60, help="tokens in front of each")
    parser.add_argument("--turn", type=int, default=40, help="tokens of each")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--via", choices=("auto", "shm", "rdma"), default="auto")
    options = parser.parse_args()

    from monarch.actor import shutdown_context, this_host

    from mesh.supervision import install_fault_hook
    from mesh.topology import configure_monarch
    from services.weights.row_format import RowFormat

    configure_monarch()
    install_fault_hook(print)
    shape = {name: getattr(options, name) for name in ("vocab", "sites", "prompt", "turn")}
    rows, mib = options.sites * options.turn, 1 << 20
    whole = rows * options.vocab * 4
    print(f"{rows} rows of {options.vocab} tokens, {whole / mib:.0f} MiB in float32; {options.via}, one thread a side")

    titles = ("s/step", "x no sdpo", "CPU s/step", "x no sdpo", "trainer MiB", "x whole", "teacher MiB", "loss")
    print(f"\n{'arm':<22}" + "".join(f"{title:>12}" for title in titles), flush=True)
    arms = [("no sdpo", ""), ("whole", ""), ("inline", ""), *(("actor", form) for form in FORMS)]
    base: dict[str, Any] = {}
    whole_peak = 0.0
    with tempfile.TemporaryDirectory() as path:
        make_model(path, options.vocab, options.hidden, options.layers)
        for arm, form in arms:
            found = measure(this_host(), path, arm, FORMS.get(form, {}), shape, options)
            base, whole_peak = base or found, found["trainer"] if arm == "whole" else whole_peak
            print(
                f"{f'{arm} {form}':<22}{found['seconds']:>12.2f}{found['seconds'] / base['seconds']:>12.2f}"
                f"{found['cpu'] / options.steps:>12.2f}{found['cpu'] / base['cpu']:>12.2f}"
                f"{found['trainer'] / mib:>12.0f}{found['trainer'] / whole_peak if whole_peak else float('nan'):>12.2f}"
                f"{found['teacher'] / mib:>12.0f}{found['loss']:>12.6f}",
                flush=True,
            )

    titles = ("wire MiB", "x whole", "write ms", "read ms", "x memcpy", "loss", "loss off by")
    print(f"\n{'rows alone':<22}" + "".join(f"{title:>12}" for title in titles), flush=True)
    for form, logits in FORMS.items():
        procs = [this_host().spawn_procs(per_host={"gpus": 1}) for _ in range(2)]
        writer, reader = procs[0].spawn("writer", Wire), procs[1].spawn("reader", Wire)
        ref, write, memcpy = writer.write.call_one(rows, options.vocab, logits).get(timeout=300)
        read, exact, off = reader.read.call_one(ref, options.via).get(timeout=600)
        nbytes = rows * RowFormat.of(ref).row_bytes
        print(
            f"{form:<22}{nbytes / mib:>12.2f}{nbytes / whole:>12.4f}{write * 1e3:>12.0f}{read * 1e3:>12.0f}"
            f"{(write + read) / memcpy:>12.1f}{exact:>12.6f}{off:>12.2e}",
            flush=True,
        )
        for proc in procs:
            proc.stop().get(timeout=60)
    shutdown_context().get(timeout=30)


if __name__ == "__main__":
    import sys

    # The actors must belong to an importable module, not to __main__, for the spawned procs to find them.
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    import bench_sdpo

    bench_sdpo.main()
    sys.stdout.flush()
    os._exit(0)
