import io
import json
import shutil

import pytest
from chat_templates import LLAMA, byte_tokenizer
from scripted import scripted_llm, writing

from peagle.config import SamplingParams
from peagle.llm import LLM
from peagle.models.tokenizer import load_tokenizer
from peagle.train.conversations import read_documents
from peagle.train.packing import Document

TOKENS = 20
PROMPT = "def name(self):"


@pytest.fixture
def generate(peagle, pair):
    def run(*arguments, target=pair.target):
        return peagle("generate", "--target", target, "--max-tokens", TOKENS, *arguments)

    return run


@pytest.fixture(scope="module")
def expected(pair):
    """What the target alone writes, greedily."""
    (completion,) = LLM(pair.target).generate([PROMPT], SamplingParams(max_tokens=TOKENS))
    return completion


def records(result):
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


@pytest.mark.parametrize("drafter", [None, "eagle3", "peagle"])
def test_json_holds_the_same_tokens_with_and_without_a_drafter(generate, pair, expected, drafter):
    chosen = ["--drafter", getattr(pair, drafter), "--k", 3] if drafter else []
    (record,) = records(generate("--prompt", PROMPT, "--json", *chosen))
    assert record["prompt"] == PROMPT
    assert record["token_ids"] == list(expected.token_ids)
    assert record["text"] == expected.text
    assert record["finish_reason"] == "length"
    assert "logprobs" not in record
    k = 3 if drafter else 0
    assert len(record["accepted_per_position"]) == k
    assert record["cycles"] == len(record["accepted_per_cycle"])
    assert record["cycles"] <= record["drafted"] <= k * record["cycles"]
    assert sum(record["accepted_per_position"]) == sum(record["accepted_per_cycle"])
    if drafter:
        emitted = record["cycles"] + record["pauses"] + sum(record["accepted_per_cycle"])
        assert TOKENS - 1 <= emitted < TOKENS + k


def test_training_reads_json_as_prompt_and_response(generate, pair, tmp_path):
    (tmp_path / "data.jsonl").write_text(generate("--prompt", PROMPT, "--json").out)
    (record,) = records(generate("--prompt", PROMPT, "--json"))
    data = [str(tmp_path / "data.jsonl")]
    documents, _ = read_documents(data, lambda: load_tokenizer(pair.target), 512, "cut", 5000)
    prompt, response = record["prompt_token_ids"], record["token_ids"]
    assert documents == [Document.answered([*prompt, *response], len(prompt))]


def test_vllms_json_says_the_same_as_the_options(generate, pair):
    config = {
        "method": "eagle3",
        "model": str(pair.peagle),
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    by_json = generate("--prompt", PROMPT, "--json", "--speculative-config", json.dumps(config))
    by_options = generate("--prompt", PROMPT, "--json", "--drafter", pair.peagle, "--k", 3)
    (one,), (other,) = records(by_json), records(by_options)
    assert one["token_ids"] == other["token_ids"]
    assert len(one["accepted_per_position"]) == len(other["accepted_per_position"]) == 3


@pytest.mark.parametrize("form", [[], ["--target"]])
def test_the_target_is_an_argument_or_a_flag(peagle, pair, expected, form):
    result = peagle("generate", *form, pair.target, "--prompt", PROMPT, "--max-tokens", TOKENS)
    assert result.out == expected.text + "\n"


def test_chat_renders_a_users_turn_as_the_template_does(generate, pair, tmp_path):
    """With one beginning-of-text token where the template writes it, as the tokenizer would."""
    target = shutil.copytree(pair.target, tmp_path / "target")
    tokenizer = byte_tokenizer(LLAMA)
    tokenizer.save_pretrained(target)
    (record,) = records(generate("--chat", "--prompt", "hi", "--json", target=target))
    begun = "<|bos|><|header|>user<|/header|>\n\nhi<|eot|><|header|>assistant<|/header|>\n\n"
    assert tokenizer.decode(record["prompt_token_ids"]) == begun
    assert record["prompt"] == "hi"


def test_chat_without_a_template_is_refused_before_anything_loads(generate, pair, tmp_path):
    target = shutil.copytree(pair.target, tmp_path / "target")
    byte_tokenizer(None).save_pretrained(target)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    (target / "model.safetensors").unlink()
    result = generate("--chat", "--prompt", "hi", target=target)
    assert (result.code, result.out) == (2, "")
    told = f"peagle: {target} has no chat template; leave out --chat to give it plain text\n"
    assert result.err == told


def test_logprobs_are_printed_when_asked_for(generate):
    (record,) = records(generate("--prompt", PROMPT, "--json", "--logprobs", 2))
    assert len(record["logprobs"]) == TOKENS
    for token, scores in zip(record["token_ids"], record["logprobs"], strict=True):
        assert scores["top"][0] == [token, pytest.approx(scores["logprob"])]
        assert len(scores["top"]) == 2


def test_one_text_comes_alone_on_stdout(generate, expected):
    result = generate("--prompt", PROMPT)
    assert result.out == expected.text + "\n"
    assert result.err.startswith(f"{TOKENS} tokens in ")
    assert "acceptance length" not in result.err


def test_the_speed_line_tells_what_the_drafter_did(generate, pair):
    result = generate("--prompt", PROMPT, "--drafter", pair.peagle)
    assert "acceptance length 1." in result.err
    assert "\x1b" not in result.out + result.err


def test_stdin_that_is_closed_is_an_empty_prompt(generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert "empty" in generate("--prompt", "-").err


def test_prompts_come_from_options_stdin_and_files(generate, tmp_path, monkeypatch):
    (tmp_path / "more.txt").write_text("third\nfourth\n")
    stdin = io.TextIOWrapper(io.BytesIO("zwölf\n".encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    given = ["--prompt", PROMPT, "--prompt", "-", "--prompts", tmp_path / "more.txt"]
    found = [record["prompt"] for record in records(generate(*given, "--json"))]
    assert found == [PROMPT, "zwölf\n", "third", "fourth"]


def test_several_texts_are_printed_apart(generate, expected):
    result = generate("--prompt", PROMPT, "--prompt", PROMPT)
    first, second = f"--- 1 of 2: {PROMPT}", f"--- 2 of 2: {PROMPT}"
    assert result.out == f"{first}\n{expected.text}\n\n{second}\n{expected.text}\n"


def test_a_long_prompt_is_shortened_above_its_text(generate):
    long = "def other(\n    self,\n" + "    argument,\n" * 20
    result = generate("--prompt", PROMPT, "--prompt", long)
    shown = [line for line in result.out.splitlines() if line.startswith("---")]
    assert shown[1] == "--- 2 of 2: def other( self, argument, argument, argument, argument, ..."


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_an_interruption_keeps_what_is_finished(generate, monkeypatch, how):
    whole = generate("--prompt", PROMPT, "--prompt", "x", *how)
    original = LLM.completions

    def interrupted(*arguments):
        yield next(original(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "completions", interrupted)
    result = generate("--prompt", PROMPT, "--prompt", "x", *how)
    assert (result.code, result.err) == (130, "peagle: interrupted\n")
    assert result.out
    assert whole.out.startswith(result.out)


def test_a_seed_repeats_a_sample_and_stop_ends_it(generate):
    options = ["--prompt", PROMPT, "--json", "--temperature", 1.0, "--top-k", 50, "--seed", 7]
    first, second = records(generate(*options)), records(generate(*options))
    assert first == second
    stop = first[0]["text"][3:5]
    (record,) = records(generate(*options, "--stop", stop))
    assert record["finish_reason"] == "stop"
    assert record["text"] == first[0]["text"].partition(stop)[0]


def test_every_sampling_option_reaches_the_engine(generate, monkeypatch):
    given = {
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 5,
        "stop": "never so",
        "logprobs": 1,
    }
    seen = []
    original = LLM.completions
    monkeypatch.setattr(
        LLM, "completions", lambda *arguments: seen.append(arguments[2]) or original(*arguments)
    )
    options = [part for name, value in given.items() for part in (option(name), value)]
    assert generate("--prompt", PROMPT, "--json", "--ignore-eos", *options).code == 0
    given["stop"] = (given["stop"],)
    assert seen == [SamplingParams(max_tokens=TOKENS, ignore_eos=True, **given)]


def option(name):
    return "--" + name.replace("_", "-")


def test_given_acceptance_is_a_warning(generate, pair):
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]}
    asked = json.dumps({"model": str(pair.peagle), "num_speculative_tokens": 1, **rates})
    result = generate("--prompt", PROMPT, "--speculative-config", asked)
    assert result.err.startswith("peagle: warning: SYNTHETIC: drafts are accepted by given rates")


def test_k_beyond_training_is_a_warning(generate, pair):
    result = generate("--prompt", PROMPT, "--drafter", pair.peagle, "--k", 9)
    assert result.code == 0
    assert result.err.startswith("peagle: warning: K = 9 is beyond the 8 tokens")


def test_thoughts_of_a_chat_are_not_among_the_text(peagle, tmp_path, monkeypatch):
    llm, script = scripted_llm("qwen3", tmp_path)
    monkeypatch.setattr("peagle.cli.generate.load_llm", lambda *_: llm)
    monkeypatch.setattr(
        "peagle.cli.generate.as_chats", lambda given, _: [p.as_chat() for p in given]
    )
    with writing(script, "qwen3", "<think>\nHm.\n</think>\n\nIt is 4."):
        result = peagle("generate", "--chat", "--prompt", "2+2?")
        assert (result.code, result.out) == (0, "It is 4.\n")
        assert result.err.startswith("Hm.\n\n")
        (record,) = records(peagle("generate", "--chat", "--prompt", "2+2?", "--json"))
    assert (record["reasoning_content"], record["text"]) == ("Hm.", "It is 4.")
