"""Chat templates render as Hugging Face renders them, inside a sandbox."""

import datetime

import pytest

from services.gateway import chat_template
from services.gateway.chat_template import ChatTemplate
from shared.errors import InvalidRequest, SettingsError

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages=USER, **options) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ bos_token }}{{ eos_token }}{{ messages[0].content }}", "<s>hi"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),  # trim_blocks, lstrip_blocks
        ("{{ {'a': '<b>&é\"'} | tojson }}", '{"a": "<b>&é\\""}'),
        ("{{ [1, {'b': 2}] | tojson(indent=1) }}", '[\n 1,\n {\n  "b": 2\n }\n]'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{{ messages|length }}{% endgeneration %}c", "ab1c"),
        ("{% if tools is none %}none{% endif %}{% if add_generation_prompt %}A{% endif %}", "noneA"),
    ],
)
def test_templates_find_what_hugging_face_gives_them(source, wanted):
    assert render(source) == wanted


def test_the_date_is_todays():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now(datetime.UTC).year)


def test_callers_may_set_further_variables_but_not_ours():
    assert render("{{ thinking }}", extra={"thinking": 5}) == "5"
    with pytest.raises(InvalidRequest) as caught:
        render("", extra={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_the_requests_error(source):
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_the_rendered_chat_is_bounded(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    source = "{% for i in range(200) %}{{ messages[0].content }}{% endfor %}"
    assert len(render(source)) == 400
    with pytest.raises(InvalidRequest, match="exceeds"):
        render(source, [{"role": "user", "content": "x" * 100}])
    with pytest.raises(InvalidRequest, match="exceeds"):
        render("{{ messages | tojson(indent=900) | length }}")


def test_a_template_that_does_not_compile_is_a_settings_error():
    with pytest.raises(SettingsError):
        render("{% if %}")


def test_developer_messages_are_system_messages_to_templates_that_know_no_others():
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{% if messages[0].role == 'developer' %}yes{% endif %}", messages) == "yes"
    assert messages[0]["role"] == "developer", "the caller's own are left alone"


LLAMA_3 = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|eot|>{% endfor %}"
CHATML = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}<|eot|>{% endfor %}"
DEEPSEEK = (  # V3: what has content is no call
    "{% for m in messages %}<|{{ m['role'] }}|>{% if NONE %}{{ m['tool_calls'] | tojson }}{% else %}"
    "{{ m['content'] }}{% endif %}<|eot|>{% endfor %}"
)


@pytest.mark.parametrize("source", [LLAMA_3, CHATML])
def test_content_that_is_none_beside_calls_is_no_text_to_a_template_that_does_not_ask(source):
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [5]}]
    assert render(source, messages) == "<|user|>hi<|eot|><|assistant|><|eot|>"
    assert messages[1]["content"] is None, "the caller's own are left alone"
    assert render("{% if tools is not none %}x{% endif %}" + source, messages).endswith(
        "<|assistant|><|eot|>"
    )


@pytest.mark.parametrize(
    "asks",
    ["m['content'] is none", "m.content  is\nnone", 'not m["content"] is not none', "m.get('content') == None",
     "not(m['content'] != none)"],
)  # fmt: skip
def test_a_template_that_asks_whether_content_is_none_is_told(asks):
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [5]}]
    wanted = "<|user|>hi<|eot|><|assistant|>[5]<|eot|>"
    assert render(DEEPSEEK.replace("NONE", asks), messages) == wanted


@pytest.mark.parametrize(
    ("content", "shown", "trimmed"), [("ab", "ab", "ab"), ("  ab \n", "  ab \n", "ab"), ("end", "end", "end")]
)
def test_continuing_the_final_message_cuts_behind_it(content, shown, trimmed):
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": content}]
    assert render(source, messages, continue_final_message=True) == "[user]hi<end>[assistant]" + shown
    source = source.replace("m.content", "m.content | trim")
    assert render(source, messages, continue_final_message=True) == "[user]hi<end>[assistant]" + trimmed
    with pytest.raises(InvalidRequest):
        render(source, [{"role": "assistant", "content": " "}], continue_final_message=True)
