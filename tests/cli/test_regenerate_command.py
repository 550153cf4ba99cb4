import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from chat_templates import assistant, user
from openai_stub import openai_stub, said

from peagle.config import SamplingParams
from peagle.files import output_lock
from peagle.llm import LLM
from peagle.models.tokenizer import load_tokenizer
from peagle.pair import bundled
from peagle.train.conversations import read_documents
from peagle.train.samples import read_samples

TOKENS = 64
"""More than an answer has."""
ENDS = list(range(0, 300, 4))
"""An untrained target soon emits one of these."""
START_SECONDS = 240
"""Seconds allowed for a process on a busy machine."""


@pytest.fixture
def stub():
    with openai_stub() as running:
        yield running


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def chats(tmp_path):
    return write(
        tmp_path / "chats.jsonl",
        {"messages": [user("def name(self):"), assistant("?"), user("return")]},
        {"conversations": [{"from": "human", "value": "for item"}, {"from": "gpt", "value": "?"}]},
        {"prompt": "for item in", "response": "?"},
        {"messages": [user("word " * 600)]},
    )


@pytest.fixture
def target(pair, tmp_path):
    """One that comes to an end by itself."""
    target = shutil.copytree(pair.target, tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return target


@pytest.fixture
def regenerate(peagle, target, chats, tmp_path):
    def run(*arguments):
        size = ["--max-tokens", TOKENS, "--output", tmp_path / "out.jsonl"]
        return peagle("regenerate", target, chats, *size, *arguments)

    return run


def test_the_targets_own_answers_and_what_the_run_came_to(regenerate, target, chats, tmp_path):
    result = regenerate()
    assert result.code == 0
    assert result.err == ""
    assert f"1 left out\nfirst problem: {chats}:4: prompt is too long" in result.out
    lines = {line["source"]: line for line in read(tmp_path / "out.jsonl")}
    assert lines.keys() == {f"{chats}:{number}" for number in (1, 2, 3)}
    first, second = (lines[f"{chats}:{number}"]["messages"] for number in (1, 2))
    texts = [
        "<user>def name(self):<assistant>",
        f"<user>def name(self):<assistant>{first[1]['content']}<user>return<assistant>",
        "<user>for item<assistant>",
        "for item in",
    ]
    how = SamplingParams(max_tokens=TOKENS)
    completions = LLM(target).generate(texts, how)
    assert {completion.finish_reason for completion in completions} == {"stop"}
    tokens = sum(len(completion.token_ids) for completion in completions)
    assert result.out.startswith(f"3 conversations, {tokens} tokens, ")
    answers = [completion.text for completion in completions]
    answered = [turn["content"] for turn in (first[1], first[3], second[1])]
    assert [*answered, lines[f"{chats}:3"]["response"]] == answers
    ids = [turn["token_ids"] for turn in (first[1], first[3], second[1], lines[f"{chats}:3"])]
    assert ids == [list(completion.token_ids) for completion in completions]
    again = regenerate()
    assert (again.code, "3 were there already\n1 left out" in again.out) == (0, True)


def test_with_the_target_as_a_flag_all_arguments_are_sources(peagle, target, chats, tmp_path):
    more = write(tmp_path / "more.jsonl", {"prompt": "def"})
    found = []
    for named in ([target, chats, more], ["--target", target, chats, more]):
        out = tmp_path / "out.jsonl"
        assert peagle("regenerate", *named, "--max-tokens", TOKENS, "--output", out).code == 0
        found.append(sorted(line["source"] for line in read(out)))
        out.unlink()
    assert found[0] == found[1]
    assert f"{more}:1" in found[0]


def test_a_run_that_answers_nothing_fails(regenerate, chats, tmp_path):
    write(chats, {"messages": [user("word " * 600)]})
    result = regenerate()
    assert (result.code, result.out) == (2, "")
    assert f"no conversation was answered: {chats}:1: prompt is too long" in result.err
    assert not (tmp_path / "out.jsonl").exists()  # it would be empty
    write(chats, {"messages": [user("for item")]})
    cut = regenerate("--max-tokens", 1)
    assert "cut after 1 tokens" in cut.err
    assert "raise --max-tokens, or --keep-cut for first answers" in cut.err
    (tmp_path / "out.jsonl").touch()
    assert regenerate("--max-tokens", 1).code == 2
    assert (tmp_path / "out.jsonl").exists()  # somebody else's


def test_answers_that_are_cut_are_left_out_and_counted(regenerate, chats, tmp_path):
    result = regenerate("--max-tokens", 1)
    assert result.code == 0
    assert "\n3 left out\n" in result.out
    assert "\n2 of these at an answer that --max-tokens or the context's end cut" in result.out
    assert [line["source"] for line in read(tmp_path / "out.jsonl")] == [f"{chats}:3"]
    again = regenerate().out
    assert (
        f"1 were there already\n1 left out\nfirst problem: {chats}:4: prompt is too long" in again
    )
    assert len(read(tmp_path / "out.jsonl")) == 3


def test_answers_that_are_cut_are_kept_as_token_ids(regenerate, target, chats, tmp_path):
    """In training they end where they were cut, and not as if the target had ended them."""
    result = regenerate("--max-tokens", 1, "--keep-cut")
    assert (result.code, "--max-tokens" in result.out) == (0, False)
    samples = {sample.place: sample for sample in read_samples([str(tmp_path / "out.jsonl")])}
    lines = read(tmp_path / "out.jsonl")
    text = "<user>for item<assistant>"
    prompt = tuple(load_tokenizer(target)(text).input_ids)
    (expected,) = LLM(target).generate([text], SamplingParams(max_tokens=1))
    (place,) = (number for number, line in enumerate(lines, 1) if line["source"].endswith(":2"))
    found = samples[f"{tmp_path / 'out.jsonl'}:{place}"]
    assert found.ids == (*prompt, *expected.token_ids)
    assert found.responses == ((len(prompt), len(found.ids)),)
    assert "\n3 were there already" in regenerate("--max-tokens", 1, "--keep-cut").out
    assert "cut at 1 tokens, not by" in regenerate("--max-tokens", 2, "--keep-cut").err


@pytest.mark.parametrize("ids", [True, False])
def test_an_endpoints_cut_answers_are_kept_where_it_gives_ids(peagle, chats, stub, tmp_path, ids):
    def reply(body):
        status, headers, answer = said("fi")
        answer["choices"][0] |= {"finish_reason": "length"} | ({"token_ids": [7, 8]} if ids else {})
        return status, headers, answer | {"prompt_token_ids": [5, 6]}

    stub.reply, out = reply, tmp_path / "out.jsonl"
    write(chats, {"messages": [user("one")]})
    more = ["--endpoint", stub.url, "--model", "m", "--output", out]
    if not ids:
        told = peagle("regenerate", chats, *more, "--keep-cut").err
        assert "to keep it raise --max-tokens" in told
        assert "--keep-cut" not in told  # which is of no use there
        return
    assert "or --keep-cut for first answers" in peagle("regenerate", chats, *more).err
    assert peagle("regenerate", chats, *more, "--keep-cut").code == 0
    [line] = read(out)
    assert [line[key] for key in ("prompt_token_ids", "token_ids", "text")] == [
        [5, 6],
        [7, 8],
        "fi",
    ]


def test_many_cut_answers_are_told_while_the_rest_can_be_saved(regenerate, monkeypatch):
    monkeypatch.setattr("peagle.cli.regenerate.SURVEYED", 3)
    result = regenerate("--max-tokens", 1)
    told = " ".join(result.err.split())
    assert "cut an answer of 2 of the first 3 conversations" in told
    assert "larger --max-tokens" in told
    assert regenerate().err == ""


def test_a_target_without_questions_writes_its_own(peagle, target, tmp_path):
    def run(number, name, *more):
        out = tmp_path / f"{name}.jsonl"
        size = ["--max-tokens", TOKENS, "--output", out, "--dtype", "float32"]
        result = peagle("regenerate", target, "--self-prompted", number, *size, *more)
        assert result.code == 0, result.err
        asked = [
            line["messages"][0]["content"] for line in read(tmp_path / f"{name}.questions.jsonl")
        ]
        answered = {line["messages"][0]["content"]: line["messages"][1:] for line in read(out)}
        return asked, answered

    asked, answered = run(6, "out")
    assert len(set(asked)) == 6
    assert answered.keys() <= set(asked)
    assert answered
    assert run(3, "fewer", "--concurrency", 2)[0] == asked[:3]
    assert run(6, "fewer") == (asked, answered)
    assert run(6, "other", "--seed", 1)[0] != asked


def test_a_template_that_begins_a_turn_with_nothing_begins_a_text(peagle, tmp_path):
    """As the bundled target's, whose turns end with their line."""
    out = tmp_path / "out.jsonl"
    how = ["--self-prompted", 3, "--max-tokens", 4, "--keep-cut", "--output", out]
    assert peagle("regenerate", bundled("target"), *how).code == 0
    asked = [one["messages"][0]["content"] for one in read(tmp_path / "out.questions.jsonl")]
    assert len(asked) == 3
    assert not any("\n" in one for one in asked)
    assert len(read(out)) == 3


def test_without_anything_that_begins_a_turn_questions_are_asked_for(peagle, target, tmp_path):
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}")
    out = tmp_path / "out.jsonl"
    result = peagle("regenerate", target, "--self-prompted", 3, "--output", out)
    assert result.code == 2
    assert "begins a user's turn with nothing" in result.err
    assert "give files of questions" in result.err
    assert not out.exists()


def test_variables_of_the_template(regenerate, target, chats, tmp_path):
    template = target / "chat_template.jinja"
    template.write_text("{{ mood | default('') }}" + template.read_text())
    write(chats, {"messages": [user("def name(self):")]})
    assert regenerate().code == 0
    (plain,) = read(tmp_path / "out.jsonl")
    refused = regenerate("--chat-template-kwargs", '{"mood": "calm"}')
    assert (refused.code, "not by" in refused.err) == (2, True)
    (tmp_path / "out.jsonl").unlink()
    assert regenerate("--chat-template-kwargs", '{"mood": "calm"}').code == 0
    (calm,) = read(tmp_path / "out.jsonl")
    text = "calm<user>def name(self):<assistant>"
    (expected,) = LLM(target).generate([text], SamplingParams(max_tokens=TOKENS))
    assert calm["messages"][1]["token_ids"] == list(expected.token_ids)
    assert calm["messages"][1] != plain["messages"][1]
    (tmp_path / "out.jsonl").unlink()
    own = {"messages": [user("def name(self):")], "chat_template_kwargs": {"mood": "calm"}}
    write(chats, own)
    assert regenerate().code == 0
    (again,) = read(tmp_path / "out.jsonl")
    assert again["messages"] == calm["messages"]
    assert again["chat_template_kwargs"] == {"mood": "calm"}
    tokenizer, out = load_tokenizer(target), str(tmp_path / "out.jsonl")
    [document], _ = read_documents([out], lambda: tokenizer, 512, "drop", len(tokenizer))
    assert tokenizer.decode(document.tokens).startswith(text)


def test_a_file_belongs_to_one_run_at_a_time(regenerate, tmp_path):
    with output_lock(tmp_path / "out.jsonl"):
        refused = regenerate()
    assert (refused.code, "another run is writing output" in refused.err) == (2, True)
    assert regenerate().code == 0
    assert not (tmp_path / "out.jsonl.lock").exists()


def test_speculation_seeds_and_the_order_change_nothing(regenerate, pair, tmp_path):
    found = []
    drafter = json.dumps({"model": str(pair.peagle), "num_speculative_tokens": 3})
    flags = ["--drafter", pair.peagle, "--k", 3]
    for more in ([], ["--speculative-config", drafter], flags, ["--concurrency", 1]):
        assert regenerate("--temperature", 1.0, "--seed", 5, "--dtype", "float32", *more).code == 0
        found.append(sorted(read(tmp_path / "out.jsonl"), key=lambda line: line["source"]))
        (tmp_path / "out.jsonl").unlink()
    assert all(one == found[0] for one in found)


def test_a_second_run_does_what_is_left(regenerate, tmp_path):
    out = tmp_path / "out.jsonl"
    assert regenerate("--limit", 1).out.startswith("1 conversations, ")
    before = out.read_text()
    out.write_text(before + before[:20])
    result = regenerate("--limit", 3)
    assert result.out.startswith("2 conversations, ")
    assert "\n1 were there already" in result.out
    assert out.read_text().startswith(before)
    assert len({line["source"] for line in read(out)}) == len(read(out)) == 3


def test_edited_data_is_answered_where_it_is_new_or_changed(peagle, stub, tmp_path):
    """No conversation is skipped or answered twice because line numbers have changed."""
    out, data = tmp_path / "out.jsonl", tmp_path / "data.jsonl"
    stub.reply = lambda body: said(f"about {body['messages'][0]['content']}")
    more = ["--endpoint", stub.url, "--model", "m", "--output", out]
    asked = [{"messages": [user(text)]} for text in ("a", "b", "c")]
    assert peagle("regenerate", write(data, *asked), *more).code == 0
    before = out.read_text()
    answered = {"messages": [user("c"), assistant("ignored")]}
    edited = write(data, *({"messages": [user(text)]} for text in ("new", "a", "B")), answered)
    result = peagle("regenerate", edited, *more)
    assert result.out.startswith("2 conversations, ")
    assert "\n2 were there already\n1 that are not in this data stay\n" in result.out
    assert out.read_text().startswith(before)
    pairs = [[turn["content"] for turn in line["messages"]] for line in read(out)]
    assert sorted(pairs) == [[text, f"about {text}"] for text in ("B", "a", "b", "c", "new")]
    assert len(stub.requests) == 5


def test_answers_of_another_model_or_sampling_are_not_mixed(peagle, chats, stub, tmp_path):
    out = tmp_path / "out.jsonl"

    def run(model, *options):
        more = ["--endpoint", stub.url, "--model", model, "--output", out]
        return peagle("regenerate", chats, *more, *options)

    assert run("m", "--limit", 1).code == 0
    before, by = out.read_text(), "out.jsonl:1: answered by m, greedy, not by "
    for arguments, other in (
        (["n"], "n, greedy;"),
        (["m", "--temperature", 0.5, "--seed", 3], "m, temperature 0.5, seed 3;"),
    ):
        result = run(*arguments)
        assert (result.code, result.out) == (2, "")
        assert by + other in result.err
        assert out.read_text() == before
    assert run("m", "--seed", 3, "--max-tokens", 9).out.startswith("3 conversations, ")


def test_a_file_without_token_ids_is_not_continued_by_the_engine(regenerate, tmp_path):
    """An endpoint's answers may hold markers as text."""
    out = tmp_path / "out.jsonl"
    assert regenerate("--limit", 1).code == 0
    (line,) = read(out)
    for turn in line["messages"]:
        turn.pop("token_ids", None)
    before = write(out, line).read_text()
    result = regenerate()
    assert (result.code, result.out) == (2, "")
    assert "out.jsonl:1: its answers have no token ids; an endpoint wrote" in result.err
    assert out.read_text() == before


def test_training_reads_the_ids(regenerate, target, tmp_path):
    assert regenerate().code == 0
    tokenizer = load_tokenizer(target)
    out = str(tmp_path / "out.jsonl")
    documents, _ = read_documents([out], lambda: tokenizer, 512, "drop", len(tokenizer))
    learned = [list(one.tokens[a:b]) for one in documents for a, b in one.responses]
    written = [
        turn["token_ids"]
        for line in read(tmp_path / "out.jsonl")
        for turn in line.get("messages", [line])
        if "token_ids" in turn
    ]
    assert sorted(learned) == sorted(ids for ids in written if len(ids) > 1)


def test_nothing_is_loaded_when_nothing_is_left(regenerate, monkeypatch):
    assert regenerate("--limit", 1).code == 0
    monkeypatch.setattr("peagle.cli.regenerate.open_async_llm", lambda *_: pytest.fail("loaded"))
    assert regenerate("--limit", 1).out.startswith("0 conversations, 0 tokens, 0.0 tokens/s\n1 ")


def test_an_endpoint_in_place_of_the_target(peagle, chats, stub, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    stub.reply = lambda body: said(f"{body['model']} {len(body.get('messages', []))}")
    more = ["--endpoint", stub.url, "--model", "m", "--output", tmp_path / "out.jsonl"]
    result = peagle("regenerate", chats, *more)
    assert result.code == 0
    assert result.out.startswith("4 conversations, 15 tokens, ")
    lines = {line["source"]: line for line in read(tmp_path / "out.jsonl")}
    said_by_it = [turn["content"] for turn in lines[f"{chats}:1"]["messages"][1::2]]
    assert said_by_it == ["m 1", "m 3"]
    assert lines[f"{chats}:3"]["response"] == "m 0"
    assert {headers["authorization"] for _, headers, _ in stub.requests} == {"Bearer secret"}


def test_a_conversation_that_a_server_refuses_is_left_out_and_named(peagle, chats, stub, tmp_path):
    def reply(body):
        refused = "word" in str(body)
        return (400, {}, {"error": {"message": "too long"}}) if refused else said("ok")

    stub.reply = reply
    more = ["--endpoint", stub.url, "--model", "m", "--output", tmp_path / "out.jsonl"]
    result = peagle("regenerate", chats, *more, "--concurrency", 1)
    assert result.code == 0
    assert result.out.startswith("3 conversations, ")
    why = f"1 left out\nfirst problem: {chats}:4: {stub.url} refuses: 400 too long\n"
    assert result.out.endswith(why)
    stub.reply = lambda body: (401, {}, {"error": {"message": "no key"}})
    asked_before = len(stub.requests)
    result = peagle("regenerate", chats, *more)
    assert (result.code, result.out) == (2, "")
    assert f"{chats}:4: {stub.url} refuses: 401 no key" in result.err
    assert len(stub.requests) == asked_before + 1


def command(source, stub, out):
    arguments = [source, "--endpoint", stub.url, "--model", "m", "--concurrency", 3]
    words = ["-m", "peagle", "regenerate", *arguments, "--output", out]
    return [sys.executable, *map(str, words)]


@pytest.fixture
def answers():
    """How many answers the slow server may give."""
    permits = threading.Semaphore(0)
    yield permits
    permits.release(200)  # to requests whose processes have ended


def begin(source, stub, out, answers, lines):
    """A separate process that has written some lines, and cannot write all of sixty."""
    written = out.read_bytes().count(b"\n") if out.exists() else 0
    answers.release(2 * (lines - written) + 12)  # some go to requests of before, or are not written
    process = subprocess.Popen(
        command(source, stub, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if out.exists() and out.read_bytes().count(b"\n") >= lines:
            return process
        time.sleep(0.01)
    raise AssertionError(process.communicate())


@pytest.fixture
def slow(stub, answers, tmp_path):
    """Sixty conversations of two answers, from a server that gives as many as it is told to."""

    def reply(body):
        answers.acquire(timeout=START_SECONDS)
        return said(f"{body['messages'][0]['content']} {len(body['messages'])}")

    stub.reply = reply
    lines = [{"messages": [user(f"q{n}"), assistant("?"), user("and?")]} for n in range(60)]
    return write(tmp_path / "slow.jsonl", *lines)


@pytest.mark.usefixtures("forked")
def test_killed_at_any_moment_it_continues_with_none_lost_and_none_twice(
    slow, stub, answers, tmp_path
):
    out = tmp_path / "out.jsonl"
    for lines in (5, 20, 40):
        process = begin(slow, stub, out, answers, lines)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert out.read_bytes().count(b"\n") < 60
        with out.open("ab") as file:
            file.write(b'{"source": "' + os.fsencode(slow))  # as if it died while writing
    asked_before = len(stub.requests)
    answers.release(200)
    done = subprocess.run(command(slow, stub, out), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(stub.requests) - asked_before < 60
    counts = collections.Counter(line["source"] for line in read(out))
    assert counts == {f"{slow}:{number}": 1 for number in range(1, 61)}
    for line in read(out):
        question = line["messages"][0]["content"]
        wanted = [f"{question} 1", f"{question} 3"]
        assert [turn["content"] for turn in line["messages"][1::2]] == wanted


@pytest.mark.usefixtures("forked")
def test_ctrl_c_keeps_what_is_written_and_ends_with_130(slow, stub, answers, tmp_path):
    out = tmp_path / "out.jsonl"
    process = begin(slow, stub, out, answers, 4)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=240)
    assert (process.returncode, printed) == (130, "")
    *_, kept, said = errors.splitlines()
    assert re.fullmatch(rf"{out} has \d+ of 60; the same command continues", kept)
    assert said == "peagle: interrupted"
    assert out.read_bytes().endswith(b"\n")
    assert 4 <= len(read(out)) < 60


BAD = [
    ([], "{target} is the target; name the conversations' files"),
    (["{chats}", "--endpoint", "http://x/v1", "--model", "m", "--k", "3"], "its own models"),
    (["absent.jsonl"], "absent.jsonl cannot be read: No such file"),
    (["{chats}", "--endpoint", "http://x/v1"], "--endpoint and --model go together"),
    (["{chats}", "--model", "m"], "--endpoint and --model go together"),
    (["{chats}", "--max-tokens", "0"], "peagle: --max-tokens: "),
    (["{chats}", "--concurrency", "0"], "peagle: --concurrency: "),
    (["{chats}", "--limit", "0"], "a limit of 0"),
    (["{chats}", "--threads", "0"], "'--threads'"),
    (["{chats}", "--speculative-config", "{{"], "speculative config is not JSON"),
    (["{chats}", "--device", "abacus"], "device abacus"),
    (["{chats}", "--k", "3"], "--k needs --drafter"),
    (["--target", "other"], "{target} cannot be read: Is a directory"),
    (["{chats}", "--self-prompted", "3"], "--self-prompted writes its own questions"),
    (["{chats}", "--chat-template-kwargs", "mood"], "--chat-template-kwargs is not JSON"),
    (["{chats}", "--chat-template-kwargs", "[]"], "peagle: --chat-template-kwargs: "),
    (["{bad}"], "bad.jsonl:2: the conversation has no user turn to answer"),
]


@pytest.mark.parametrize(("options", "complaint"), BAD)
def test_bad_input(peagle, pair, chats, tmp_path, options, complaint):
    bad = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, {"messages": [assistant("alone")]})
    options = [option.format(chats=chats, bad=bad) for option in options]
    out = tmp_path / "out.jsonl"
    result = peagle("regenerate", pair.target, *options, "--output", out)
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1, result.err
    assert complaint.format(target=pair.target) in result.err
    assert not out.exists()


def test_a_conversation_that_the_template_refuses_is_left_out_and_named(peagle, pair, tmp_path):
    target = shutil.copytree(pair.target, tmp_path / "target")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (target / name).exists():
            text = (target / name).read_text()
            begin_with = "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
            text = text.replace("{% for", begin_with + "{% for", 1)
            (target / name).write_text(text)
    system = {"role": "system", "content": "s"}
    source = write(
        tmp_path / "data.jsonl", {"messages": [user("a")]}, {"messages": [system, user("a")]}
    )
    result = peagle("regenerate", target, source, "--output", tmp_path / "out.jsonl")
    assert result.code == 0
    assert "1 left out" in result.out
    assert "data.jsonl:2: messages.0: the chat template refuses this: no" in result.out
    assert len(read(tmp_path / "out.jsonl")) == 1
