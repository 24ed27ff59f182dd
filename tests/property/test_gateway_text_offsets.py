"""Log probabilities say where their tokens stand in the text that the choice really has, streamed as whole."""

from functools import cache
from types import SimpleNamespace

from hypothesis import example, given
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


@given(TEXTS, st.lists(st.integers(0, 99), max_size=5))
def test_offsets_of_an_answer_that_a_stop_string_ends_are_the_same_streamed_as_whole(text, draws):
    tokenizer = byte_level()
    ids = tokenizer.encode(text + "ab 🙂 c", add_special_tokens=False).ids
    whole = answered(tokenizer, ids, [], stops=("b 🙂",))
    assert answered(tokenizer, ids, cuts_of(draws, len(ids)), stops=("b 🙂",)) == whole
    assert "b 🙂" not in whole[0]
