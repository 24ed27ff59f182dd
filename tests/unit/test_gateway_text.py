"""A model's folder becomes text and tokens; what is new is tokenized once, and long texts off the loop."""

import asyncio
import json
import threading
from array import array
from types import SimpleNamespace

import pytest
from tokenizers import processors

from services.gateway.core.tools import format_of
from services.gateway.detokenize import TokenTexts
from services.gateway.logprobs import CompletionLogprobs, TextOffsets, chat_logprobs
from services.gateway.openai import ChatBody
from services.gateway.request import chat_text
from services.gateway.segment_cache import SegmentCache
from services.gateway.text import INLINE_CHARS, INLINE_TOKENS, LONG, ModelText
from shared.errors import InvalidRequest, PromptTooLong, SettingsError
from shared.wire.requests import TokenLogprob
from tests.unit.gateway_text_fixtures import byte_fallback, byte_level, make_model_dir


@pytest.fixture
def text(tmp_path):
    model = ModelText(make_model_dir(tmp_path))
    yield model
    model.close()


def watch_threads(model: ModelText) -> list[str]:
    """Names of the threads that will tokenize from now on."""
    names: list[str] = []
    plain = model._tokenize

    def tokenize(pieces):
        names.append(threading.current_thread().name)
        return plain(pieces)

    model._tokenize = tokenize
    return names


async def test_long_new_text_is_tokenized_on_a_thread_and_only_once(text):
    names = watch_threads(text)
    short, long = "the föx", "the dog " * (INLINE_CHARS // 4)
    await text.encode(short, add_special_tokens=False)
    first = await text.encode(long, add_special_tokens=False)
    assert await text.encode(long, add_special_tokens=False) == first
    assert [name.startswith("tokenize") for name in names] == [False, True]


async def test_a_chats_next_turn_tokenizes_only_what_is_new(text):
    messages = [{"role": "user", "content": "the fox"}]
    await text.encode(text.render_chat(messages), add_special_tokens=False)
    known = len(text.cache)
    names = watch_threads(text)
    messages += [{"role": "assistant", "content": "jumps é"}, {"role": "user", "content": "the dög"}]
    await text.encode(text.render_chat(messages), add_special_tokens=False)
    assert len(names) == 2  # short pieces are tokenized one by one
    assert len(text.cache) - known == 2  # the two new turns; the prompt for the answer was there


async def test_a_short_ascii_text_is_looked_up_word_by_word(text):
    names = watch_threads(text)
    for words in ("the fox", "the fox's 12 dogs"):
        plain = text.tokenizer.encode(words, add_special_tokens=False).ids
        assert (await text.encode(words, add_special_tokens=False)).tolist() == plain
    assert names == []


async def test_concurrent_requests_with_the_same_new_text_agree(text):
    long = "<|im_start|>" + "the fox " * 2000
    found = await asyncio.gather(*(text.encode(long, add_special_tokens=False) for _ in range(5)))
    assert all(each == found[0] for each in found)


async def test_text_that_cannot_fit_is_refused_without_tokenizing_it(text):
    names = watch_threads(text)
    with pytest.raises(PromptTooLong):
        await text.encode("x" * 1_000_000, add_special_tokens=False, max_tokens=100)
    assert names == []
    await text.encode("the fox", add_special_tokens=False, max_tokens=100)


def test_the_cache_stays_within_its_bytes_and_drops_the_oldest():
    cache = SegmentCache(10_000)
    for number in range(100):
        cache.put(f"text {number}", array("I", range(number % 30)))
        assert cache.get("text 0") is not None or number == 0, "what is used stays"
        assert cache.used_bytes <= cache.max_bytes
    assert cache.get("text 1") is None
    cache.put("big", array("I", range(5000)))
    assert cache.get("big") is None, "one text does not push out all others"


def test_special_tokens_frame_a_completion_but_not_a_chat(tmp_path):
    tokenizer = byte_fallback(prepend_scheme="always")
    plain = ModelText(make_model_dir(tmp_path, tokenizer))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("<|im_start|>", "<|im_end|>")],
    )
    (framed_dir := tmp_path / "framed").mkdir()
    framed = ModelText(make_model_dir(framed_dir, tokenizer))
    for text in ("", "the dog", "<|im_end|>the"):
        assert (
            framed.encode_now(text, add_special_tokens=True).tolist()
            == tokenizer.encode(text, add_special_tokens=True).ids
        )
        assert framed.encode_now(text, add_special_tokens=False) == plain.encode_now(
            text, add_special_tokens=True
        )


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    tokenizer = byte_level("gpt2", add_prefix_space=True)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    model = ModelText(make_model_dir(tmp_path, tokenizer))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert model.encode_now("the fox and the dog", add_special_tokens=True).tolist() == (
        tokenizer.encode("the fox and the dog").ids
    )


def test_the_folder_says_what_ends_an_answer_and_how_large_the_vocabulary_is(tmp_path):
    folder = make_model_dir(tmp_path, eos_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.5}))
    model = ModelText(folder)
    assert model.eos_token_ids == [0, 2, 7]
    assert model.vocab_size == model.tokenizer.get_vocab_size() + 8
    assert model.generation_config["temperature"] == 0.5


async def test_ids_are_checked_against_the_vocabulary(text):
    assert await text.decode(text.encode_now("the fox", add_special_tokens=False)) == "the fox"
    assert await text.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"
    for bad in ([-1], [text.vocab_size], [1 << 32]):
        with pytest.raises(InvalidRequest) as caught:
            await text.decode(bad)
        assert caught.value.param == "tokens"


async def test_many_ids_are_decoded_and_named_on_a_thread(text, monkeypatch):
    threads: list[str] = []

    def watch(name: str) -> None:
        plain = getattr(text, name)

        def noted(*args):
            threads.append(threading.current_thread().name)
            return plain(*args)

        monkeypatch.setattr(text, name, noted)

    watch("_decode")
    watch("_names")
    ids = text.encode_now("the <|im_end|> fox", add_special_tokens=False).tolist()
    for count in (1, INLINE_TOKENS):
        assert await text.decode(ids * count) == text.tokenizer.decode(ids * count)
        assert await text.token_names(ids * count) == list(map(text.tokenizer.id_to_token, ids)) * count
    assert [each.startswith("tokenize") for each in threads] == [False, False, True, True]


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_broken_file_is_a_settings_error_that_names_it(tmp_path, name):
    folder = make_model_dir(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(SettingsError, match=name):
        ModelText(folder)


def test_a_model_without_a_template_takes_no_chats(tmp_path):
    folder = make_model_dir(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        ModelText(folder).render_chat([{"role": "user", "content": "hi"}])
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named, "eos_token": {"content": "<|im_end|>"}})
    )
    assert ModelText(folder).render_chat([{"role": "user", "content": "hi"}]) == "<|im_end|>"


@pytest.mark.parametrize("in_files", [False, True])
def test_with_tools_a_models_template_for_them_is_taken(tmp_path, in_files):
    templates = {"default": "plain", "rag": "{% if %}", "tool_use": "{{ tools | length }} <tool_call>"}
    folder = make_model_dir(tmp_path)
    if in_files:
        (folder / "chat_template.jinja").write_text(templates.pop("default"))
        (folder / "additional_chat_templates").mkdir()
        for name, source in templates.items():
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    else:
        (folder / "chat_template.jinja").unlink()
        named = [{"name": name, "template": source} for name, source in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    model = ModelText(folder)
    messages = [{"role": "user", "content": "hi"}]
    assert model.render_chat(messages) == "plain"
    assert model.render_chat(messages, tools=[{}, {}]) == "2 <tool_call>"
    assert format_of(model.tool_template_source, {}.get) == "hermes"


def test_a_model_with_one_template_takes_it_with_tools_and_without(tmp_path):
    model = ModelText(make_model_dir(tmp_path))
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "hi"}]
    assert model.render_chat(messages, tools=tools).endswith(model.render_chat(messages))
    assert format_of(model.tool_template_source, {}.get) == "hermes"


def test_the_tool_format_is_the_templates_then_the_vocabularys():
    nothing = {}.get
    assert format_of("... <tool_call> ...", nothing) == "hermes"
    assert format_of("... <|python_tag|> ...", nothing) == "llama"
    assert format_of("", {"<|python_tag|>": 5}.get) == "llama"
    assert format_of("", {"<tool_call>": 5}.get) == "hermes"
    assert format_of("", nothing) == "none"


# -- log probabilities ------------------------------------------------------------------------------------


def test_chat_log_probabilities_are_openais():
    texts = TokenTexts(byte_level())
    the, half = byte_level().encode("the").ids[0], byte_level().encode("🙃").ids[0]
    row = [TokenLogprob(the, -2.0, 3), TokenLogprob(half, -0.5, 1), TokenLogprob(5, float("-inf"), 2)]
    (entry,) = chat_logprobs([row], 2, texts)
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("the", -2.0, list(b"the"))
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -2.0]
    assert bytes(entry["top_logprobs"][0]["bytes"]) == texts.bytes_of(half), "its own bytes, not U+FFFD's"
    (entry,) = chat_logprobs([row], 3, texts)
    assert entry["top_logprobs"][2]["logprob"] == -9999.0
    assert chat_logprobs([row], 0, texts)[0]["top_logprobs"] == []


def test_completion_log_probabilities_are_parallel_lists_with_running_offsets():
    tokenizer = byte_level()
    ids = tokenizer.encode("the fox").ids
    texts = TokenTexts(tokenizer)
    maker = CompletionLogprobs(1, texts, TextOffsets(texts.detokenizer().feed_apart, start=len("the fox")))
    maker.begin_with_prompt(len(ids), ids[0], TextOffsets(texts.detokenizer().feed_apart))
    rows = [None, *([TokenLogprob(i, -1.0, 2), TokenLogprob(5, -0.5, 1)] for i in ids[1:])]
    first, second = maker.entries(rows[:2]), maker.entries(rows[2:])
    joined = {key: first[key] + second[key] for key in first}
    assert "".join(joined["tokens"]) == "the fox"
    assert joined["token_logprobs"] == [None] + [-1.0] * (len(ids) - 1)
    assert joined["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in joined["top_logprobs"][1:]), "the best one, and the sampled one"
    lengths = [len(token) for token in joined["tokens"]]
    assert joined["text_offset"] == [sum(lengths[:at]) for at in range(len(lengths))]


async def test_long_work_has_a_thread_of_its_own_and_no_usual_prompt_waits(text):
    begun = threading.Event()
    long = text.beside(LONG + 1, begun.wait, 5)
    await text.beside(LONG, begun.set)
    assert await long
    text.render_chat = lambda *_, **__: threading.current_thread().name
    body = ChatBody.model_construct(messages=[])
    assert (await chat_text(SimpleNamespace(text=text), body, LONG + 1)).startswith("long")
