"""Ids by words equal the tokenizer's, for every ASCII text, and only where the tokenizer's pattern is known."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from services.gateway import word_ids
from services.gateway.segment_cache import KNOWN_PATTERNS
from services.gateway.word_ids import WordIds, words_of
from tests.unit.gateway_text_fixtures import byte_fallback, byte_level

ASCII = st.text(st.characters(max_codepoint=127), max_size=60)
PIECES = [
    " ", "  ", "\n", "\r\n", "\t", "\x0b", "\x0c", "\x1c", "\x1f", "\x7f", "\0", "a", "the", "The", " fox", "1", "23",
    "4567", "'", "'s", "'S", "'LL", "'ve", "'d", "'x", "_", ".", "...", "(", "<|", "|>", "</", "-", "\\", '"',
]  # fmt: skip
TEXTS = ASCII | st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


def variant(pre_tokenizer: pre_tokenizers.PreTokenizer, **changes) -> Tokenizer:
    """The small tokenizer's merges behind another pre-tokenizer."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.pre_tokenizer = pre_tokenizer
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def splitting(
    pattern: str, *, behavior: str = "isolated", invert: bool = False
) -> pre_tokenizers.PreTokenizer:
    first = pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=invert)
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZERS = {
    "digits apart": byte_level(),
    "gpt2": variant(GPT2),
    "numbers apart": variant(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), GPT2])),
    **{
        f"pattern {number}": variant(splitting(pattern))
        for number, pattern in enumerate(sorted(KNOWN_PATTERNS))
    },
    "nfc": variant(GPT2, normalizer=normalizers.NFC()),
}
WORDS = {name: words_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@example("it's  12 34\n\n x'LL\t \r\n 5")
@given(TEXTS)
def test_ids_by_words_are_the_tokenizers(name, text):
    words = WORDS[name]
    assert words is not None
    wanted = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    assert words.ids(text).tolist() == wanted
    assert words.ids(text).tolist() == wanted  # now from the table


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_fallback(),
        byte_level(add_prefix_space=True),
        variant(GPT2, normalizer=normalizers.Lowercase()),
        variant(splitting(r"\w+|\s+")),
        variant(splitting(min(KNOWN_PATTERNS), behavior="removed")),
        variant(splitting(min(KNOWN_PATTERNS), invert=True)),
        variant(pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), GPT2])),
    ],
)
def test_other_tokenizers_have_no_words(tokenizer):
    assert words_of(tokenizer) is None


def test_a_token_that_is_found_inside_words_ends_them():
    tokenizer = variant(GPT2)
    tokenizer.add_tokens([AddedToken("qu", normalized=True)])
    assert words_of(tokenizer) is None


def test_a_pattern_that_is_not_the_tokenizers_is_found_out(monkeypatch):
    monkeypatch.setattr(word_ids, "_SPACE", r"\s")  # Python's has \x1c to \x1f
    assert words_of(variant(GPT2)) is None


def test_words_are_bounded_in_number_and_length(monkeypatch):
    monkeypatch.setattr(word_ids, "MAX_WORDS", 100)
    words = WordIds(byte_level().model, r"\S+")
    for number in range(1_000):
        words.ids(f"a{number} b" + "c" * word_ids.LONGEST_WORD)
        assert len(words) <= 100
    assert words.ids("b" + "c" * 40).tolist() == byte_level().encode("b" + "c" * 40).ids
