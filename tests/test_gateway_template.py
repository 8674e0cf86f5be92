from __future__ import annotations

import json
from datetime import datetime

import pytest

from orchestrator.errors import ChatTemplateError
from orchestrator.gateway.template import ChatMessage, ChatTemplate, missing_template

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_conversation_is_rendered_up_to_the_answer():
    messages = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Hello"), ChatMessage("user", "<b>&</b>")]
    assert ChatTemplate(CHATML).render(messages) == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\n<b>&</b><|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_are_trimmed_and_loop_controls_work():
    source = """
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {% if true %}
[{{ message.content }}]
    {% endif %}
{%- endfor %}
"""
    assert ChatTemplate(source).render([ChatMessage("system", "no"), ChatMessage("user", "yes")]) == "[yes]\n"


def test_the_helpers_of_the_transformers_library_are_there():
    source = (
        "{{ bos_token }}{{ messages[0].content }}|{{ messages | tojson }}|{{ {'b': 1, 'a': '<'} | tojson(indent=1) }}"
        "|{{ strftime_now('%d %b %Y') }}|{% generation %}g{% endgeneration %}|{{ tools is none }}|{{ thinking }}"
    )
    template = ChatTemplate(source, bos="<s>", now=lambda: datetime(2024, 7, 9))
    text, message, indented, day, body, no_tools, thinking = template.render(
        [ChatMessage("user", "ü<")], {"thinking": "yes"}
    ).split("|")
    assert text == "<s>ü<"
    assert json.loads(message) == [{"role": "user", "content": "ü<"}]
    assert "ü" in message
    assert indented == '{\n "b": 1,\n "a": "<"\n}'
    assert (day, body, no_tools, thinking) == ("09 Jul 2024", "g", "True", "yes")


def test_variables_cannot_replace_the_conversation():
    assert ChatTemplate("{{ messages[0].content }}").render([ChatMessage("user", "mine")], {"messages": []}) == "mine"


def test_a_refusal_carries_the_words_of_the_template():
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    template = ChatTemplate(source)
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        template.render([ChatMessage("system", "x")])
    assert template.render([ChatMessage("user", "x")]) == "x"


def test_text_is_given_in_parts_where_the_template_reads_parts():
    source = "{% for part in messages[0].content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    assert ChatTemplate(source).render([ChatMessage("user", "parts")]) == "parts"


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}{{ message.content }}",  # no endfor
        "{{ message['content'",
        "{{ messages[0].content | nosuchfilter }}",
        "{{ messages[0].content.nosuch.attribute }}",
        "{{ raise_exception('never') }}",
        "no user text at all",
        "{% include 'other' %}{{ messages[0].content }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_broken_template_is_found_at_once(source):
    with pytest.raises(ChatTemplateError, match="broken") as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}{{ messages[0].content }}",
        "{{ messages.append(1) }}{{ messages[0].content }}",
        "{% for i in range(100000000) %}x{% endfor %}{{ messages[0].content }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(attack):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(attack).render([ChatMessage("user", "x")])


def test_a_missing_template_says_what_works_and_what_to_do():
    error = missing_template()
    assert "no chat template" in str(error)
    assert "--chat-template" in error.hint
