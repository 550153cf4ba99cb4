from types import SimpleNamespace

import pytest

from peagle.bench import load
from peagle.bench.case import Case, Setup
from peagle.bench.load import Exchange, drive, open_case
from peagle.bench.pair import Pair
from peagle.bench.prompts import Prompt, load_sets
from peagle.bench.workload import PromptWorkload
from peagle.config import SamplingParams
from peagle.errors import InputError

TOKENS = 12
NONE, PEAGLE = Case("none", 0, 1), Case("peagle", 2, 1)


def work(pair, prompts=None, **sampling):
    drafters = {"eagle3": str(pair.eagle3), "peagle": str(pair.peagle)}
    sets = load_sets(["bundled"], 3) if prompts is None else {"bundled": tuple(prompts)}
    params = SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **sampling})
    return PromptWorkload(Pair(str(pair.target), drafters), sets, params)


def outputs(workload, case):
    """Token ids of each answer of a case."""
    llm = workload.open(case.setup, case.concurrency)
    return open_case(workload, llm, case).run().outputs


class Counting:
    """An LLM whose requests take as many steps as their prompt's first token says."""

    def __init__(self):
        self.left, self.seen, self.order = {}, [], []

    def prepare(self, prompt, params):
        return prompt

    def submit(self, prompt, followed):
        request_id = str(prompt)
        self.left[request_id] = prompt[0]
        self.order.append(prompt)
        return request_id

    def step(self):
        self.seen.append(len(self.left))
        for request_id in self.left:
            self.left[request_id] -= 1
        done = [request_id for request_id, steps in self.left.items() if steps == 0]
        for request_id in done:
            del self.left[request_id]
        return [
            SimpleNamespace(request_id=one, completion=SimpleNamespace(text=one)) for one in done
        ]


def request(prompt, *turns):
    """A request whose later turns are these prompts."""

    def then(answer):
        assert answer == str(prompt)
        return request(*turns) if turns else None

    return Exchange(prompt, SamplingParams(), then)


def test_as_many_requests_as_asked_are_in_flight_and_results_keep_the_order():
    llm, finished = Counting(), []
    prompts = [[3, 0], [1, 1], [2, 2], [2, 3], [1, 4], [4, 5]]
    done = drive(llm, [request(p) for p in prompts], 2, lambda: finished.append(1))
    assert [one.text for one in done] == [str(prompt) for prompt in prompts]
    assert len(finished) == 6
    assert llm.seen == [2, 2, 2, 2, 2, 1, 1, 1]


def test_a_conversation_goes_on_at_once_and_counts_as_one():
    llm, finished = Counting(), []
    done = drive(llm, [request([1, 0], [1, 1]), request([1, 2])], 1, lambda: finished.append(1))
    assert llm.order == [[1, 0], [1, 1], [1, 2]]
    assert [one.text for one in done] == ["[1, 0]", "[1, 1]", "[1, 2]"]
    assert len(finished) == 2
    assert max(llm.seen) == 1


def test_a_later_turn_has_the_answer_before_it(pair):
    prompt = Prompt("Say", ({"role": "user", "content": "Say"},), ("Go on", "And"))
    workload = work(pair, [prompt])
    llm = workload.open(NONE.setup, 1)
    (first,) = workload.requests(NONE, llm.tokenizer)
    second = first.then("yes")
    assert llm.tokenizer.decode(second.tokens).endswith(
        "<user>Say<assistant>yes<user>Go on<assistant>"
    )
    third = second.then("no")
    assert llm.tokenizer.decode(third.tokens).endswith(
        "<user>Go on<assistant>no<user>And<assistant>"
    )
    assert third.then("end") is None
    answers = llm.tokenizer("yesno", add_special_tokens=False).input_ids
    assert first.most_tokens == len(third.tokens) - len(answers) + 3 * TOKENS
    assert len(outputs(workload, NONE)) == 3


def test_a_conversation_that_may_not_fit_is_refused_before_it_begins(pair):
    prompt = Prompt("Say", ({"role": "user", "content": "Say"},), ("Go on",) * 9)
    workload = work(pair, [prompt], max_tokens=60)
    with pytest.raises(InputError, match="600 are to follow, but the context holds 512"):
        open_case(workload, workload.open(NONE.setup, 1), NONE)


def test_no_case_profits_from_the_prompts_of_another(pair):
    workload = work(pair)
    llm = workload.open(PEAGLE.setup, 1)
    one = workload.requests(PEAGLE, llm.tokenizer)[0]
    assert len(one.tokens) > 2 * 16  # blocks, so that there would be something to find
    drive(llm, [one], 1)
    llm.submit(llm.prepare(one.tokens, one.params))
    (item,) = llm.engine.core.scheduler.plan().work
    assert item.rows == len(one.tokens)


def test_outputs_end_at_their_length_or_where_prompts_say_or_naturally(pair, monkeypatch):
    monkeypatch.setattr("peagle.bench.target.end_tokens", lambda *_: tuple(range(300)))
    prompts = load_sets(["bundled"], 3)["bundled"]
    endless = [Prompt(prompt.text) for prompt in prompts]
    assert [len(one) for one in outputs(work(pair, endless), NONE)] == [TOKENS] * 3
    assert sum(map(len, outputs(work(pair, prompts), NONE))) < 3 * TOKENS
    natural = outputs(work(pair, endless, ignore_eos=False), NONE)
    assert sum(map(len, natural)) < 3 * TOKENS


def test_a_stop_text_ends_outputs_for_every_method(pair):
    whole = outputs(work(pair), NONE)
    tokenizer = work(pair).open(NONE.setup, 1).tokenizer
    letter = tokenizer.decode(whole[0][TOKENS // 2])
    texts = [prompt.text for prompt in load_sets(["bundled"], 3)["bundled"]]
    stopped = work(pair, [Prompt(text, stop=(letter,)) for text in texts])
    assert len(outputs(stopped, NONE)[0]) < len(whole[0]) == TOKENS
    assert outputs(stopped, PEAGLE) == outputs(stopped, NONE)


def test_sampled_outputs_are_the_same_with_and_without_a_drafter(pair):
    """Each request has a seed of its own, which no method changes."""
    workload = work(pair, [Prompt("def f(x):")] * 2, top_k=40)
    none, peagle = (Case(case.method, case.k, 1, temperature=1.0) for case in (NONE, PEAGLE))
    found = outputs(workload, none)
    assert outputs(workload, peagle) == found
    assert found[0] != found[1]
    assert outputs(workload, NONE)[0] not in found


def test_prompts_are_warmed_up_with_few_tokens(pair, monkeypatch):
    asked, original = [], load.drive

    def watched(llm, requests, *arguments):
        asked.append([one.params.max_tokens for one in requests])
        return original(llm, requests, *arguments)

    monkeypatch.setattr(load, "drive", watched)
    workload = work(pair, max_tokens=40)
    case = Case("none", 0, 2)
    open_case(workload, workload.open(Setup("none", 0, "fixed"), 2), case).run()
    assert asked == [[16, 16], [40, 40, 40]]
