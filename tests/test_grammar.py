"""Grammars: what is refused before the engine sees it, and that the engine's sampler does what the twin does."""

from __future__ import annotations

import itertools
import json
import re
import time

import numpy as np
import pytest
from grammar_twin import Author, GrammarTwin, Matcher

from orchestrator.api.constraints.gbnf import parse_grammar
from orchestrator.engine.model import Model
from orchestrator.errors import InputError, RequestError
from orchestrator.gateway.sampling import SamplingParameters, TokenHistory, choose_token
from orchestrator.gateway.sequence import GenerationRequest, Sequence

JSON = r"""
root   ::= object   # as the engine's own documentation has it
object ::= "{" ws ( pair ( "," ws pair )* )? "}" ws
pair   ::= string ":" ws value
value  ::= object | string | number | "true" ws | "null" ws |
  "[" ws ( value ( "," ws value )* )? "]" ws
string ::= "\"" ( [^"\\\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" [0-9a-fA-F]{4} ) )* "\"" ws
number ::= "-"? ( "0" | [1-9] [0-9]{0,15} ) ( "." [0-9]+ )? ws
ws     ::= ( " " | "\n" )?
"""


GOOD = rb"[\x00-\x7f\x80-\xdf]"


@pytest.mark.parametrize(
    "grammar",
    [
        JSON,
        'root ::= "a"',
        'root ::= ""',
        "root ::= ",
        'root ::= ("x"?)* "y"',
        "root ::= ws* [a-z]\nws ::= [ \\t\\n]*",
        'root::=a|b\r\na::="x"\r\nb::="y"\r\n',
        "root ::= [^a] . [a-] [\\]\\-\\[] [\\x41-\\u00e9\\U0001F600]",
        'root ::= "a"{3} "b"{2,} "c"{0,4} "d"{ 1 , 2 }',
        "root ::= (\n [a]\n | [b]\n)",
        "root ::= [a] root | [b]",
        "\n".join(["root ::= a0", *(f"a{n} ::= a{n + 1}" for n in range(2000)), 'a2000 ::= "x"']),
    ],
)
def test_the_engine_takes_what_passes(grammar, vocabulary):
    assert "root" in parse_grammar(grammar)
    vocabulary.constrain(grammar)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("", "no rule 'root'"),
        ('top ::= "x"', "no rule 'root'"),
        ("root ::= other", "no rule 'other'"),
        ('root ::= "x', "line 1"),
        ('root ::= "x"\nroot ::= "y"', "twice"),
        ('root ::= "x"\nother : "y"', "line 2: '::='"),
        ('root ::= ("x"', "')' is missing"),
        ('root ::= "x")', "out of place"),
        ('root ::= * "x"', "nothing in front of '*'"),
        ('root ::= "x"{3,2}', "wrong way round"),
        ('root ::= "x"{9999}', "more than 2000"),
        ('root ::= "x"{99999999999999999999}', "too long"),
        ('root ::= "x"{,3}', "number is missing"),
        ("root ::= []", "empty"),
        ("root ::= [z-a]", "backwards"),
        ("root ::= [a", "ends inside"),
        (r'root ::= "\q"', "not an escape"),
        (r'root ::= "\x4"', "2 hexadecimal"),
        ('root ::= "a\0b"', "ends inside"),
        ('root ::= "\ud800"', "not valid Unicode"),
        ('root ::= root "x" | "y"', "left-recursive"),
        ('root ::= b root "x" | "y"\nb ::= c\nc ::= "" | "z"', "left-recursive"),  # the engine misses this one
        ('root ::= a\na ::= (b)? c\nb ::= "x"*\nc ::= a "y"', "left-recursive"),
        ("root ::= " + "(" * 100_000, "nested"),
        ("root ::= [a]" + "*" * 100_000, "repetitions of repetitions"),
        ("root ::= " + "[a]{2000}" * 1000, "repeats too much"),
        (
            "\n".join([f"r{n} ::= r{n + 1} [a] | r{n + 1} [b]" for n in range(40)] + ["r40 ::= [c]\nroot ::= r0"]),
            "begin",
        ),
        ('root ::= "' + "x" * (300 << 10) + '"', "longer than"),
    ],
)
def test_what_is_refused(grammar, problem):
    begin = time.monotonic()
    with pytest.raises(RequestError) as caught:
        parse_grammar(grammar)
    assert problem in str(caught.value)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_grammar", "grammar")
    assert time.monotonic() - begin < 5


def test_many_rules_are_checked_quickly():
    names = [f"r{n * 791 % 2003}" for n in range(2003)]
    rules = [f"{a} ::= {b}" for a, b in itertools.pairwise(names)]
    begin = time.monotonic()
    parse_grammar("\n".join([*rules, f'{names[-1]} ::= "x"?', f"root ::= {names[0]}"]))
    assert time.monotonic() - begin < 5


@pytest.fixture(scope="module")
def vocabulary(synthetic):
    with Model.open(synthetic("llama")) as model:
        yield model


def pieces(model):
    return [model.piece(token) for token in range(model.n_vocab)]


def ends(model):
    return {token for token in range(model.n_vocab) if model.is_end_of_generation(token)}


@pytest.mark.parametrize("grammar", [JSON, 'root ::= "ä"* [a-e]{2,4} (. | "😀")', "root ::= [^a-z]+"])
def test_the_engine_allows_what_the_twin_allows(vocabulary, grammar):
    random = np.random.default_rng(3)
    for _ in range(4):
        real, twin = vocabulary.constrain(grammar), GrammarTwin(grammar, pieces(vocabulary), ends(vocabulary))
        for _ in range(12):
            allowed = real.allowed()
            assert np.flatnonzero(allowed).tolist() == np.flatnonzero(twin.allowed()).tolist()
            assert [real.allows(token) for token in range(len(allowed))] == allowed.tolist()
            # of the beginnings of characters only those of two bytes: the engine lets some wrong longer ones pass
            going_on = [token for token in np.flatnonzero(allowed) if re.match(GOOD, vocabulary.piece(int(token)))]
            if not going_on:
                break
            token = int(random.choice(going_on))
            real.accept(token)
            twin.accept(token)


def test_a_forbidden_token_is_an_error_and_no_crash(vocabulary):
    grammar = vocabulary.constrain('root ::= "a"')
    (wrong,) = vocabulary.tokenize("b", add_special=False)[-1:]
    with pytest.raises(Exception, match="does not allow token"):
        grammar.accept(wrong)
    with pytest.raises(InputError, match="does not take"):
        vocabulary.constrain("root ::= <no such token>")


def test_random_texts_of_a_grammar_are_texts_of_it():
    matcher = Matcher(JSON)
    for seed in range(50):
        text = Author(JSON, seed).text()
        assert matcher.accepts(text)
        json.loads(text)


class Fixed:
    """A constraint that allows some tokens, always."""

    def __init__(self, *tokens):
        self._allowed = np.isin(np.arange(6), tokens)

    def allows(self, token):
        return bool(self._allowed[token])

    def allowed(self):
        return self._allowed

    def accept(self, token):
        assert self.allows(token)


def test_allowed_tokens_keep_their_shares():
    weights = np.array([0.3, 0.3, 0.2, 0.1, 0.06, 0.04])
    logits = np.log(weights).astype(np.float32)
    draws = [
        choose_token(logits, SamplingParameters(seed=1), TokenHistory([]), index, Fixed(1, 3, 5))
        for index in range(5000)
    ]
    shares = np.bincount(draws, minlength=6) / len(draws)
    assert np.abs(shares - np.array([0, 0.3, 0, 0.1, 0, 0.04]) / 0.44).max() < 0.02
    greedy = SamplingParameters(temperature=0)
    assert choose_token(logits, greedy, TokenHistory([]), 0, Fixed(4, 5)) == 4
    assert choose_token(logits, greedy, TokenHistory([]), 0, Fixed()) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_random_logits_write_json(vocabulary, temperature):
    random = np.random.default_rng(5)
    for seed in range(5):
        sampling = SamplingParameters(temperature=temperature, seed=seed)
        request = GenerationRequest((1,), max_tokens=400, sampling=sampling, grammar=JSON)
        sequence, text = Sequence(request, vocabulary, 1000), ""
        while sequence.finish_reason is None:
            logits = random.normal(size=vocabulary.n_vocab).astype(np.float32)
            logits[[*ends(vocabulary), *(vocabulary.tokenize(c, add_special=False)[-1] for c in '"}]')]] += 6
            text += sequence.accept(logits).text
        assert sequence.finish_reason == "stop"
        assert isinstance(json.loads(text), dict)
