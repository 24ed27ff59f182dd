"""The demo model's folder is complete, small and consistent; its chat template is what it was trained on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from deploy.models import describe
from deploy.models.train_tokenizer import NO_LOSS_BIT, chat_pieces, encode_chat, load_template

MODEL = Path(__file__).parents[2] / "deploy" / "models" / "quire-demo"
MAX_FOLDER_BYTES = 8_000_000
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def read(name: str) -> dict[str, Any]:
    return json.loads((MODEL / name).read_text("utf-8"))


def weights() -> dict[str, Any]:
    raw = (MODEL / "model.safetensors").read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def render(messages: list[dict[str, object]], **rest: object) -> str:
    return load_template(MODEL / "chat_template.jinja").render(messages=messages, **rest)


def test_the_folder_fits_in_eight_megabytes():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_FOLDER_BYTES


def test_the_weights_have_the_shapes_of_the_configuration():
    config, tensors = read("config.json"), weights()
    assert tensors["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    layers = {int(found[1]) for name in tensors if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    assert layers == set(range(config["num_hidden_layers"]))
    query = tensors["model.layers.0.self_attn.q_proj.weight"]["shape"]
    assert query == [config["num_attention_heads"] * config["head_dim"], config["hidden_size"]]
    assert {tensor["dtype"] for name, tensor in tensors.items() if name != "__metadata__"} == {"BF16"}


def test_heads_have_a_size_that_every_attention_backend_takes():
    assert read("config.json")["head_dim"] % 64 == 0


def test_the_tokenizer_has_the_vocabulary_and_the_ends_of_the_configuration(tokenizer):
    config = read("config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert config["eos_token_id"] == read("generation_config.json")["eos_token_id"] == ends


def test_decoding_drops_turn_marks_and_keeps_tool_call_marks(tokenizer):
    text = '<tool_call>\n{"name": "f"}\n</tool_call>'
    assert tokenizer.decode(tokenizer.encode(text + "<|im_end|>").ids) == text


@pytest.mark.parametrize("text", ["two  spaces", "é 😀 \u0000", "1234567", "\n\n\t"])
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_template_shows_tools_calls_and_results_in_the_hermes_format():
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    text = render(
        [
            {"role": "user", "content": "weather in Oslo"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4 degrees"},
        ],
        tools=TOOLS,
        add_generation_prompt=True,
    )
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    assert (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>' in text
    )
    assert "<|im_start|>user\n<tool_response>\n4 degrees\n</tool_response><|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_arguments_that_clients_send_as_text_are_not_quoted_twice():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    text = render(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    )
    assert '"arguments": {"x": 1}}' in text


def test_only_what_the_assistant_says_has_loss(tokenizer):
    text = render(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "v"},
            {"role": "assistant", "content": "two"},
        ]
    )
    pieces = list(chat_pieces(text))
    assert [piece for piece, with_loss in pieces if with_loss] == ["one<|im_end|>", "two<|im_end|>"]
    assert "".join(piece for piece, _ in pieces) == text
    with_loss = [int(token) for token in encode_chat(tokenizer, text) if token < NO_LOSS_BIT]
    assert tokenizer.decode(with_loss, skip_special_tokens=False) == "one<|im_end|>two<|im_end|>"


def test_the_readme_shows_the_figures_of_the_training_log():
    readme = (MODEL.parent / "README.md").read_text("utf-8")
    assert describe.replace_figures(readme, describe.render(read("training_log.json"), MODEL)) == readme
