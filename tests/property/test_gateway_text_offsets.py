"""Log probabilities say where their tokens stand in the text that the choice really has, streamed as whole."""

from bisect import bisect_right
from functools import cache
from types import SimpleNamespace

from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from services.gateway.choices import Choice, ChoiceSpec
from services.gateway.core.stop import StopStrings
from services.gateway.detokenize import TokenTexts
from services.gateway.logprobs import Echo
from shared.ids import RequestId
from shared.wire.requests import TokenChunk, TokenLogprob
from tests.unit.gateway_text_fixtures import byte_fallback, byte_level

PIECES = st.text(st.sampled_from("ab c é€東🙂\u200d👩"), max_size=12)
TEXTS = st.lists(PIECES | st.sampled_from(["<|im_end|>", "<|im_start|>"]), max_size=6).map("".join)


@cache
def with_bos() -> Tokenizer:
    """Byte-level, with a token before every text."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))]
    )
    return tokenizer


@cache
def texts_of(tokenizer: Tokenizer) -> TokenTexts:
    return TokenTexts(tokenizer)


def rows_of(ids: list[int]) -> list[list[TokenLogprob]]:
    return [[TokenLogprob(each, -1.0, 1)] for each in ids]


def answered(tokenizer, ids, cuts, *, skip=True, stops=(), prompt_ids=(), echo=None) -> tuple[str, list[int]]:
    """(text, offsets) of a completion that came cut at these places; without `cuts` it is whole."""
    texts = texts_of(tokenizer)
    model = SimpleNamespace(detokenizer=texts.detokenizer, texts=texts)
    spec = ChoiceSpec(
        is_chat=False,
        num_top_logprobs=0,
        skip_special_tokens=skip,
        stops=StopStrings(stops) if stops else None,
    )
    choice = Choice(0, spec, model, prompt_ids, new_id=str, **({"echo": echo} if echo else {}))
    text, offsets = (echo.text if echo else ""), []

    def take() -> None:
        offsets.extend((choice.take_logprobs() or {"text_offset": []})["text_offset"])

    if echo is not None:
        choice.put_prompt_logprobs([None, *rows_of(prompt_ids[1:])][: len(prompt_ids)], prompt_ids[0])
    begin = 0
    for cut in [*cuts, len(ids)]:
        if cuts:
            take()
        if choice.finish_reason is None:
            part, last = ids[begin:cut], "length" if cut == len(ids) else None
            text += choice.feed(TokenChunk(RequestId("r"), 1, 0, part, last, None, rows_of(part)))
        begin = cut
    take()
    return text, offsets


def cuts_of(draws: list[int], length: int) -> list[int]:
    return sorted({each % (length + 1) for each in draws} | {0})


@given(TEXTS, st.lists(st.integers(0, 99), max_size=5), st.booleans(), st.booleans())
@example("é🙂<|im_end|>a", [1, 3], True, True)
def test_a_token_begins_where_the_text_before_it_ends(text, draws, skip, is_bytes):
    tokenizer = byte_level() if is_bytes else byte_fallback()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    begins = []
    for position in range(len(ids)):
        stream = texts_of(tokenizer).detokenizer((), skip_special_tokens=skip)
        begins.append(sum(len(stream.feed(each)) for each in ids[:position]))
    whole = answered(tokenizer, ids, [], skip=skip)
    assert whole == (tokenizer.decode(ids, skip_special_tokens=skip), begins)
    assert answered(tokenizer, ids, cuts_of(draws, len(ids)), skip=skip) == whole


@given(TEXTS, TEXTS, st.lists(st.integers(0, 99), max_size=5), st.booleans())
@example("é🙂<|im_end|>a", "東<|im_end|>", [1, 3], False)
def test_an_echoed_text_has_its_tokens_where_the_tokenizer_found_them(prompt, text, draws, skip):
    tokenizer = with_bos()
    found = tokenizer.encode(prompt)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    _, behind = answered(tokenizer, ids, [], skip=skip, prompt_ids=found.ids)
    whole = answered(tokenizer, ids, [], skip=skip, prompt_ids=found.ids, echo=Echo(prompt, num_hidden=1))
    assert whole[1] == [begin for begin, _ in found.offsets] + [len(prompt) + each for each in behind]
    assert whole[0] == prompt + tokenizer.decode(ids, skip_special_tokens=skip)
    cuts = cuts_of(draws, len(ids))
    again = answered(tokenizer, ids, cuts, skip=skip, prompt_ids=found.ids, echo=Echo(prompt, num_hidden=1))
    assert again == whole


@given(TEXTS, TEXTS, st.booleans(), st.booleans())
def test_echoed_ids_have_their_tokens_where_their_text_has_them(prompt, text, skip, is_bytes):
    tokenizer = byte_level() if is_bytes else byte_fallback()
    ids = tokenizer.encode("a" + prompt, add_special_tokens=False).ids
    output = tokenizer.encode(text, add_special_tokens=False).ids
    echo = Echo(tokenizer.decode(ids, skip_special_tokens=skip), skips_special=skip)
    _, alone = answered(tokenizer, ids, [], skip=skip)
    _, behind = answered(tokenizer, output, [], skip=skip, prompt_ids=ids)
    _, offsets = answered(tokenizer, output, [], skip=skip, prompt_ids=ids, echo=echo)
    assert offsets == alone + [len(echo.text) + each for each in behind]


def begins_of_characters(spelled: bytes) -> list[int]:
    """At which bytes the characters begin, of what is no UTF-8 the replacement characters."""
    begins, at = [], 0
    while at < len(spelled):
        try:
            good, end = spelled[at:], len(spelled)
            good.decode()
        except UnicodeDecodeError as error:
            good, end = spelled[at : at + error.start], at + error.end
        place = at
        for char in good.decode():
            begins.append(place)
            place += len(char.encode())
        if place < end:
            begins.append(place)
        at = end
    return begins


@given(st.lists(st.integers(3, byte_level().get_vocab_size() - 1), max_size=20), st.binary(max_size=8))
@example([], "🙂".encode()[:2] + b"a")
@example([], "🙂".encode()[:2] + "é".encode())
@example([], "🙂".encode()[:2] + "🙂".encode()[:1] + b"\x9f\xe0\x80")
@example([], "a\ufffd".encode() * 2)
def test_a_token_behind_a_character_that_never_completes_begins_behind_it(ids, last_bytes):
    tokenizer = byte_level()
    texts = texts_of(tokenizer)
    of_byte = {texts.bytes_of(each): each for each in range(tokenizer.get_vocab_size())}
    ids = [*ids, *(of_byte[bytes([each])] for each in last_bytes)]
    spelled = [texts.bytes_of(each) for each in ids]
    assume(b"\xed" not in b"".join(spelled))  # Python's decoder waits for more behind half a surrogate pair
    begins = begins_of_characters(b"".join(spelled))
    places = [len(b"".join(spelled[:position])) for position in range(len(ids))]
    text, offsets = answered(tokenizer, ids, [])
    assert (len(text), offsets) == (len(begins), [bisect_right(begins, each) - 1 for each in places])


def test_a_token_behind_half_a_surrogate_pair_begins_behind_both_its_characters():
    tokenizer = byte_level()
    of_byte = {texts_of(tokenizer).bytes_of(each): each for each in range(tokenizer.get_vocab_size())}
    ids = [of_byte[each] for each in (b"\xed", b"\xa0", b"x", b"y")]
    assert answered(tokenizer, ids, []) == ("\ufffd\ufffdxy", [0, 0, 2, 3])


def test_a_word_behind_bytes_that_are_no_character_begins_behind_them():
    tokenizer = byte_fallback()
    first, second, dog = (tokenizer.token_to_id(each) for each in ("<0xF0>", "<0x9F>", "▁dog"))
    assert answered(tokenizer, [dog, first, second, dog, dog], []) == (
        "dog\ufffd\ufffd dog dog",
        [0, 3, 3, 5, 9],
    )


@given(TEXTS, st.lists(st.integers(0, 99), max_size=5))
def test_offsets_of_an_answer_that_a_stop_string_ends_are_the_same_streamed_as_whole(text, draws):
    tokenizer = byte_level()
    ids = tokenizer.encode(text + "ab 🙂 c", add_special_tokens=False).ids
    whole = answered(tokenizer, ids, [], stops=("b 🙂",))
    assert answered(tokenizer, ids, cuts_of(draws, len(ids)), stops=("b 🙂",)) == whole
    assert "b 🙂" not in whole[0]
