import pytest

from services.demo.tokenizer import build_tokenizer
from services.models import ModelError, generation_stop_ids, load_model, load_tokenizer


@pytest.mark.parametrize(("written", "ids"), [("7", [7]), ("[7, 9]", [7, 9]), ("null", [])])
def test_the_generation_config_tells_where_generation_ends(tmp_path, written, ids):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {written}}}')
    assert generation_stop_ids(str(tmp_path)) == ids


def test_a_model_without_a_generation_config_says_nothing_of_its_end(tmp_path):
    assert generation_stop_ids(str(tmp_path)) == []


def test_a_tokenizer_without_template_or_end_is_refused(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "mute")
    with pytest.raises(ModelError, match="has no chat template; save one with it"):
        load_tokenizer(str(tmp_path / "mute"))
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(ModelError, match="has no eos token; a turn could not end"):
        load_tokenizer(str(tmp_path / "endless"))


def test_a_folder_without_a_model_is_refused_with_the_setting_to_change(tmp_path):
    with pytest.raises(ModelError, match=r"no model at .*set model.path to a Hugging Face folder"):
        load_model(str(tmp_path))
