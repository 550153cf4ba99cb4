import ast
import gzip
import json

import pytest

from peagle import LLM, EngineConfig, SamplingParams
from peagle.bench.prompts import LEFT_OUT, Prompt, load_prompts, load_sets
from peagle.errors import InputError
from peagle.pair import bundled as model_directory


class Tokenizer:
    """One token per character; a chat template that marks the roles."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens=True, *, verbose):
        assert not verbose, "transformers would warn of a long text"
        ids = [ord(letter) for letter in text]
        return type("Encoding", (), {"input_ids": [1, *ids] if add_special_tokens else ids})

    def get_chat_template(self, chat_template, tools):
        return self.chat_template

    def apply_chat_template(self, messages, chat_template, tokenize, add_generation_prompt):
        if any(message["role"] == "system" for message in messages):
            raise RuntimeError("no system role")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def written(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def texts(source, limit=None):
    return [prompt.text for prompt in load_prompts(source, limit)]


def distinct_share(tokens, length=4):
    """The share of runs of `length` tokens that are the first of their kind (distinct-n)."""
    runs = list(zip(*(tokens[start:] for start in range(length)), strict=False))
    return len(set(runs)) / len(runs)


def test_answers_to_the_bundled_prompts_are_whole_and_do_not_repeat_themselves():
    """What the prompts were chosen for, beside making sense to a reader; see the pair's README."""
    prompts = load_prompts("bundled")
    bundled = [prompt.text for prompt in prompts]
    assert len(set(bundled)) == 16
    llm = LLM(model_directory("target"), config=EngineConfig(dtype="float32"))
    params = [SamplingParams(max_tokens=128, stop=prompt.stop) for prompt in prompts]
    for prompt, answer in zip(bundled, llm.generate(bundled, params), strict=True):
        assert answer.finish_reason == "stop"
        assert len(answer.token_ids) >= 20
        ast.parse(prompt + answer.text)
        assert distinct_share(answer.token_ids) >= 0.85


def test_no_bundled_prompt_is_humanevals(data):
    names = {line for text in texts(f"{data}/HumanEval.jsonl.gz") for line in text.splitlines()}
    for text in texts("bundled"):
        definitions = [line for line in text.splitlines() if line.lstrip().startswith("def ")]
        assert not names.intersection(definitions) - {"    def __init__(self):"}


def test_humaneval_and_mt_bench_are_read_as_published(data):
    completion = load_prompts(f"{data}/HumanEval.jsonl.gz")
    assert len(completion) == 164
    assert completion[0].text.startswith("from typing import List\n\n\ndef has_close_elements(")
    assert not completion[0].messages
    chat = load_prompts(f"{data}/mt_bench.jsonl", 2)
    assert chat[1].text.startswith("Draft a professional email")
    assert chat[1].messages == ({"role": "user", "content": chat[1].text},)
    assert chat[1].later[0].startswith("Take a moment to evaluate")


SPEC_BENCH = {"question_id": 161, "category": "translation", "turns": ["Translate: rot"]}
SPEED_BENCH = {
    "question_id": "q-1",
    "category": "math",
    "sub_category": "sums",
    "turns": ["What is 1 + 1?", "And twice that?"],
    "source": "made up",
    "src_id": "1",
    "difficulty": "easy",
    "multiturn": True,
}
"""Fields as published; the texts are ours."""


def test_spec_bench_and_speed_bench_are_read_in_their_own_formats(tmp_path):
    from pyarrow import Table, parquet

    (spec,) = load_prompts(written(tmp_path / "question.jsonl", json.dumps(SPEC_BENCH)))
    assert (spec.text, spec.later) == ("Translate: rot", ())
    parquet.write_table(Table.from_pylist([SPEED_BENCH]), tmp_path / "qualitative.parquet")
    turns = SPEED_BENCH["turns"]
    messages = [{"role": "user", "content": turn} for turn in turns]
    prepared = json.dumps({**SPEED_BENCH, "messages": messages, "turns": None})
    for source in (tmp_path / "qualitative.parquet", written(tmp_path / "q.jsonl", prepared)):
        (speed,) = load_prompts(str(source))
        assert (speed.text, speed.later) == (turns[0], (turns[1],))
        assert speed.messages == ({"role": "user", "content": turns[0]},)
        assert speed.place.endswith(f"{source}:1")


def test_later_turns_follow_the_answers():
    prompt = Prompt("a", ({"role": "user", "content": "a"},), ("b", "c"))
    second = prompt.after("x")
    assert [message["content"] for message in second.messages] == ["a", "x", "b"]
    assert (second.text, second.later) == ("a\nx\nb", ("c",))
    assert second.after("y").after("z") is None
    assert [m["content"] for m in prompt.with_all_turns().messages] == ["a", "", "b", "", "c"]


def test_sets_are_named_after_their_files(tmp_path):
    (tmp_path / "sub").mkdir()
    one = written(tmp_path / "mine.v2.jsonl", *['{"prompt": "x"}'] * 3)
    sets = load_sets(["bundled", one], 2)
    assert {name: len(prompts) for name, prompts in sets.items()} == {"bundled": 2, "mine": 2}
    with pytest.raises(InputError, match="two sets of prompts are called mine; rename a file"):
        load_sets([one, written(tmp_path / "sub" / "mine.txt", "y")])


def test_compressed_and_plain_json_lines_are_the_same(tmp_path):
    lines = [json.dumps({"task_id": i, "prompt": f"def f{i}():\n"}) for i in range(3)]
    plain = written(tmp_path / "set.jsonl", *lines)
    with gzip.open(tmp_path / "set.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    assert texts(plain) == texts(str(tmp_path / "set.jsonl.gz"))
    assert texts(plain, 2) == ["def f0():\n", "def f1():\n"]
    assert len(texts(plain, 9)) == 3


def test_a_text_file_holds_one_prompt_a_line(tmp_path):
    path = tmp_path / "set.txt"
    path.write_bytes("\ufeffder erste\r\n\r\n  zweite\u2028hälfte \n\nthird".encode())
    assert texts(str(path)) == ["der erste", "  zweite\u2028hälfte ", "third"]


def test_a_chat_goes_through_the_template_where_there_is_one(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = ({"messages": [*chat, {"role": "user", "content": "c"}]}, {"turns": ["q", "r"]})
    first, second = load_prompts(written(tmp_path / "s.jsonl", *map(json.dumps, lines)))
    templated = Tokenizer("template")
    expected = "<user>a<assistant>b<user>c<assistant>"
    assert first.token_ids(templated) == [ord(letter) for letter in expected]
    assert second.token_ids(templated) == [ord(letter) for letter in "<user>q<assistant>"]
    assert first.token_ids(Tokenizer()) == [1, *map(ord, "a\nb\nc")]
    assert second.token_ids(Tokenizer()) == [1, ord("q")]
    assert Prompt("plain").token_ids(templated) == [1, *map(ord, "plain")]


def test_a_template_that_refuses_is_an_input_error():
    prompt = Prompt("be kind", ({"role": "system", "content": "be kind"},))
    with pytest.raises(InputError, match="chat template refuses this: no system role"):
        prompt.token_ids(Tokenizer("template"))


def test_a_prompt_may_say_where_its_answer_ends(tmp_path):
    lines = ({"prompt": "a", "stop": ["\n", "END"]}, {"prompt": "b"})
    prompts = load_prompts(written(tmp_path / "s.jsonl", *map(json.dumps, lines)))
    assert [prompt.stop for prompt in prompts] == [("\n", "END"), ()]


GOOD = b'{"prompt": "x"}\n'


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("s.jsonl", GOOD + b'{"prompt": \n', r"s\.jsonl:2: not JSON"),
        ("s.jsonl", GOOD + b"[" * 100_000, r"s\.jsonl:2: not JSON"),
        ("s.jsonl", GOOD + b'\n{"prompt": "\xff"}\n', r"s\.jsonl:3: not valid UTF-8"),
        ("s.jsonl", b'{"prompt": "\\ud800"}', r"s\.jsonl:1: .*not valid UTF-8"),
        ("s.jsonl", b'{"question": "x"}', r"s\.jsonl:1: no prompt in it"),
        ("s.jsonl", b'"x"', r"s\.jsonl:1: not a JSON object"),
        ("s.jsonl", b'{"prompt": 7}', r"s\.jsonl:1: no prompt in it"),
        ("s.jsonl", b'{"prompt": "x", "stop": "y"}', r"s\.jsonl:1: stop must be a list of texts"),
        ("s.jsonl", b'{"prompt": "x", "stop": [""]}', r"s\.jsonl:1: stop .* none of them empty"),
        ("s.jsonl", b'{"turns": []}', r"s\.jsonl:1: no prompt in it"),
        ("s.jsonl", b'{"turns": ["x", 3]}', r"s\.jsonl:1: turns must be a list of texts"),
        (
            "s.jsonl",
            b'{"turns": ["%s, please"]}' % LEFT_OUT.encode(),
            r"s\.jsonl:1: its text is left out; SPEED-Bench's prepare_data\.py makes",
        ),
        ("s.parquet", b"not parquet", r"s\.parquet cannot be read"),
        ("s.jsonl", b'{"messages": [{"role": "user"}]}', r"s\.jsonl:1: a message needs"),
        ("s.jsonl", GOOD + b'{"prompt": ""}', r"s\.jsonl:2: the prompt is empty"),
        ("s.jsonl", b"\n \n", r"s\.jsonl holds no prompt"),
        ("s.jsonl.gz", b"not gzip", r"s\.jsonl\.gz cannot be read"),
        ("s.jsonl.gz", gzip.compress(GOOD, mtime=0)[:-9], r"s\.jsonl\.gz cannot be read"),
        ("s.txt", b"fine\n\xfe\n", r"s\.txt cannot be read: 'utf-8' codec"),
        ("s.txt", b"", r"s\.txt holds no prompt"),
        ("s.csv", GOOD, r"s\.csv is not named like a prompt file"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=complaint):
        load_prompts(str(tmp_path / name))


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"absent\.txt cannot be read"):
        load_prompts(str(tmp_path / "absent.txt"))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match=r"folder\.txt cannot be read"):
        load_prompts(str(tmp_path / "folder.txt"))
    with pytest.raises(InputError, match="a limit of 0"):
        load_prompts("bundled", 0)


def test_as_a_chat_a_text_is_a_users_turn_and_a_chat_stays_as_it_is():
    tokenizer = Tokenizer(chat_template="any")
    rendered = [ord(letter) for letter in "<user>hi<assistant>"]
    assert Prompt("hi", place="a:1").as_chat().token_ids(tokenizer) == rendered
    assert Prompt("hi", place="a:1").as_chat().place == "a:1"
    chat = Prompt("hi", ({"role": "assistant", "content": "hi"},))
    assert chat.as_chat() is chat
