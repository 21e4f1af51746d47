import pytest
from pydantic import ValidationError

from services.engines.engine import EngineConfig, GenerationRequest, check_fits


def test_a_request_that_no_engine_could_serve_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="r1: the prompt is empty"):
        GenerationRequest("r1", [], 4)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        GenerationRequest("r1", [1], 0)
    with pytest.raises(ValueError, match="use greedy=True"):
        GenerationRequest("r1", [1], 4, temperature=0.0)


def test_greedy_needs_no_temperature() -> None:
    assert GenerationRequest("r1", [1], 4, temperature=0.0, greedy=True).greedy


def test_a_prompt_must_leave_room_for_one_token() -> None:
    check_fits(GenerationRequest("r1", [1] * 9, 4), max_length=10, vocab_size=5)
    with pytest.raises(ValueError, match="r2: its prompt of 10 tokens leaves no room"):
        check_fits(GenerationRequest("r2", [1] * 10, 4), max_length=10, vocab_size=5)


@pytest.mark.parametrize("token", [-1, 5])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 5"):
        check_fits(GenerationRequest("r1", [1, token, 2], 4), max_length=10, vocab_size=5)


def test_half_precision_on_cpu_is_refused_with_advice() -> None:
    assert EngineConfig(dtype="float16", device="cuda").dtype == "float16"
    with pytest.raises(ValidationError, match='use "bfloat16" or "float32"'):
        EngineConfig(dtype="float16", device="cpu")


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_batches"):
        EngineConfig.model_validate({"max_batches": 4})


def test_vllm_s_settings_without_vllm_are_refused() -> None:
    assert EngineConfig(engine="vllm", vllm={"kv_cache_gb": 0.5}).vllm.kv_cache_gb == 0.5
    with pytest.raises(
        ValidationError, match=r'engine "transformers" reads no setting of \[vllm\]: set engine = "vllm"'
    ):
        EngineConfig(vllm={"kv_cache_gb": 0.5})


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"device": "cuda:1"}, 'set device = "cuda" and show the proc'),
        ({"device": "cpu", "vllm": {"gpu_memory_utilization": 0.5}}, 'on device "cpu" set kv_cache_gb'),
        ({"device": "cuda", "vllm": {"gpu_memory_utilization": 0.5, "kv_cache_gb": 1}}, "set one of them"),
    ],
)
def test_contradictory_settings_of_vllm_are_refused_with_advice(settings: dict, advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        EngineConfig.model_validate({"engine": "vllm", **settings})
