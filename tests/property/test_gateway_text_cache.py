"""Cached encoding equals plain encoding, on any chats, whatever is in the cache."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.segment_cache import Borders, borders_of
from services.gateway.text import ModelText
from tests.unit.gateway_text_fixtures import (
    LONGER_TOKEN,
    SPECIAL,
    TOOL_TOKENS,
    byte_fallback,
    byte_level,
    make_model_dir,
)

PIECES = [
    *SPECIAL, *TOOL_TOKENS, "<|im_", "<|im_start", LONGER_TOKEN, "|>", "<|", "user\n",
    " ", "  ", "\n", "\n\n", "the", " fox", "x",
    "1234", "'s", "e", "\u0301", "é", "東京", "🙂", "\u200d", "\t", "<tool_call", "</tool_call>>", "\u00a0", "\u0000",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
WORDS = [
    "a",
    "b1",
    " ",
    "\n",
    "\n",
    "\r\n",
    ".",
    "'s",
    "(",
    ")",
    "é",
    "\u0301",
    "\x85",
    "\x1c",
    "\u2028",
    "_",
    "12",
    "#",
    "<|im_end|>",
]
LINES = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)
_folder = TemporaryDirectory()


def load(name: str, tokenizer, **options) -> ModelText:
    folder = Path(_folder.name, name)
    folder.mkdir(exist_ok=True)
    return ModelText(make_model_dir(folder, tokenizer), **options)


MODELS = {
    "gpt2": load("gpt2", byte_level()),
    "llama3": load("llama3", byte_level("llama3")),
    "prefix-space": load("prefix-space", byte_level(add_prefix_space=True)),
    "tiny-cache": load("tiny-cache", byte_level(), cache_bytes=4096),
    "metaspace-always": load("metaspace-always", byte_fallback(prepend_scheme="always")),
    "metaspace-first": load("metaspace-first", byte_fallback()),
    "gpt2-lines": load("gpt2-lines", byte_level()),
    "llama3-lines": load("llama3-lines", byte_level("llama3")),
}
for _name in ("gpt2-lines", "llama3-lines"):  # cut at every line, not once in a thousand characters
    MODELS[_name]._borders.chunk_chars = 0


@pytest.mark.parametrize("name", MODELS)
@given(texts=st.lists(TEXTS | LINES, min_size=1, max_size=4))
def test_cached_encoding_is_plain_encoding(name, texts):
    model = MODELS[name]
    for text in texts:
        plain = model.tokenizer.encode(text, add_special_tokens=False).ids
        assert model.encode_now(text, add_special_tokens=False).tolist() == plain
    assert model.cache.used_bytes <= model.cache.max_bytes


@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), min_size=1, max_size=6))
def test_every_turn_of_a_chat_is_encoded_as_without_a_cache(turns):
    model = MODELS["llama3"]
    messages = [{"role": role, "content": content} for role, content in turns]
    for end in range(1, len(messages) + 1):
        text = model.render_chat(messages[:end])
        plain = model.tokenizer.encode(text, add_special_tokens=False).ids
        assert asyncio.run(model.encode(text, add_special_tokens=False)).tolist() == plain


@given(LINES, LINES)
def test_texts_that_begin_alike_are_cut_alike(first, second):
    borders = MODELS["gpt2-lines"]._borders
    parts, longer = borders.cut(first), borders.cut(first + second)
    assert "".join(longer) == first + second
    assert longer[: len(parts) - 1] == parts[:-1]


def test_lines_are_borders_only_where_the_pattern_is_known():
    lined = [name for name, model in MODELS.items() if model._borders and model._borders.lines]
    assert lined == ["gpt2", "llama3", "tiny-cache", "gpt2-lines", "llama3-lines"]


def test_only_tokenizers_that_ask_for_the_first_piece_go_uncached():
    assert [name for name, model in MODELS.items() if model._borders is None] == ["metaspace-first"]


@given(TEXTS)
def test_borders_are_where_the_tokenizer_cuts(text):
    borders = borders_of(byte_level())
    assert isinstance(borders, Borders)
    pieces = borders.split(text)
    assert "".join(pieces) == text
    tokenizer = byte_level()
    wanted = {tokenizer.token_to_id(token) for token in [*SPECIAL, *TOOL_TOKENS, LONGER_TOKEN]}
    found = [i for i in tokenizer.encode(text, add_special_tokens=False).ids if i in wanted]
    assert [borders.ids[piece][0] for piece in pieces[1::2]] == found
