"""Streamed text equals the text of all ids decoded at once."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.detokenize import ByteDetokenizer, ByteTable, StreamDetokenizer, TokenTexts
from tests.unit.gateway_text_fixtures import byte_fallback, byte_level

SIZE = byte_level().get_vocab_size()
TABLE = ByteTable(byte_level())
TEXTS = st.text(st.sampled_from("ab c\n é€東🙂\u200d👩" + "\u0000\ufffd"), max_size=40)


@given(st.lists(st.integers(0, SIZE + 20), max_size=60), st.booleans())
@example(ids=[1, 2, 1], skip=False)
def test_any_byte_level_ids_stream_as_they_decode(ids, skip):
    stream = ByteDetokenizer(TABLE, skip_special_tokens=skip)
    whole = byte_level().decode(ids, skip_special_tokens=skip)
    assert "".join(map(stream.feed, ids)) + stream.flush() == whole


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=12))
def test_any_bytes_stream_as_they_decode(pieces):
    """Broken UTF-8 in every shape: each byte as a token of its own."""
    tokenizer = byte_level()
    byte_ids = [i for i in range(SIZE) if len(TABLE.bytes_of(i)) == 1]
    of_byte = {TABLE.bytes_of(i): i for i in byte_ids}
    ids = [of_byte[bytes([byte])] for piece in pieces for byte in piece]
    stream = ByteDetokenizer(TABLE)
    assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids)


@given(TEXTS, TEXTS)
def test_no_delta_shows_half_a_character(first, second):
    """What was streamed never has to be taken back: every moment's text is a beginning of the whole."""
    ids = byte_level().encode(first + "<|im_end|>" + second).ids
    stream, shown = ByteDetokenizer(TABLE), ""
    for token_id in ids:
        shown += stream.feed(token_id)
        assert (first + second).startswith(shown)
    assert shown + stream.flush() == first + second


@given(TEXTS, st.booleans())
def test_byte_fallback_text_streams_as_it_decodes(text, skip):
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = StreamDetokenizer(tokenizer, skip_special_tokens=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(map(stream.feed, ids)) + stream.flush() == whole


@given(TEXTS, st.integers(1, 5))
def test_a_cut_character_ends_as_replacement_characters(text, num_cut):
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text + "a🙂", add_special_tokens=False).ids[:-num_cut]
    stream = StreamDetokenizer(tokenizer)
    assert "".join(map(stream.feed, ids)) + stream.flush() == tokenizer.decode(ids)


@given(st.lists(st.integers(0, byte_fallback().get_vocab_size() - 1), max_size=40))
def test_no_byte_fallback_ids_break_the_stream(ids):
    stream = StreamDetokenizer(byte_fallback())
    "".join(map(stream.feed, ids)) + stream.flush()


def test_a_primed_stream_keeps_the_space_between_prompt_and_answer():
    tokenizer = byte_fallback()
    prompt, answer = tokenizer.encode("the").ids, tokenizer.encode("a the dog").ids[2:]
    stream = StreamDetokenizer(tokenizer, prompt)
    assert "".join(map(stream.feed, answer)) + stream.flush() == " the dog"


BYTE = {byte: byte_fallback().token_to_id(f"<0x{byte:02X}>") for byte in range(256)}


@given(
    st.lists(st.integers(0, byte_fallback().get_vocab_size() - 1), max_size=20), st.binary(max_size=6), TEXTS
)
@example([], "the \ufffd".encode(), " dog")
@example([byte_fallback().token_to_id("▁the")], "🙂".encode()[:2], " dog")
@example([], b"\xff" * 20, "the")
def test_an_answer_never_begins_with_its_prompts_text(prompt, last_bytes, text):
    """However the prompt ends: within a character, or with a replacement character of its own."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = StreamDetokenizer(tokenizer, [*prompt, *(BYTE[each] for each in last_bytes)])
    shown = "".join(map(stream.feed, ids)) + stream.flush()
    whole = tokenizer.decode(ids)
    assert shown in (whole, " " + whole)  # only after other text a first space is one


def test_a_character_that_the_prompt_began_shows_as_the_bytes_that_the_answer_has_of_it():
    first, second, third, fourth = (BYTE[each] for each in "🙂".encode())
    dog = byte_fallback().token_to_id("▁dog")
    stream = StreamDetokenizer(byte_fallback(), [dog, first, second])
    assert [*map(stream.feed, [third, fourth, dog]), stream.flush()] == ["", "", "\ufffd\ufffd dog", ""]


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_level("llama3"), byte_fallback()])
def test_single_tokens_show_what_the_tokenizer_shows(tokenizer):
    texts = TokenTexts(tokenizer)
    for token_id in range(tokenizer.get_vocab_size()):
        assert texts.text(token_id) == tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" not in texts.text(token_id):
            assert texts.bytes_of(token_id).decode() == texts.text(token_id)


def test_special_tokens_around_calls_are_shown_to_who_reads_calls():
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens(["<|python_tag|>"])
    ids = tokenizer.encode("<|im_end|>a<|python_tag|>b").ids
    texts = TokenTexts(tokenizer)
    assert "".join(map(texts.detokenizer().feed, ids)) == "ab"
    assert "".join(map(texts.detokenizer(show_tool_tokens=True).feed, ids)) == "a<|python_tag|>b"
