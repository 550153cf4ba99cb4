"""Thoughts end after as many tokens as the request has for them, with drafts as without."""

from pathlib import Path

import pytest
from families import FAMILIES
from scripted import K, scripted_llm, writing

from peagle.completion import Completion
from peagle.config import SamplingParams, StructuredOutputs
from peagle.live_request import ChatTurn

QUESTION = [{"role": "user", "content": "Why?"}]
BUDGETED = [name for name, family in FAMILIES.items() if family.thinks and name != "gpt-oss"]
DIGITS = StructuredOutputs(regex="[0-9]{2}")


@pytest.mark.parametrize("name", BUDGETED)
def test_thoughts_end_at_the_budget(name: str, tmp_path: Path):
    """Exactly, for every place among drafts; what is said after them goes on as ever."""
    llm, script = scripted_llm(name, tmp_path)
    span = llm.dialect.thought_span(llm.render(QUESTION))
    assert span is not None

    def answers(**how: object) -> list[Completion]:
        params = [SamplingParams(max_tokens=80, num_speculative_tokens=k, **how) for k in (0, 3, K)]
        with writing(script, name, FAMILIES[name].write("a b c d e f g h i j k l", "Done.", "")):
            return [llm.chat([QUESTION], one)[0] for one in params]

    free = answers()[0]
    thought = free.sections.count("reasoning")
    assert thought > 8
    for budget in (0, 1, 4, 7, thought, thought + 5):
        plain, *drafted = answers(thinking_token_budget=budget)
        between = plain.token_ids[: plain.token_ids.index(span.end)]
        counted = len(between) - (span.begin in between)
        assert counted == min(budget, free.token_ids.index(span.end) - (span.begin in between))
        assert all(one.token_ids == plain.token_ids for one in drafted)
        assert plain.message.content


def test_a_form_follows_thoughts_that_were_ended(tmp_path: Path):
    llm, script = scripted_llm("qwen3", tmp_path)
    how = SamplingParams(max_tokens=80, thinking_token_budget=3, structured_outputs=DIGITS)
    with writing(script, "qwen3", FAMILIES["qwen3"].write("a b c d e f g h", "Done.", "")):
        [done] = llm.chat([QUESTION], how)
    assert done.finish_reason == "stop"
    assert done.message.content.strip().isdigit()


def test_a_budget_that_the_answer_cannot_exceed_binds_nothing(tmp_path: Path):
    """Agents send one with every request; a request that nothing binds waits for no host."""
    llm, _ = scripted_llm("qwen3", tmp_path)
    prompt, turn = llm.render(QUESTION), ChatTurn()
    for budget, bound in ((78, True), (79, False), (500, False)):
        how = SamplingParams(max_tokens=80, thinking_token_budget=budget)
        assert (llm.prepare(prompt, how, turn).form is not None) == bound


def test_without_a_token_for_their_end_thoughts_are_free(tmp_path: Path):
    """As of a family after whose thoughts others may follow."""
    llm, _ = scripted_llm("gpt-oss", tmp_path)
    prompt = llm.render(QUESTION)
    assert llm.dialect.thought_span(prompt) is None
