"""Servers of every kind: one line for what they lack, and nothing lost that was measured."""

import itertools
import json
import multiprocessing
import socket
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
from openai_stub import openai_stub, said, streamed

from peagle.bench import server as module
from peagle.bench import server_case
from peagle.bench.case import Case, Grid
from peagle.bench.prompts import Prompt
from peagle.bench.runs import Failure
from peagle.bench.server_case import find_servers, run_servers
from peagle.config import SamplingParams
from peagle.errors import InputError

PROMPTS = tuple(Prompt(text) for text in ("one", "two", "three", "four"))
METRICS = """# HELP vllm:spec_decode_num_drafts_total Drafts.
vllm:spec_decode_num_drafts_total{{model_name="a"}} {drafts}
vllm:spec_decode_num_accepted_tokens_total{{model_name="a"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="a",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="a",position="1"}} {second}
"""


@pytest.fixture
def stub():
    with openai_stub() as stub:
        stub.reply = lambda body: streamed("a", "b", "c", tokens=4)
        yield stub


def sent(event):
    """A stream of one event and its end."""
    events = [f"data: {event}\n\n".encode(), b"data: [DONE]\n\n"]
    return 200, {"Content-Type": "text/event-stream"}, iter(events)


def measured(*urls, prompts=PROMPTS, grid=None, rates=(), rounds=1, model=None, **sampling):
    """Runs and notes; urls: of servers, called a, b, ..."""
    named = list(zip("abc", urls, strict=False))
    servers = find_servers(named, model)
    params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **sampling})
    cases = (grid or Grid([2])).servers([name for name, _ in named], rates)
    asked = [(prompt, params) for prompt in prompts]
    notes = []
    done = list(run_servers(servers, cases, lambda case: asked, rounds, warn=notes.append))
    return done, list(dict.fromkeys(notes))


def test_tokens_times_and_texts_of_a_streaming_server(stub):
    def slow(body):
        status, headers, events = streamed("a", "b", "c", tokens=5)
        return status, headers, (time.sleep(0.03) or event for event in events)

    stub.reply = slow
    (run,), notes = measured(stub.url, grid=Grid([4]))
    found = run.measures
    assert (found.output_tokens, found.acceptance_length, run.failed) == (20, None, 0)
    assert found.ttft_ms.p50 >= 30.0
    assert found.itl_ms.p50 == pytest.approx(found.e2e_ms.p50 / 6, rel=0.5)  # two in a piece
    assert found.e2e_ms.p50 >= found.ttft_ms.p50 + 50.0
    assert 0 < found.otps < 20 / 0.09
    assert run.outputs == (("abc",),) * 4
    assert run.core_share is None
    assert not notes


def test_what_is_asked_for_is_what_flags_say(stub):
    chat = Prompt("hi", ({"role": "user", "content": "hi"},))
    sampling = {"top_p": 0.9, "seed": 7, "stop": ("\n",), "ignore_eos": False}
    measured(stub.url, prompts=(chat, PROMPTS[0]), model="mine", **sampling)
    (path, _, body), (other, _, text) = stub.requests[-2:]
    by_path = {path: body, other: text}
    asked = by_path["/v1/chat/completions"]
    assert asked.pop("cache_salt")
    assert asked == {
        "model": "mine",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 0.0,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["\n"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": False,
    }
    assert by_path["/v1/completions"]["prompt"] == "one"


def test_every_run_has_a_prefix_cache_of_its_own(stub):
    measured(stub.url, rounds=2, grid=Grid([4]))
    salts = [body["cache_salt"] for _, _, body in stub.requests[-8:]]
    assert len(set(salts[:4])) == len(set(salts[4:])) == 1
    assert salts[0] != salts[4]


def test_as_many_are_in_flight_as_asked(stub):
    lock, now, most, full = threading.Lock(), [0], [0], threading.Event()

    def busy(body):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if now[0] == 3:
            full.set()
        if body["cache_salt"] != "warm-up":
            full.wait(240)
        time.sleep(0.02)  # a fourth would come meanwhile
        with lock:
            now[0] -= 1
        return streamed("a", tokens=4)

    stub.reply = busy
    measured(stub.url, prompts=PROMPTS * 4, grid=Grid([3]))
    assert most == [3]


def test_several_processes_share_many_requests_in_flight(stub, monkeypatch):
    """Each answer stands in its prompt's place, and what failed is known by its own."""
    monkeypatch.setattr(server_case, "CLIENTS", 2)
    monkeypatch.setattr(server_case, "CORES", 0.1)
    submit, shares = ProcessPoolExecutor.submit, []

    def counted(pool, function, server, asked, *more):
        shares.append(len(asked))
        return submit(pool, function, server, asked, *more)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", counted)
    prompts = [replace(PROMPTS[0], text=f"say {place}") for place in range(11)]

    def echo(body):
        if body["prompt"].endswith(" 3"):
            return 500, {}, {"error": {"message": "no"}}
        return streamed(body["prompt"], tokens=4)

    stub.reply = echo
    (run,), notes = measured(stub.url, prompts=prompts, grid=Grid([5]))
    expected = [None if place == 3 else (prompt.text,) for place, prompt in enumerate(prompts)]
    assert [*run.outputs] == expected
    assert run.failed == 1
    assert any("failed 1 of" in note for note in notes)
    assert run.measures.output_tokens == 4 * (len(prompts) - 1)
    assert shares == [3, 2, 6, 5]  # to warm up, and the round
    assert not multiprocessing.active_children()


def test_requests_come_at_a_rate_however_many_are_in_flight(stub):
    times = []

    def slow(body):
        times.append(time.perf_counter())
        time.sleep(0.2)
        return streamed("a", tokens=4)

    stub.reply = slow
    (run,), _ = measured(stub.url, prompts=PROMPTS * 5, rates=[100.0])
    assert run.case.load.shown == "100/s"
    gaps = [after - before for before, after in itertools.pairwise(sorted(times[-20:]))]
    assert 0.003 < sum(gaps) / len(gaps) < 0.1  # one after the other they would take 0.2
    assert max(gaps) > 2 * min(gaps)  # at random


def test_conversations_go_on_with_what_was_answered(stub):
    stub.reply = lambda body: streamed(f"{len(body['messages'])} messages", tokens=4)
    prompt = Prompt("hi", ({"role": "user", "content": "hi"},), ("and then?",))
    (run,), _ = measured(stub.url, prompts=(prompt,), grid=Grid([1]))
    assert run.outputs == (("1 messages", "3 messages"),)
    assert [m["content"] for m in stub.requests[-1][2]["messages"]] == [
        "hi",
        "1 messages",
        "and then?",
    ]


def test_two_servers_take_turns(stub):
    with openai_stub() as other:
        other.reply = lambda body: streamed("x", tokens=4)
        done, _ = measured(stub.url, other.url.removesuffix("/v1") + "/", rounds=2)
    assert [run.case.method for run in done] == ["a", "b", "b", "a"]


def test_acceptance_is_counted_by_the_server(stub):
    counts = iter(
        [
            {"drafts": 10, "accepted": 10, "first": 8, "second": 2},
            {"drafts": 30, "accepted": 40, "first": 24, "second": 16},
        ]
    )

    class Pages(dict):
        def get(self, path):
            return METRICS.format(**next(counts)) if path == "/metrics" else super().get(path)

    stub.pages = Pages(stub.pages)
    (run,), _ = measured(stub.url)
    assert run.measures.acceptance_length == pytest.approx(1 + 30 / 20)
    assert run.measures.acceptance_rate_per_position == pytest.approx((16 / 20, 14 / 20))


def test_a_server_that_drafted_nothing_emits_one_token_a_cycle(stub):
    stub.pages["/metrics"] = METRICS.format(drafts=1, accepted=1, first=1, second=0)
    (run,), _ = measured(stub.url)
    assert run.measures.acceptance_length == 1.0


def test_counts_that_fall_are_a_restart_and_say_nothing_of_acceptance(stub):
    falling = itertools.count(9, -1)

    class Pages(dict):
        def get(self, path):
            if path != "/metrics":
                return super().get(path)
            return METRICS.format(drafts=next(falling), accepted=1, first=1, second=0)

    stub.pages = Pages(stub.pages)
    (run,), _ = measured(stub.url)
    assert run.measures.acceptance_length is None


def test_a_server_without_usage_is_counted_by_its_pieces(stub):
    stub.reply = lambda body: streamed("a", "b", "c")
    (run,), notes = measured(stub.url)
    assert run.measures.output_tokens == 4 * 3
    assert notes == [
        "a sends no usage: a piece of its stream counts as a token, and may be several"
    ]


@pytest.mark.parametrize("field", ["ignore_eos", "cache_salt", "stream_options"])
def test_a_field_that_is_refused_is_left_out_and_told(stub, field):
    def strict(body):
        if field in body:
            return 400, {}, {"error": {"message": f"unknown field {field}"}}
        return streamed("a", "b", tokens=4)

    stub.reply = strict
    (run,), notes = measured(stub.url)
    assert run.failed == 0
    assert notes[0].startswith(f"a refuses {field}: ")
    assert all(field not in body for _, _, body in stub.requests[-4:])


def test_no_more_fields_are_left_out_than_are_refused(stub):
    refused = {"ignore_eos", "cache_salt"}
    stub.reply = lambda body: (
        (422, {}, {"detail": "unknown field"})
        if refused & body.keys()
        else streamed("a", "b", tokens=4)
    )
    (run,), notes = measured(stub.url)
    assert [note.split(":")[0] for note in notes] == [
        "a refuses cache_salt",
        "a refuses ignore_eos",
    ]
    assert run.measures.output_tokens == 16
    assert "stream_options" in stub.requests[-1][2]


def test_a_server_that_takes_ignore_eos_but_does_not_heed_it_is_named(stub):
    stub.reply = lambda body: streamed("a", tokens=2)
    _, notes = measured(stub.url)
    assert notes == ["a does not heed ignore_eos: answers have different lengths"]
    _, notes = measured(stub.url, ignore_eos=False)
    assert not notes


def test_requests_that_fail_are_counted_and_the_others_measured(stub):
    def flaky(body):
        if body["prompt"] == "two" and body["cache_salt"] != "warm-up":
            return 500, {}, {"error": {"message": "out of\nmemory"}}
        return streamed("a", "b", tokens=4)

    stub.reply = flaky
    (run,), notes = measured(stub.url)
    assert (run.failed, run.measures.output_tokens) == (1, 12)
    assert run.outputs[1] is None
    assert notes == ["a failed 1 of 4 requests: HTTP 500: out of memory"]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((503, {}, {"detail": "overloaded"}), "HTTP 503: overloaded"),
        ((500, {}, b"<h1>oops</h1>"), "HTTP 500: <h1>oops</h1>"),
        (streamed(), "it streamed no text"),
        (streamed("", "", tokens=3), "it streamed no text"),
        (streamed("a", done=False), "the stream ended without [DONE]"),
        (said("text"), "it does not stream"),
        (sent('{"choices": [{"text": 3}, {"delta": "x"}]}'), "it streamed no text"),
        (sent("[1]"), "Expected `object`, got `array`"),
    ],
)
def test_a_server_that_breaks_later_fails_its_case_only(stub, reply, why):
    def breaks(body):
        status, headers, answer = reply
        if body["cache_salt"] == "warm-up":
            return streamed("a", tokens=4)
        return status, headers, iter(events) if events is not None else answer

    events = list(reply[2]) if hasattr(reply[2], "__next__") else None
    stub.reply = breaks
    with openai_stub() as other:
        other.reply = lambda body: streamed("x", tokens=4)
        done, _ = measured(stub.url, other.url, rounds=2)
    assert done[0] == Failure(Case("a", None, 2), why)
    assert [run.case.method for run in done[1:]] == ["b", "b"]


def test_an_error_within_a_stream_fails_the_request(stub):
    def breaks(body):
        if body["cache_salt"] == "warm-up":
            return streamed("a", tokens=4)
        event = b'data: {"error": {"message": "the engine died"}}\n\n'
        return 200, {"Content-Type": "text/event-stream"}, iter([event])

    stub.reply = breaks
    (failure,), _ = measured(stub.url)
    assert failure.reason == "the engine died"


def test_a_server_that_hangs_fails_after_a_silence(stub, monkeypatch):
    over = threading.Event()

    def hang(body):
        if body["cache_salt"] != "warm-up":
            over.wait(240)
        return streamed("a", tokens=4)

    stub.reply = hang
    monkeypatch.setattr(module, "SILENCE", 2.0)
    (failure,), _ = measured(stub.url)
    over.set()
    assert failure.reason == "nothing came for 2 s"


def test_a_server_that_answers_nothing_at_all_is_refused_before_the_first_run(stub):
    stub.reply = lambda body: (401, {}, {"error": {"message": "no key"}})
    with pytest.raises(InputError, match=r"^a: HTTP 401: no key$"):
        measured(stub.url)
    assert len(stub.requests) == 1


def test_the_key_comes_from_the_environment(stub, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    measured(stub.url)
    assert {headers["authorization"] for _, headers, _ in stub.requests} == {"Bearer secret"}


def test_what_is_no_server_is_refused(stub):
    with pytest.raises(InputError, match="localhost:80 is no server's URL; give one such as"):
        find_servers([("a", "localhost:80")], None)
    with pytest.raises(InputError, match="ftp://x is no server's URL"):
        find_servers([("a", "ftp://x")], None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(InputError, match=rf"127.0.0.1:{port} does not answer: .*Connect"):
        find_servers([("a", f"http://127.0.0.1:{port}")], None)
    stub.pages.clear()
    with pytest.raises(InputError, match="has no /v1/models; check the address, or give the"):
        find_servers([("a", stub.url)], None)
    for odd in ([1], {"data": "x"}, {"data": ["x"]}, {"data": []}):
        stub.pages["/v1/models"] = odd
        with pytest.raises(InputError, match="names no model at /v1/models"):
            find_servers([("a", stub.url)], None)
    assert find_servers([("a", stub.url)], "mine")[0].model == "mine"


def test_what_does_not_speak_http_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer():
            line, _ = listening.accept()
            line.sendall(b"220 mail ready\r\n\r\n")
            line.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(InputError, match="does not answer: what answers does not speak HTTP"):
            find_servers([("a", f"http://127.0.0.1:{port}")], None)


def events_of(*events):
    """A stream of events as they are written."""
    return 200, {"Content-Type": "text/event-stream"}, iter(events)


DONE = b"data: [DONE]\n\n"
PIECE = b'data: {"choices": [{"text": "a"}]}\n\n'
ENDED = b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
USED = b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\n'


def test_comments_keep_a_stream_alive(stub, monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 1.0)
    monkeypatch.setattr(module, "A_WHILE", 0.05)

    def waiting():
        for _ in range(6):
            time.sleep(0.25)
            yield b": waiting\n\n"
        yield from (PIECE, DONE)

    stub.reply = lambda body: (200, {"Content-Type": "text/event-stream"}, waiting())
    (run,), _ = measured(stub.url, prompts=PROMPTS[:1], grid=Grid([1]))
    assert run.failed == 0


@pytest.mark.parametrize(
    ("events", "failed"),
    [
        ((ENDED, USED, DONE), False),
        ((PIECE, b"data: [DONE]"), False),
        ((PIECE, b'data: {"object": "error", "message": "boom"}\n\n', DONE), True),
    ],
    ids=["an answer that is its end alone", "no line end", "an error in vLLM's form"],
)
def test_answers_of_every_form(stub, events, failed):
    def reply(body):
        odd = body["cache_salt"] != "warm-up" and body["prompt"] == "one"
        return events_of(*(events if odd else (PIECE, DONE)))

    stub.reply = reply
    (run,), _ = measured(stub.url)
    assert run.failed == int(failed)


def test_a_conversation_goes_on_from_what_was_said_without_thoughts(stub):
    def thinking(body):
        delta = {"choices": [{"delta": {"reasoning_content": "Hm. "}}]}
        said_ = {"choices": [{"delta": {"content": "Paris"}}]}
        events = [f"data: {json.dumps(event)}\n\n".encode() for event in (delta, said_)]
        return events_of(*events, DONE)

    stub.reply = thinking
    chat = Prompt("q", ({"role": "user", "content": "q"},), later=("and then?",))
    (run,), _ = measured(stub.url, prompts=(chat,), grid=Grid([1]))
    assert run.outputs == (("Hm. Paris", "Hm. Paris"),)
    assert stub.requests[-1][2]["messages"][1] == {"role": "assistant", "content": "Paris"}


@pytest.mark.parametrize(
    ("times", "tokens", "each"),
    [
        ((1, 2, 3), 3, (1, 2, 3)),
        ((1, 2), 3, (1, 2, 2)),
        ((1, 2, 3, 4, 5), 2, (1, 5)),
        ((1, 2, 3), 1, (3,)),
    ],
)
def test_the_last_token_comes_with_the_last_piece(times, tokens, each):
    assert module._shared(times, tokens) == each


def test_a_late_client_does_not_flatter_a_server(stub, monkeypatch):
    """Times count from when a request was due."""
    begun = module.Server.answer

    async def late(*given):
        time.sleep(0.1)  # as where the loop has no time
        return await begun(*given)

    monkeypatch.setattr(module.Server, "answer", late)
    (run,), _ = measured(stub.url, rates=[1000.0])
    assert run.measures.ttft_ms.p50 > 100.0
