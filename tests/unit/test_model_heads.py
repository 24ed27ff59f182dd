"""What a model folder says of its heads; whether they divide over ranks is decided without loading it."""

import json

import pytest

from shared.errors import SettingsError
from shared.kv.model_files import check_split, heads


def model(tmp_path, **config) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_heads_are_the_texts_and_kv_heads_default_to_all(tmp_path):
    assert heads(model(tmp_path, num_attention_heads=8, num_key_value_heads=2)) == (8, 2)
    assert heads(model(tmp_path, text_config={"num_attention_heads": 6})) == (6, 6)
    with pytest.raises(SettingsError, match="num_attention_heads"):
        heads(model(tmp_path, hidden_size=4))


def test_ranks_that_the_heads_do_not_divide_over_are_refused_with_a_number_that_works(tmp_path):
    folder = model(tmp_path, num_attention_heads=12, num_key_value_heads=4)
    for works in (1, 2, 4, 12):  # with 12 ranks three share a KV head
        check_split(folder, works)
    with pytest.raises(SettingsError, match=r"12 heads \(4 of KV\).* 8 ranks; try 4"):
        check_split(folder, 8)
    with pytest.raises(SettingsError, match="3 ranks; try 2"):
        check_split(folder, 3)
    check_split(model(tmp_path, model_type="mamba"), 1)
