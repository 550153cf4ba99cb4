import json

import pytest
from openai_stub import openai_stub, streamed


@pytest.fixture
def stub():
    with openai_stub() as stub:
        stub.reply = lambda body: streamed("a", "b", tokens=body["max_tokens"])
        yield stub


SIZE = ["--limit", 2, "--max-tokens", 4, "--rounds", 2]


def test_two_servers_are_compared_in_one_command_with_a_report(peagle, stub, tmp_path):
    stub.pages["/version"] = {"version": "1.2"}
    with openai_stub() as other:
        other.reply = lambda body: streamed("a", "c", tokens=body["max_tokens"])
        urls = ["--url", f"ours={stub.url}", "--url", other.url]
        outputs = ["--json", tmp_path / "out.json", "--report", tmp_path / "report"]
        result = peagle("bench", *urls, *SIZE, "--concurrency", "1,2", *outputs)
    assert result.code == 0, result.err
    written = json.loads((tmp_path / "out.json").read_text())
    place = other.url.removeprefix("http://").removesuffix("/v1")
    cases = [(run["method"], run["concurrency"], run["k"]) for run in written["runs"]]
    assert cases == [(name, c, None) for c in (1, 2) for name in ("ours", place)]
    assert written["environment"]["servers"] == [
        {"name": "ours", "model": "stub", "version": "tests 1.2"},
        {"name": place, "model": "stub", "version": "tests"},
    ]
    assert [run["same_text"] for run in written["runs"]] == [True, False] * 2
    assert "tokens/s" in result.out
    assert "ours" in (tmp_path / "report" / "index.html").read_text()


def test_requests_may_come_at_a_rate(peagle, stub):
    result = peagle("bench", "--url", stub.url, *SIZE, "--request-rate", "50,100", "--json", "-")
    assert result.code == 0, result.err
    found = json.loads(result.out)["runs"]
    assert [(run["concurrency"], run["request_rate"]) for run in found] == [(0, 50.0), (0, 100.0)]


def test_prompts_may_be_chats_and_the_target_names_the_model(peagle, stub):
    result = peagle("bench", "mine", "--url", stub.url, "--chat", *SIZE)
    assert result.code == 0, result.err
    assert {path for path, _, _ in stub.requests} == {"/v1/chat/completions"}
    assert {body["model"] for _, _, body in stub.requests} == {"mine"}


def test_what_a_server_lacks_is_told_once(peagle, stub, tmp_path):
    stub.reply = lambda body: streamed("a", "b")
    result = peagle("bench", "--url", f"s={stub.url}", *SIZE, "--report", tmp_path / "report")
    assert result.code == 0
    told = "s sends no usage: a piece of its stream counts as a token, and may be several"
    assert result.err.count(f"peagle: warning: {told}") == 1
    assert told in (tmp_path / "report" / "report.md").read_text()


def test_a_server_that_dies_costs_nothing_that_was_measured(peagle, stub, tmp_path):
    def dies(body):
        if len(stub.requests) > 6:
            return 500, {}, {"error": {"message": "it died"}}
        return streamed("a", tokens=4)

    stub.reply = dies
    out = tmp_path / "out.json"
    result = peagle("bench", "--url", f"s={stub.url}", *SIZE, "--rounds", 4, "--json", out)
    assert result.code == 2
    assert result.err.splitlines()[-1] == "peagle: s, 1 in flight, bundled: HTTP 500: it died"
    (run,) = json.loads(out.read_text())["runs"]
    assert len(run["rounds"]) == 2
    assert "tokens/s" in result.out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--concurrency", "64"], "--concurrency 64 needs as many prompts, but there are"),
        (["--k", "3"], "a server has its own drafter and K; with --url leave out"),
        (["--methods", "none"], "a server has its own drafter and K"),
        (
            ["--dtype", "bfloat16"],
            "a server was started with its own; with --url leave out --dtype",
        ),
        (["--batch-invariant"], "with --url leave out --batch-invariant"),
        (["--no-quantize-activations"], "with --url leave out --quantize-activations"),
        (["--drafter", "d"], "a server has its own drafter and K"),
        (["--draft-length", "auto"], "a server chooses its own draft length"),
        (["--request-rate", "fast"], "--request-rate: Input should be a valid number"),
        (["--request-rate", "0"], "--request-rate: Input should be greater than 0"),
        (
            ["--request-rate", "2", "--concurrency", "4"],
            "--request-rate takes the place of --concurrency; give one of them",
        ),
        (["--url", "{url}"], "two servers are called"),
        (["--url", "file:///x"], "is no server's URL"),
    ],
)
def test_what_cannot_be_is_refused_on_one_line(peagle, stub, options, complaint):
    options = [option.format(url=stub.url) for option in options]
    result = peagle("bench", "--url", stub.url, *options)
    assert result.code == 2
    assert complaint in result.err
    assert len(result.err.splitlines()) == 1
    assert not stub.requests


def test_a_server_that_answers_nothing_leaves_no_report(peagle, stub, tmp_path):
    stub.reply = lambda body: (500, {}, {"error": {"message": "broken"}})
    result = peagle("bench", "--url", f"s={stub.url}", *SIZE, "--report", tmp_path / "report")
    assert (result.code, result.err) == (2, "peagle: s: HTTP 500: broken\n")
    assert list(tmp_path.iterdir()) == []
