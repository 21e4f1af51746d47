"""The two parts of a model give its own logits, whatever it does behind its trunk, or the model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_builders import VOCAB, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

from services.models import ModelError
from services.training.trunk_and_head import TrunkAndHead

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
# What each does between its last hidden states and its logits.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "phi": {},  # a bias
    "gemma2": {"final_logit_softcapping": 1.0, "head_dim": 16},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2},  # other names
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},  # a projection in the decoder, which is not the base model
    "mixtral": {"output_router_logits": True},  # a loss of its own
}


def model_of(architecture: str) -> Any:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **{**SHAPE, **ARCHITECTURES[architecture]})
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_logits_of_any_rows_are_the_models_own(architecture):
    model = model_of(architecture)
    ids = torch.tensor([[5, 9, 3, 30, 7, 2], [8, 4, 11, 0, 0, 0]])
    attended = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    whole = model(input_ids=ids, attention_mask=attended).logits
    parts = TrunkAndHead(model)
    hidden = parts.hidden(ids, attended)
    rows, columns = torch.tensor([1, 0, 0]), torch.tensor([2, 5, 1])
    torch.testing.assert_close(parts.logits(hidden[rows, columns]), whole[rows, columns], rtol=1e-4, atol=1e-5)
    assert parts.vocab == VOCAB
    assert whole.std() > 0.01
    assert torch.equal(model(input_ids=ids, attention_mask=attended).logits, whole)  # the model is as it was


@torch.no_grad()
def test_the_parts_share_the_models_weights():
    model, ids = tiny_model().eval(), torch.tensor([[5, 9, 3]])
    parts = TrunkAndHead(model)
    for parameter in model.parameters():
        parameter.add_(0.1)
    found = parts.logits(parts.hidden(ids, torch.ones_like(ids))[0])
    torch.testing.assert_close(found, model(ids).logits[0])


class LooksAtItsInput(Qwen3ForCausalLM):
    def forward(self, input_ids: Any = None, **settings: Any) -> Any:
        output = super().forward(input_ids=input_ids, **settings)
        if input_ids is not None:
            output.logits = output.logits.scatter_add(-1, input_ids[..., None], torch.ones(*input_ids.shape, 1))
        return output


class NeedsItsInput(Qwen3ForCausalLM):
    def forward(self, input_ids: Any = None, **settings: Any) -> Any:
        length = input_ids.shape[1]
        return super().forward(input_ids=input_ids, position_ids=torch.arange(length)[None], **settings)


class HidesItsDecoder(Qwen3ForCausalLM):
    def get_decoder(self) -> Any:
        return self


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (LooksAtItsInput, "in two parts it gives other logits"),
        (NeedsItsInput, "AttributeError: 'NoneType' object has no attribute 'shape'"),
        (HidesItsDecoder, "does not say which part of it is the decoder"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_the_reason(kind, reason):
    model = kind(tiny_model().config).eval()
    with pytest.raises(ModelError, match=rf"{kind.__name__} cannot be the hinted teacher.*{reason}.*sdpo.alpha = 0"):
        TrunkAndHead(model)
