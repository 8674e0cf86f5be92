"""Tools, JSON and several answers, by the official client, over the twin of the engine and over the real one."""

from __future__ import annotations

import json
import math

import openai
import pytest
from api_server import fake_server
from fake_engine import TEMPLATE, FakeModel, FakeSession, answer
from serve_process import CHATML, add_template, running
from test_api_app import HI, client, get, post, wait_until

CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NATIVE = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for c in message.tool_calls or [] %}{{ '\\n' if not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
).replace("{% if add", "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}{% if add")


@pytest.fixture(params=["native", "explained"])
def chatting_model(request):
    """A template that knows tools, and one to whose model they have to be explained."""
    return FakeModel(NATIVE if request.param == "native" else TEMPLATE)


def test_two_parallel_calls_and_then_the_results_turn(chatting_model):
    session = FakeSession(script=answer([*CALLS.encode()]), n_ctx=4096)
    with fake_server(session, chatting_model) as (url, _):
        api = client(url)
        asked = {"model": "fake", "messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}
        whole = api.chat.completions.create(**asked)
        stream = list(api.chat.completions.create(**asked, stream=True))
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
            ("get_weather", {"city": "Paris", "days": 2}),
            ("get_weather", {"city": "Köln"}),
        ]
        assert len({call.id for call in message.tool_calls}) == 2
        calls = {}
        for chunk in stream:
            for part in chunk.choices[0].delta.tool_calls or []:
                call = calls.setdefault(part.index, ["", "", ""])
                call[0] += part.id or ""
                call[1] += part.function.name or ""
                call[2] += part.function.arguments or ""
        assert [call[1:] for call in calls.values()] == [
            [call.function.name, call.function.arguments] for call in message.tool_calls
        ]
        assert all(len(call[0]) == 9 for call in calls.values())
        assert stream[-1].choices[0].finish_reason == "tool_calls"
        assert sum(len(chunk.choices[0].delta.tool_calls or []) for chunk in stream) > 20  # arguments as they come
        # The official client's own accumulation reads the stream as well.
        with api.chat.completions.stream(**asked) as typed:
            final = typed.get_final_completion()
        assert [call.function.arguments for call in final.choices[0].message.tool_calls] == [
            c[2] for c in calls.values()
        ]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(message.tool_calls, ("sunny", "rain"), strict=True)
        ]
    session = FakeSession(script=answer([*b"Sun and rain."]), n_ctx=4096)
    with fake_server(session, chatting_model) as (url, _):
        conversation = [*asked["messages"], message.model_dump(exclude_none=True), *results]
        last = client(url).chat.completions.create(model="fake", messages=conversation, tools=[WEATHER])
        assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("Sun and rain.", "stop")
        prompt = bytes(token for token in session.held if token < 256).decode()
        assert [prompt.index(word) for word in ("Paris", "Köln", "sunny", "rain")] == sorted(
            prompt.index(word) for word in ("Paris", "Köln", "sunny", "rain")
        )


def test_text_before_a_call_and_thoughts_before_both():
    template = NATIVE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    said = "I should look.\n</think>\n\nLet me look.\n" + CALLS
    session = FakeSession(script=answer([*said.encode()]), n_ctx=4096)
    session_script = session._script  # the twin's script looks for the end of the prompt
    session._script = lambda held: session_script(without(held, b"<think>\n"))
    with fake_server(session, FakeModel(template)) as (url, _):
        asked = {"model": "fake", "messages": HI, "tools": [WEATHER]}
        message = client(url).chat.completions.create(**asked).choices[0].message
        stream = list(client(url).chat.completions.create(**asked, stream=True))
        plain = client(url).chat.completions.create(
            model="fake", messages=HI, extra_body={"reasoning_format": "none"}
        )
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == (
        "I should look.",
        "Let me look.",
        2,
    )
    thoughts = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in stream)
    assert thoughts == "I should look."
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Let me look."
    assert plain.choices[0].message.content == said


def without(held, mark):
    """Take a mark at the end of the prompt out of the tokens that the script sees."""
    data, mark = list(held), list(mark)
    for start in range(len(data) - len(mark), -1, -1):
        if data[start : start + len(mark)] == mark:
            return data[:start] + data[start + len(mark) :]
    return data


def test_no_choice_of_tools_is_ignored():
    session = FakeSession(script=answer([*b"I will not call."]), n_ctx=4096)
    other = {"type": "function", "function": {"name": "now"}}
    with fake_server(session, FakeModel(NATIVE)) as (url, _):
        api = client(url)
        asked = {"model": "fake", "messages": HI, "tools": [WEATHER, other], "max_tokens": 300, "seed": 1}
        free = api.chat.completions.create(**asked).choices[0]
        assert (free.message.content, free.message.tool_calls) == ("I will not call.", None)
        none = api.chat.completions.create(**asked, tool_choice="none").choices[0]
        assert (none.message.content, none.message.tool_calls) == ("I will not call.", None)
        named = {"type": "function", "function": {"name": "now"}}
        for choice, parallel in ((named, False), (named, True)):
            forced = api.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=parallel).choices[0]
            assert {call.function.name for call in forced.message.tool_calls} == {"now"}
            assert all(json.loads(call.function.arguments) == {} for call in forced.message.tool_calls)
            assert parallel or len(forced.message.tool_calls) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}},
            "uniqueItems",
        ),
        ({"json_schema": {"$ref": "#"}}, "left-recursive"),
        ({"grammar": "root ::= root"}, "left-recursive"),
        ({"grammar": "root ::= ("}, "line 1"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
            "'not'",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_refused(fields, words, stream):
    with fake_server(model=FakeModel(NATIVE)) as (url, _):
        status, text = post(url, {"messages": HI, "stream": stream, **fields})
        assert status == 400
        assert words in json.loads(text)["error"]["message"]
        assert post(url, {"messages": HI, "max_tokens": 1})[0] == 200


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text):
    value = json.loads(text)
    assert set(value) <= {"name", "age", "tags"}
    assert value["age"] in range(1, 100)
    assert len(value["name"]) <= 8
    return True


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"response_format": {"type": "json_schema", "schema": PERSON}},
        {"json_schema": PERSON},
    ],
)
def test_random_logits_write_the_schema(fields, seed):
    with fake_server() as (url, _):
        status, text = post(url, {"messages": HI, "max_tokens": 300, "seed": seed, **fields})
        assert status == 200
        choice = json.loads(text)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert is_person(choice["message"]["content"])
        status, text = post(url, {"prompt": "x", "max_tokens": 300, "seed": seed, **fields}, "/v1/completions")
        assert is_person(json.loads(text)["choices"][0]["text"])


def test_a_grammar_of_ones_own():
    with fake_server() as (url, _):
        body = {"messages": HI, "grammar": 'root ::= ("yes" | "no") "!"{3}', "temperature": 2}
        texts = {json.loads(post(url, {**body, "seed": n})[1])["choices"][0]["message"]["content"] for n in range(12)}
    assert texts == {"yes!!!", "no!!!"}


# --- several answers ------------------------------------------------------------------------------------------


def test_several_answers_are_those_of_the_following_seeds():
    with fake_server() as (url, _):
        api = client(url)
        asked = {"model": "fake", "messages": HI, "max_tokens": 12}
        single = [api.chat.completions.create(**asked, seed=seed).choices[0].message.content for seed in (5, 6, 7)]
        whole = api.chat.completions.create(**asked, seed=5, n=3)
        texts = ["", "", ""]
        options = {"include_usage": True}
        for chunk in api.chat.completions.create(**asked, seed=5, n=3, stream=True, stream_options=options):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert [choice.message.content for choice in whole.choices] == single == texts
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert whole.usage.completion_tokens == 36
        assert whole.usage.prompt_tokens == chunk.usage.prompt_tokens
        assert chunk.usage.completion_tokens == 36
        prompts = api.completions.create(model="fake", prompt=["one", "two"], n=2, max_tokens=5, seed=5)
        alone = api.completions.create(model="fake", prompt="two", max_tokens=5, seed=6)
        assert prompts.choices[3].text == alone.choices[0].text
        assert len(prompts.choices) == 4


def test_an_error_of_one_answer_ends_all(synthetic):
    with fake_server(FakeSession(n_ctx=64)) as (url, gateway):
        status, text = post(url, {"prompt": ["short", "x" * 100], "max_tokens": 50}, "/v1/completions")
        assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")
        assert post(url, {"prompt": "short", "max_tokens": 5}, "/v1/completions")[0] == 200
        assert gateway.state().slots[0].request is None


# --- the responses API ----------------------------------------------------------------------------------------


def test_responses_by_the_official_client():
    said = "<think>Hm, so.</think>Grüße, 世界 😀"
    template = TEMPLATE + "{# </think> #}"
    with fake_server(FakeSession(script=answer([*said.encode()])), FakeModel(template)) as (url, _):
        api = client(url)
        whole = api.responses.create(model="fake", input="Hi", instructions="Be kind", metadata={"a": "b"})
        assert (whole.status, whole.output_text) == ("completed", "Grüße, 世界 😀")
        assert whole.output[0].type == "reasoning"
        assert whole.output[0].content[0].text == "Hm, so."
        assert whole.usage.output_tokens == len(said.encode()) + 1
        events = list(api.responses.create(model="fake", input="Hi", stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == events[-1].response.output_text == "Grüße, 世界 😀"
        with api.responses.stream(model="fake", input=[{"role": "user", "content": "Hi"}]) as stream:
            assert stream.get_final_response().output_text == "Grüße, 世界 😀"
        short = api.responses.create(model="fake", input="Hi", max_output_tokens=16)
        assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        schema = {"type": "json_schema", "name": "p", "schema": PERSON, "strict": True}
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            api.responses.create(model="fake", input="Hi", previous_response_id="resp_1")
    with fake_server() as (url, _):
        formed = client(url).responses.create(
            model="fake", input="Hi", text={"format": schema}, max_output_tokens=300
        )
        assert is_person(formed.output_text)


# --- the real engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(synthetic, tmp_path_factory):
    model = add_template(synthetic("llama"), tmp_path_factory.mktemp("tools") / "tiny.gguf", CHATML)
    with running(model, "--unverified", "--ctx", "2048") as process:
        yield process


def test_the_real_engine_writes_the_schema(server):
    api = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked = {"model": "tiny", "messages": HI, "response_format": wanted, "max_tokens": 400, "seed": 1}
    whole = api.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "stop"
    assert is_person(whole.choices[0].message.content)
    stream = api.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


def test_the_real_engine_calls_a_tool_that_must_be_called(server):
    api = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    parameters = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    tool = {"type": "function", "function": {"name": "measure", "parameters": parameters}}
    asked = {"model": "tiny", "messages": HI, "tools": [tool], "max_tokens": 400}
    for choice in ("required", {"type": "function", "function": {"name": "measure"}}):
        whole = api.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
        (call,) = whole.choices[0].message.tool_calls
        assert call.function.name == "measure"
        assert json.loads(call.function.arguments)["unit"] in ("C", "F")
        assert whole.choices[0].finish_reason == "tool_calls"


def test_the_real_engine_refuses_a_grammar_with_an_unknown_token(server):
    status, text = post(server.url, {"messages": HI, "grammar": "root ::= <[99999999]> <no such token>"})
    assert status == 400, text
    assert json.loads(text)["error"]["code"] == "invalid_grammar"


def test_several_answers_of_the_real_engine(server):
    api = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "messages": HI, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    single = [api.chat.completions.create(**asked, seed=seed).choices[0] for seed in (5, 6)]
    both = api.chat.completions.create(**asked, seed=5, n=2)
    assert [choice.message.content for choice in both.choices] == [choice.message.content for choice in single]
    assert [choice.logprobs for choice in both.choices] == [choice.logprobs for choice in single]
    for token in both.choices[0].logprobs.content:
        assert 0 < sum(math.exp(choice.logprob) for choice in token.top_logprobs) <= 1


def test_a_client_that_leaves_in_the_middle_of_several_answers(server):
    api = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "messages": HI, "n": 2, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    stream = api.chat.completions.create(**asked, stream=True)
    for _ in range(6):
        next(iter(stream))
    stream.close()
    wait_until(lambda: not any(slot["is_processing"] for slot in get(server.url, "/slots")[1]), 5.0)
