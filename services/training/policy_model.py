"""A Hugging Face causal language model as the learner uses it: packed tokens in, log-probabilities out.

    Packed ─▶ trunk (once, over all tokens) ─▶ hidden states (T, H) ─┬─▶ rows in the loss ─▶ logprobs (N,)
                                                                     └─▶ aligned rows + teacher ─▶ distillation loss

The output head is part of the losses, chunk by chunk (`services.losses.linear`): logits of more than `logits_chunk`
rows never exist. Everything that needs a parameter happens inside `forward`, so that the module can be sharded whole.

There is no dropout here, in training neither: the ratio to the behaviour policy and the distance to the reference are
the weights' doing alone.

What a model does between its hidden states and its logits, and whether its layers keep packed sequences apart, differs
between architectures and shows in no interface. So it is tried out when the module is made: on a few short sequences
this module must give the model's own logits. A model for which it does not is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from services.losses.linear import Head, linear_distillation, linear_logprobs, live_zero
from services.losses.reduction import LossResult
from services.models import ModelError
from services.training.attention import PACKED_ATTENTION, PackingError, handed_down_mask
from services.training.packing import Packed, pack_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WITHOUT_PACKING = "set trainer.packing = false"
PROBE_LENGTHS = (7, 4, 4, 2)


@dataclass(slots=True)
class Distillation:
    """What a forward pass distills: which rows, the teacher's side of them, and the loss between the two."""

    rows: Tensor  # (M,) int64, indices into the packed tokens
    read: Callable[[int], Any]  # the teacher's side of the next n rows; None: it cannot be had (any more)
    loss: Callable[[Tensor, Any], LossResult]  # of student logits (n, V) float32 and what `read` gave


class PolicyOutput(NamedTuple):
    """Flat, so that torch finds every tensor in it whose backward pass a sharded module has to prepare for."""

    logprobs: Tensor  # (N,) float32, of the packed labels
    distilled_loss: Tensor | None = None
    distilled_rows: Tensor | None = None
    distilled_metrics: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def distilled(self) -> LossResult | None:
        """The distillation's loss, when it was asked for."""
        if self.distilled_loss is None or self.distilled_rows is None:
            return None
        return LossResult(self.distilled_loss, self.distilled_rows, dict(self.distilled_metrics))


class PolicyModel(nn.Module):
    """`model` in its packed form, or padded with `packing=False`; the results are equal.

    Raises PackingError for a model that cannot pack, ModelError for one whose logits are not a linear function of its
    last hidden states (scaled and capped as its configuration says). `checkpointing` computes each layer's activations
    again in backward instead of keeping them.
    """

    def __init__(
        self, model: PreTrainedModel, *, packing: bool = True, logits_chunk: int = 512, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.packing, self.logits_chunk = packing, logits_chunk
        self._scale, self._softcap = _logit_shape(self._causal.config.get_text_config())
        self._checkpointed = _checkpoint_layers(self._causal) if checkpointing else []
        self.train(False)
        self._try_out()

    def train(self, mode: bool = True) -> PolicyModel:
        """Without effect but for this: no dropout, whatever `mode`, and layers that are checkpointed know it."""
        super().train(False)
        for layer in self._checkpointed:
            layer.training = True  # of the layer alone, not of what is in it: transformers asks for it
        return self

    def forward(
        self, packed: Packed, temperature: float = 1.0, distillation: Distillation | None = None
    ) -> PolicyOutput:
        """Log-probabilities (N,) float32 of `packed.labels` at the sampling temperature, and the distillation's loss.

        A distillation whose teacher cannot be read gives a loss of 0 over 0 rows, with a live graph.
        """
        hidden, head = self._hidden(packed), self._head()
        logprobs = linear_logprobs(
            hidden[packed.rows], head, packed.labels, temperature=temperature, chunk=self.logits_chunk
        )
        if distillation is None:
            return PolicyOutput(logprobs)
        distilled = linear_distillation(
            hidden[distillation.rows], head, distillation.read, distillation.loss, chunk=self.logits_chunk
        )
        if distilled is None:
            distilled = LossResult(live_zero(hidden, head), count=packed.rows.new_zeros(()))
        return PolicyOutput(logprobs, distilled.loss, distilled.count, distilled.metrics)

    @torch.no_grad()
    def logits(self, packed: Packed, rows: Tensor) -> Iterator[Tensor]:
        """Logits (n, V) float32 of the `rows` (M,) of the packed tokens, in order, `logits_chunk` at a time."""
        hidden, head = self._hidden(packed), self._head()
        for part in rows.split(self.logits_chunk):
            yield head.logits(hidden[part])

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _hidden(self, packed: Packed) -> Tensor:
        """The last hidden states (T, H)."""
        trunk = self._causal.base_model
        if not self.packing:
            ids, attended = packed.padded()
            states = trunk(input_ids=ids, attention_mask=attended, use_cache=False).last_hidden_state
            return states[attended.bool()]
        return trunk(
            input_ids=packed.ids[None],
            position_ids=packed.positions[None],
            attention_mask=handed_down_mask(packed.ids.device),
            sequences=packed.boundaries,
            use_cache=False,
        ).last_hidden_state[0]

    @property
    def _causal(self) -> Any:
        """The causal language model itself, out of the adapter that may be around it."""
        get_base = getattr(self.model, "get_base_model", None)
        return self.model if get_base is None else get_base()

    def _head(self) -> Head:
        output: Any = self._causal.get_output_embeddings()
        return Head(output.weight, getattr(output, "bias", None), self._scale, self._softcap)

    @torch.no_grad()
    def _try_out(self) -> None:
        """ModelError or PackingError unless this module gives the model's own logits on a few short sequences."""
        name, config = type(self._causal).__name__, self._causal.config.get_text_config()
        head = type(self._causal.get_output_embeddings())
        if getattr(head, "forward", None) is not nn.Linear.forward:
            # An adapter, say, which begins as nothing, so that trying it out would not show it.
            raise ModelError(
                f"{name} cannot be trained: its output head is a {head.__name__}; use a model whose output head is a "
                "linear layer, and an adapter that leaves it alone"
            )
        generator = torch.Generator().manual_seed(0)
        probe = pack_ids(
            [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in PROBE_LENGTHS], self.device
        )
        ids, attended = probe.padded()
        expected = self._causal(input_ids=ids, attention_mask=attended, use_cache=False).logits[attended.bool()]
        # Padded first: it tells a head that is not understood from layers that cannot run packed.
        packing, self.packing = self.packing, False
        trouble = self._trouble(probe, expected, "its logits are not a linear function of its last hidden states")
        if trouble:
            raise ModelError(f"{name} cannot be trained: {trouble}; use a model whose output head is a linear layer")
        if not packing:
            return
        before = config._attn_implementation
        self._causal.set_attn_implementation(PACKED_ATTENTION)
        if config._attn_implementation != PACKED_ATTENTION:
            raise PackingError(f"{name} cannot run packed: it has attention code of its own; {WITHOUT_PACKING}")
        self.packing = True
        trouble = self._trouble(probe, expected, "its layers mix packed sequences") or _hidden_trouble(config, probe)
        if trouble:
            self._causal.set_attn_implementation(before)
            raise PackingError(f"{name} cannot run packed: {trouble}; {WITHOUT_PACKING}")

    def _trouble(self, probe: Packed, expected: Tensor, otherwise: str) -> str:
        """Why this module does not give the `expected` logits (T, V); empty when it does."""
        try:
            found = torch.cat(list(self.logits(probe, torch.arange(len(probe.ids), device=self.device))))
        except Exception as error:
            # Whatever a model's own code raises: it was not written for this.
            return str(error) if isinstance(error, PackingError) else f"{type(error).__name__}: {error}"
        tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
        return "" if (found - expected.float()).norm() <= tolerance * expected.float().norm() else otherwise


def _hidden_trouble(config: Any, probe: Packed) -> str:
    """What short sequences do not show: layers that are different in long ones only."""
    kinds = set(getattr(config, "layer_types", None) or [])
    strange = kinds - {"full_attention", "sliding_attention"}
    if strange:
        return f"it has layers of kind {', '.join(sorted(strange))}"
    sliding = "sliding_attention" in kinds if kinds else bool(getattr(config, "sliding_window", None))
    return "its attention is not told the sliding window" if sliding and not probe.boundaries.windows else ""


def _logit_shape(config: Any) -> tuple[float, float | None]:
    """`(scale, cap)` of the logits behind the head's projection, under the names that architectures give them."""
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return scale, cap


def _checkpoint_layers(causal: Any) -> list[nn.Module]:
    """The layers whose activations are computed again in backward. ModelError when the model has none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[nn.Module] = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not causal.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(causal).__name__} has no layers whose activations can be computed again in backward: set "
            "trainer.gradient_checkpointing = false"
        )
    for layer in layers:
        # Dropout in the layer's own code goes by its `training`, which has to be set here.
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
    causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return layers
