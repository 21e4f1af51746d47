"""A tiny model for actors that load one."""

import pytest

from services.demo.tiny_model import TinyModelConfig, build_model
from services.demo.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build_model(TinyModelConfig(hidden_size=32, intermediate_size=48, layers=2, heads=1), 0).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)
