import dataclasses

import pytest

from peagle.bench import load
from peagle.bench.load import Case, PromptWorkload, drive, list_cases, median_run, run_cases
from peagle.bench.pair import Pair
from peagle.bench.prompts import load_prompts
from peagle.config import SamplingParams
from peagle.errors import InputError

TOKENS = 12


@pytest.fixture(scope="module")
def workload(pair):
    drafters = {"eagle3": str(pair.eagle3), "peagle": str(pair.peagle)}
    return PromptWorkload(
        Pair(str(pair.target), drafters), tuple(load_prompts("bundled", 3)), TOKENS
    )


class Counting:
    """An LLM whose requests take as many steps as their prompt's first token says."""

    def __init__(self):
        self.left, self.seen = {}, []

    def prepare(self, prompt, params):
        return prompt

    def submit(self, prompt):
        request_id = str(prompt)
        self.left[request_id] = prompt[0]
        return request_id

    def step(self):
        self.seen.append(len(self.left))
        for request_id in self.left:
            self.left[request_id] -= 1
        done = [request_id for request_id, steps in self.left.items() if steps == 0]
        for request_id in done:
            del self.left[request_id]
        chunk = type("Chunk", (), {})
        return [chunk_of(chunk, request_id, request_id) for request_id in done]


def chunk_of(kind, request_id, completion):
    chunk = kind()
    chunk.request_id, chunk.completion = request_id, completion
    return chunk


def test_as_many_requests_as_asked_are_in_flight_and_results_keep_the_order():
    llm, finished = Counting(), []
    prompts = [[3, 0], [1, 1], [2, 2], [2, 3], [1, 4], [4, 5]]
    done = drive(llm, [(p, SamplingParams()) for p in prompts], 2, lambda: finished.append(1))
    assert done == [str(prompt) for prompt in prompts]
    assert len(finished) == 6
    assert llm.seen == [2, 2, 2, 2, 2, 1, 1, 1]


def test_cases_are_every_combination_with_none_first_and_without_a_k():
    cases = list_cases(["peagle", "none"], [3, 5], [1, 4])
    assert cases == [
        Case("none", 0, 1),
        Case("none", 0, 4),
        Case("peagle", 3, 1),
        Case("peagle", 3, 4),
        Case("peagle", 5, 1),
        Case("peagle", 5, 4),
    ]


def test_every_method_writes_what_none_writes(workload):
    finished = []
    cases = list_cases(["none", "eagle3", "peagle"], [2, 4], [1, 3])
    runs = list(run_cases(workload, cases, lambda: finished.append(1)))
    assert [run.case for run in runs] == cases
    assert len(finished) == len(cases) * 3
    assert all(run.identical_to_none for run in runs)
    assert {run.outputs for run in runs} == {runs[0].outputs}
    assert all(len(output) == TOKENS for output in runs[0].outputs)
    for run in runs:
        found = run.measures
        assert found.output_tokens == 3 * TOKENS
        assert len(found.acceptance_rate_per_position) == run.case.k
        assert 0 < found.ttft_ms.p50 <= found.e2e_ms.p50 <= found.e2e_ms.p99
        assert found.otps > 0


def test_a_different_output_is_reported(workload, monkeypatch):
    original = load.drive

    def altered(llm, prompts, *arguments):
        done = original(llm, prompts, *arguments)
        if llm.k:
            done[-1] = dataclasses.replace(done[-1], token_ids=(*done[-1].token_ids[:-1], 0))
        return done

    monkeypatch.setattr(load, "drive", altered)
    runs = list(run_cases(workload, [Case("none", 0, 1), Case("peagle", 2, 1)]))
    assert [run.identical_to_none for run in runs] == [True, False]


def test_identity_is_unknown_where_none_was_not_run(workload):
    (run,) = run_cases(workload, [Case("peagle", 2, 1)])
    assert run.identical_to_none is None


def test_no_case_profits_from_the_prompts_of_another(workload):
    llm = workload.open("peagle", 2, 1)
    prompt, params = workload.requests(Case("peagle", 2, 1), llm.tokenizer)[0]
    assert len(prompt) > 2 * 16  # blocks, so that there would be something to find
    drive(llm, [(prompt, params)], 1)
    llm.submit(llm.prepare(prompt, params))
    (item,) = llm.engine.core.scheduler.plan().work
    assert item.rows == len(prompt)


def test_no_output_ends_early(workload, monkeypatch):
    """Unless its prompt says where it ends: then the end of the text is one, too."""
    monkeypatch.setattr(
        "peagle.engine_client.source.end_tokens", lambda directory, own: tuple(range(300))
    )
    endless = tuple(dataclasses.replace(prompt, stop=()) for prompt in workload.prompts)
    case = Case("none", 0, 1)
    (run,) = run_cases(dataclasses.replace(workload, prompts=endless), [case])
    assert run.measures.output_tokens == 3 * TOKENS
    (run,) = run_cases(workload, [case])
    assert run.measures.output_tokens < 3 * TOKENS


def test_a_run_as_json_is_an_entry_of_the_result_file(workload):
    (run,) = run_cases(workload, [Case("eagle3", 2, 1)])
    entry = run.as_json()
    assert list(entry) == [
        "method",
        "k",
        "concurrency",
        "otps",
        "acceptance_length",
        "acceptance_rate_per_position",
        "ttft_ms",
        "itl_ms",
        "e2e_ms",
        "output_tokens",
        "identical_to_none",
        "rounds",
    ]
    assert list(entry["ttft_ms"]) == ["p50", "p95", "p99"]


def test_the_median_round_counts_and_one_difference_is_enough(workload):
    (run,) = run_cases(workload, [Case("none", 0, 1)])
    speeds = [30.0, 10.0, 20.0]
    rounds = [
        dataclasses.replace(
            run,
            measures=dataclasses.replace(run.measures, otps=speed),
            identical_to_none=speed != 10.0,
            core_share=speed / 30.0,
        )
        for speed in speeds
    ]
    median = median_run(rounds)
    assert (median.measures.otps, median.rounds) == (20.0, (30.0, 10.0, 20.0))
    assert median.identical_to_none is False
    assert median_run([rounds[0], rounds[2]]).identical_to_none is True
    assert median.core_share == pytest.approx(20 / 30)


def test_a_stop_text_ends_outputs_for_every_method(workload):
    cases = [Case("none", 0, 1), Case("peagle", 2, 1)]
    whole = next(run_cases(workload, cases[:1]))
    tokenizer = workload.open("none", 0, 1).tokenizer
    letter = tokenizer.decode(whole.outputs[0][TOKENS // 2])
    prompts = tuple(dataclasses.replace(prompt, stop=(letter,)) for prompt in workload.prompts)
    none, peagle = run_cases(dataclasses.replace(workload, prompts=prompts), cases)
    assert len(none.outputs[0]) < len(whole.outputs[0]) == TOKENS
    assert peagle.identical_to_none


def test_a_run_knows_for_how_much_of_its_time_it_had_a_core(workload, monkeypatch):
    case = Case("none", 0, 1)
    (run,) = run_cases(workload, [case])
    assert 0.0 < run.core_share <= 1.1  # two clocks
    monkeypatch.setattr(load.time, "thread_time", lambda: 1.0)  # as of a thread that never runs
    (run,) = run_cases(workload, [case])
    assert run.core_share == 0.0


def test_work_that_cannot_be_done_is_refused_before_it_begins(workload):
    finished = []
    longer = dataclasses.replace(workload, max_tokens=500)
    with pytest.raises(InputError, match="context holds 512; lower --max-tokens"):
        list(run_cases(longer, [Case("none", 0, 1)], lambda: finished.append(1)))
    assert not finished
    with pytest.raises(InputError, match="max_tokens"):
        dataclasses.replace(workload, max_tokens=0)
