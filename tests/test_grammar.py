"""Structured outputs: always in their form, and the same with and without speculation."""

import json
import re
import resource
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tiny
from chat_templates import byte_tokenizer
from families import tokenizer
from tokenizers import decoders

from peagle import LLM, EngineConfig, InputError, SamplingParams, SpeculativeConfig
from peagle.config import StructuredOutputs
from peagle.engine.engine import Engine
from peagle.grammar import lark_rule, refuse_added_tokens
from peagle.grammar_compiler import GrammarCompiler
from peagle.pair import bundled
from peagle.schema import kept_form

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputs(json_schema=SCHEMA),
    StructuredOutputs(json_schema=json.dumps(SCHEMA)),
    StructuredOutputs(regex=r"[a-f]{3}-[0-9]{2,4}"),
    StructuredOutputs(choice=("yes", 'no "never"', "perhaps")),
    StructuredOutputs(grammar='start: "(" ("a" | "b")+ ")"'),
]
PROMPT = "def describe(item):\n    return "


def in_form(form: StructuredOutputs, text: str) -> bool:
    if form.json_schema is not None:
        value = json.loads(text)
        return (
            value.keys() == {"name", "count", "tags"}
            and len(value["name"]) <= 12
            and 0 <= value["count"] <= 99
            and set(value["tags"]) <= {"red", "blue"}
        )
    if form.choice is not None:
        return text in form.choice
    return re.fullmatch(form.regex or r"\([ab]+\)", text) is not None


@pytest.fixture(scope="module")
def llm() -> LLM:
    speculation = SpeculativeConfig(model=str(bundled("peagle")), num_speculative_tokens=5)
    sizes = {"kv_cache_memory": 1 << 26, "max_num_seqs": 8}
    config = EngineConfig(dtype="float32", draft_length="fixed", **sizes)
    return LLM(bundled("target"), speculation, config)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_have_their_form_with_and_without_speculation(llm: LLM, temperature: float):
    params = [
        SamplingParams(
            structured_outputs=form,
            max_tokens=160,
            temperature=temperature,
            seed=7,
            num_speculative_tokens=k,
        )
        for form in FORMS
        for k in (5, 0)
    ]
    done = llm.generate([PROMPT] * len(params), params)
    for how, completion in zip(params, done, strict=True):
        assert how.structured_outputs is not None
        if completion.finish_reason == "stop":  # else cut at max_tokens in the middle
            assert in_form(how.structured_outputs, completion.text), completion.text
    assert sum(completion.finish_reason == "stop" for completion in done) >= 6
    for speculated, plain in zip(done[::2], done[1::2], strict=True):
        assert speculated.token_ids == plain.token_ids
    assert any(completion.speculation.accepted for completion in done)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_a_grammar_costs_no_acceptance(method: str, on_device: bool):
    """At no position, where the text is the one that is written without it."""
    speculation = SpeculativeConfig(model=str(bundled(method)), num_speculative_tokens=5)
    config = EngineConfig(dtype="float32", kv_cache_memory=1 << 26, draft_length="fixed")
    with tiny.on_device(on_device):
        llm = LLM(bundled("target"), speculation, config)
    free, longer = llm.generate([PROMPT] * 2, [SamplingParams(max_tokens=n) for n in (64, 80)])
    form = StructuredOutputs(choice=(longer.text,))
    [bound] = llm.generate([PROMPT], SamplingParams(max_tokens=64, structured_outputs=form))
    assert bound.token_ids == free.token_ids
    assert bound.speculation == free.speculation
    assert all(free.speculation.accepted_per_position)


def test_an_unbound_request_beside_it_is_not_touched(llm: LLM):
    plain = SamplingParams(max_tokens=24)
    bound = SamplingParams(max_tokens=24, structured_outputs=FORMS[2])
    [alone] = llm.generate([PROMPT], plain)
    beside, _ = llm.generate([PROMPT] * 2, [plain, bound])
    assert beside.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (
            StructuredOutputs(json_schema={"uniqueItems": True}, strict=True),
            "no grammar can keep uniqueItems; .+",
        ),
        (StructuredOutputs(json_schema="{not json"), ".+"),
        (StructuredOutputs(regex="(["), ".+ regex parse error: unclosed character class"),
        (StructuredOutputs(grammar="start: nothing_of_the_kind"), ".+ unknown name: .+"),
        (StructuredOutputs(regex=r"[^\s\S]"), "no text fits"),
        (StructuredOutputs(grammar='start: "a\tb"'), ".+ lexer error"),
        (StructuredOutputs(json_schema="[1, 2]"), "json is a JSON schema, an object or .+"),
    ],
)
def test_forms_that_cannot_be_followed_are_refused(llm: LLM, form: StructuredOutputs, reason: str):
    with pytest.raises(InputError, match=rf"^structured outputs: {reason}$"):
        llm.generate([PROMPT], SamplingParams(structured_outputs=form))
    assert not llm.engine.core.busy


@pytest.mark.parametrize("grammar", ['root ::= "\\', "root ::= [\\", "root ::= ("])
def test_gbnf_without_an_end_is_refused(llm: LLM, grammar: str):
    form = StructuredOutputs(grammar=grammar)
    with pytest.raises(InputError, match=r"not a grammar in GBNF: ."):
        llm.prepare(PROMPT, SamplingParams(structured_outputs=form))


@pytest.mark.parametrize(("regex", "text"), [("a/b", "a/b"), (r"a\/b", "a/b"), (r"\\/b", "\\/b")])
def test_a_rule_of_a_regex_means_what_it_means_alone(llm: LLM, regex: str, text: str):
    """Where slashes delimit it, whichever way its own are written."""
    alone = StructuredOutputs(regex=regex)
    as_rule = StructuredOutputs(grammar=f"start: {lark_rule(alone)}")
    how = [SamplingParams(structured_outputs=form) for form in (alone, as_rule)]
    assert [done.text for done in llm.generate([PROMPT] * 2, how)] == [text] * 2


def test_without_the_extra_every_form_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in ("llguidance", "llguidance.gbnf_to_lark"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("peagle.sandbox.Sandbox.call", lambda _, function, text: function(text))
    for form in (StructuredOutputs(grammar="root ::= 'a'"), StructuredOutputs(json={"type": "x"})):
        with pytest.raises(InputError, match="structured outputs need llguidance"):
            lark_rule(kept_form(form))


def test_a_form_is_compiled_once_for_all_that_bring_it(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    compiled, compile_one = [], GrammarCompiler._matcher

    def count(self: GrammarCompiler, wanted: StructuredOutputs) -> Any:
        compiled.append(wanted)
        return compile_one(self, wanted)

    monkeypatch.setattr(GrammarCompiler, "_matcher", count)
    form, like_it = (StructuredOutputs(json_schema={"const": value}) for value in (True, 1))
    how = [SamplingParams(structured_outputs=form, seed=seed) for seed in range(3)]
    done = llm.generate([PROMPT] * 4, [*how, SamplingParams(structured_outputs=like_it)])
    assert [completion.text for completion in done] == ["true"] * 3 + ["1"]
    assert len(compiled) == 2


def test_repeats_within_repeats_end_soon(llm: LLM):
    """llguidance's default limit would end it only after 250 MB."""
    form = StructuredOutputs(regex="((a{100}){100}){100}b")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    llm.generate([PROMPT], SamplingParams(structured_outputs=form, max_tokens=1))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10


@pytest.mark.parametrize("values", [{}, {"json_object": True, "regex": "a"}, {"choice": ()}])
def test_exactly_one_form_is_given(values: dict[str, object]):
    with pytest.raises(InputError):
        StructuredOutputs(**values)


@pytest.mark.parametrize("other", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_a_form_ends_where_it_is_complete(other: dict[str, object]):
    with pytest.raises(InputError, match="leave out min_tokens and ignore_eos"):
        SamplingParams(structured_outputs=FORMS[0], **other)


def test_a_long_chain_of_rules_is_followed_to_its_end(llm: LLM):
    """Their recursive compilation ended the process."""
    rules = ["start: r0", *(f"r{i}: r{i + 1}" for i in range(3500)), 'r3500: "ok"']
    how = SamplingParams(structured_outputs=StructuredOutputs(grammar="\n".join(rules)))
    [done] = llm.generate([PROMPT], how)
    assert (done.text, done.finish_reason) == ("ok", "stop")


def test_a_grammar_that_takes_too_long_a_token_ends_its_request(llm: LLM):
    grammar = StructuredOutputs(grammar="start: e\ne: /./ | e e | e e e")
    how = SamplingParams(structured_outputs=grammar, max_tokens=200)
    [done] = llm.generate([PROMPT], how)
    assert done.finish_reason == "error"
    assert done.failure is not None
    assert done.failure.startswith("structured outputs: ")


def test_what_rules_and_form_leave_nothing_for_is_not_shown(llm: LLM):
    form = StructuredOutputs(choice=("ok",))
    [told] = llm.generate([PROMPT], SamplingParams(structured_outputs=form))
    how = SamplingParams(structured_outputs=form, bad_words=("o", "ok"), logprobs=1)
    [done] = llm.generate([PROMPT], how)
    assert told.text == "ok"
    assert (done.finish_reason, done.text, done.token_ids) == ("error", "", ())
    assert not done.logprobs


def test_drafts_alone_make_no_grammar_too_complex(llm: LLM):
    """They reach states that the output, cut at its length, never does."""
    grammar = StructuredOutputs(grammar="start: e\ne: /./ | e e | e e e")

    def finished(length: int, k: int | None) -> tuple[tuple[int, ...], str]:
        how = {"structured_outputs": grammar, "max_tokens": length, "num_speculative_tokens": k}
        [done] = llm.generate([PROMPT], SamplingParams(**how))
        return done.token_ids, done.finish_reason

    whole = len(finished(200, 0)[0])
    for length in range(whole - 6, whole):
        assert finished(length, None) == finished(length, 0)
        assert finished(length, 0)[1] == "length"


@pytest.mark.parametrize("text", ["a\ufffdb", "ok \ufffd", "\ufffd"])
def test_a_character_that_looks_unfinished_is_not_lost(llm: LLM, text: str):
    how = SamplingParams(structured_outputs=StructuredOutputs(choice=(text,)))
    [done] = llm.generate([PROMPT], how)
    assert (done.text, done.finish_reason) == (text, "stop")


def test_a_stop_string_that_the_last_token_allowed_completes_is_the_reason(llm: LLM):
    form = StructuredOutputs(choice=("ok \ufffd",))
    whole = SamplingParams(structured_outputs=form)
    [uncut] = llm.generate([PROMPT], whole)
    count = len(uncut.token_ids) - 1  # less the end of text
    how = SamplingParams(structured_outputs=form, stop=("\ufffd",), max_tokens=count)
    [done] = llm.generate([PROMPT], how)
    assert (done.text, done.finish_reason) == ("ok ", "stop")


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputs(choice=("<think>", "no")),
        StructuredOutputs(json={"const": {"a": "<|im_end|>"}}),
        StructuredOutputs(json={"properties": {"a": {"enum": ["x", "</tool_call>"]}}}),
        StructuredOutputs(json={"properties": {"<think>": {}}}),
        StructuredOutputs(regex="<think>[a-z]+"),
        StructuredOutputs(grammar='start: "<think>" /[a-z]+/'),
    ],
)
def test_a_text_that_is_a_token_of_its_own_is_refused_by_name(form: StructuredOutputs):
    added = tokenizer("qwen3").get_added_vocab()
    with pytest.raises(InputError, match="is a token of its own"):
        refuse_added_tokens(form, added)
    schema = {"description": "<think>", "const": "think"}
    refuse_added_tokens(StructuredOutputs(json=schema), added)
    refuse_added_tokens(StructuredOutputs(grammar='start: <think> "a"'), added)


WORDS = ["\n\n", "  ", "ok", "Jahr"]
"""Added tokens that are ordinary text, as fine-tunes have them."""


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputs(choice=("token", "broken")),
        StructuredOutputs(choice=("a  b", "a\n\nb")),
        StructuredOutputs(json={"enum": ["Jahr", "ok"]}),
        StructuredOutputs(regex="(ok|  )"),
        StructuredOutputs(grammar='start: "a\\n\\nb"'),
    ],
)
def test_added_tokens_that_are_words_are_text_of_a_form(form: StructuredOutputs, worded: LLM):
    [done] = worded.generate(["abc"], SamplingParams(structured_outputs=form, max_tokens=60))
    assert done.finish_reason == "stop"


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    own, directory = byte_tokenizer(None), tmp_path_factory.mktemp("worded")
    own.add_tokens(WORDS)
    end = own.eos_token_id
    tiny.save_target(directory, vocab_size=len(own), eos_token_id=end)
    engine = Engine(tiny.load_target(directory), None, 0, EngineConfig(dtype="float32"), [end])
    return LLM.over(engine, own)


def test_a_form_that_was_compiled_is_kept_by_its_content():
    """Also where Python takes two for equal: true is 1, and properties have an order."""
    own = tokenizer("plain")
    compiler = GrammarCompiler(own, len(own), [own.eos_token_id])
    with mock.patch.object(compiler, "_matcher", wraps=compiler._matcher) as made:
        for schema in ({"const": True}, {"const": 1}, {"const": True}):
            compiler.compile(StructuredOutputs(json=schema))
        assert made.call_count == 2
        for order in ("ab", "ba", "ab"):
            properties = {name: {"type": "null"} for name in order}
            compiler.compile(StructuredOutputs(json={"properties": properties}))
        assert made.call_count == 4


@pytest.mark.parametrize("missing", [1, 3, 8, 20])
def test_a_target_may_lack_some_of_its_tokenizers_tokens(missing: int):
    """They are never allowed, and what can be spelled without them is."""
    own = byte_tokenizer(None)
    size = len(own) - missing
    compiler = GrammarCompiler(own, size, [1])
    constraint = compiler.compile(StructuredOutputs(choice=("hi hi", "a\n\nb")))
    written: list[int] = []
    while 1 not in written:
        [row] = constraint.allowed([]).numpy()
        bits = np.unpackbits(row, bitorder="little")
        assert not bits[size:].any()
        written.append(int(bits.argmax()))
        constraint.advance(written[-1:])
    assert constraint.failure is None
    assert own.decode(written[:-1]) in ("hi hi", "a\n\nb")


def test_a_token_that_the_target_lacks_fails_where_it_has_to_come():
    own = byte_tokenizer(None)
    last = len(own) - 1
    constraint = GrammarCompiler(own, last, [1]).compile(
        StructuredOutputs(grammar=f'start: "a" <[{last}]>')
    )
    letter = own("a", add_special_tokens=False).input_ids
    rows = constraint.allowed(letter)
    assert rows[1].tolist() == [255] * len(rows[1])
    constraint.advance(letter)
    assert constraint.failure is None
    constraint.allowed([])
    constraint.advance([5])
    assert (
        constraint.failure == "structured outputs: what has to come next is no token of the target"
    )


def test_a_tokenizer_that_grammars_do_not_know_is_a_refusal():
    own = byte_tokenizer(None)
    own.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(InputError, match="structured outputs: not with this tokenizer: can't"):
        GrammarCompiler(own, len(own), [1])
