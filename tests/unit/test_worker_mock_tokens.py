"""The mock engine's token function: pure, printable, different where it must differ."""

import json

import pytest

from shared.engine.worker_config import WorkerSettings
from shared.errors import SettingsError
from shared.kv.model_files import eos_token_ids, max_positions, vocab_size
from shared.testing.mock_engine import MockEngine
from shared.testing.mock_tokens import VISIBLE_IDS, MockVocabulary


@pytest.fixture
def model_dir(tmp_path):
    config = {"vocab_size": 1000, "eos_token_id": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_the_same_request_always_gets_the_same_tokens(model_dir):
    first = MockVocabulary.of_model(model_dir).tokens([5, 6, 7], 32, choice=1, seed=9)
    assert first == MockVocabulary.of_model(model_dir).tokens([5, 6, 7], 32, choice=1, seed=9)
    assert first[:8] == MockVocabulary.of_model(model_dir).tokens([5, 6, 7], 8, choice=1, seed=9)


def test_prompt_choice_and_seed_each_change_the_tokens(model_dir):
    vocabulary = MockVocabulary.of_model(model_dir)
    base = vocabulary.tokens([5, 6, 7], 32)
    others = [
        vocabulary.tokens([5, 6, 8], 32),
        vocabulary.tokens([5, 6, 7], 32, choice=1),
        vocabulary.tokens([5, 6, 7], 32, seed=0),
        vocabulary.tokens([5, 6, 7], 32, seed=2**62),
    ]
    assert all(other != base for other in others)
    assert len({tuple(other) for other in others}) == len(others)


def test_tokens_are_in_the_vocabulary_and_never_end_the_answer(model_dir):
    vocabulary = MockVocabulary.of_model(model_dir)
    assert len(vocabulary.visible) == VISIBLE_IDS
    assert 2 not in vocabulary.visible
    assert all(0 <= token < 1000 for token in vocabulary.visible)


def test_with_a_tokenizer_every_token_is_printable_text_on_its_own(model_dir, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(vocab), "eos_token_id": [1]}))
    vocabulary = MockVocabulary.of_model(str(tmp_path))
    assert len(vocabulary.visible) > 50
    assert all(tokenizer.decode([token]).isprintable() for token in vocabulary.visible)
    text = tokenizer.decode(vocabulary.tokens([3], 64))
    assert "\ufffd" not in text
    assert len(text) == 64


def test_the_mock_must_be_asked_for(model_dir):
    with pytest.raises(SettingsError, match="--engine mock"):
        MockEngine(WorkerSettings(model_dir=model_dir, engine="vllm"))


def test_model_files_say_vocabulary_eos_and_context(model_dir, tmp_path):
    assert (vocab_size(model_dir), eos_token_ids(model_dir), max_positions(model_dir)) == (1000, [2], 4096)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert eos_token_ids(model_dir) == [2, 7]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match="vocab_size"):
        vocab_size(model_dir)
