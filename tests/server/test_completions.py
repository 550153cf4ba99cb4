"""Log-probabilities of prompts: an echo's, as in OpenAI's API, and vLLM's `prompt_logprobs`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import openai
import pytest
import tiny
from conftest import Running
from openai import OpenAI

from peagle import LLM
from peagle.pair import bundled

pytestmark = pytest.mark.usefixtures("_clean")
PROMPT = "def fibonacci(n):\n    return n if n < 2 else"
OTHER = "# 日本語 🙂\nclass Stack:\n    def push(self, item):\n"


@pytest.fixture(scope="session")
def peer() -> Any:
    return tiny.load_peer(bundled("target"))


def complete(client: OpenAI, k: int = 7, **fields: Any) -> Any:
    """With an echo of the prompt, and its log-probabilities."""
    extra = {"speculation": {"num_speculative_tokens": k}, **fields.pop("extra_body", {})}
    how = {"model": "demo", "prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}
    return client.completions.create(**{**how, **fields}, extra_body=extra)


def scores(peer: Any, tokens: Sequence[int]) -> list[float]:
    """Transformers' log-probability of each token but the first."""
    rows = tiny.peer_logits(peer, tokens).log_softmax(dim=-1)
    return [row[token].item() for row, token in zip(rows, tokens[1:], strict=False)]


@pytest.mark.parametrize("k", [0, 1, 7])
def test_an_echo_is_scored_as_by_transformers(client: OpenAI, offline: LLM, peer: Any, k: int):
    """The prompt and, behind it, its completion."""
    for choice in complete(client, k, prompt=[PROMPT, OTHER]).choices:
        found = choice.logprobs
        tokens = offline.encode(choice.text)
        assert found.tokens == [offline.tokenizer.decode([token]) for token in tokens]
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert found.token_logprobs[1:] == pytest.approx(scores(peer, tokens), abs=1e-4)
        best = tiny.peer_logits(peer, tokens).log_softmax(dim=-1).max(dim=-1).values.tolist()
        tops = [one for top in found.top_logprobs[1:] for one in top.values()]
        assert tops == pytest.approx(best[:-1], abs=1e-4)


def test_lm_evals_reading_of_an_echo_is_the_loglikelihood(client: OpenAI, offline: LLM, peer: Any):
    """It sends contexts and their continuations as token ids, and leaves out what is generated."""
    contexts, rests = [PROMPT, OTHER, PROMPT], [" fibonacci(n - 1)", "        self", " 7"]
    pairs = [(offline.encode(c), offline.encode(r)) for c, r in zip(contexts, rests, strict=True)]
    answer = complete(client, prompt=[c + r for c, r in pairs], max_tokens=1, seed=1234)
    for (context, rest), choice in zip(pairs, answer.choices, strict=True):
        own = choice.logprobs.token_logprobs[len(context) : -1]
        tops = choice.logprobs.top_logprobs[len(context) : -1]
        greedy = all(one == max(top.values()) for one, top in zip(own, tops, strict=True))
        rows = tiny.peer_logits(peer, context + rest)[len(context) - 1 : -1]
        assert sum(own) == pytest.approx(sum(scores(peer, context + rest)[-len(rest) :]), abs=1e-4)
        assert greedy == (rows.argmax(dim=-1).tolist() == rest)


@pytest.mark.parametrize("fields", [{}, {"prompt": [PROMPT, OTHER], "n": 2}, {"max_tokens": 0}])
def test_a_stream_adds_up_to_the_whole(client: OpenAI, fields: dict[str, Any]):
    """The first chunk of each choice has the prompt."""
    fields = {"temperature": 0.9, "seed": 3, "max_tokens": 12, **fields}
    whole = complete(client, **fields).choices
    texts = ["" for _ in whole]
    parts: list[dict[str, list[Any]]] = [{} for _ in whole]
    for chunk in complete(client, stream=True, **fields):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        for name, values in choice.logprobs.model_dump().items():
            parts[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole]
    for found, choice in zip(parts, whole, strict=True):
        wanted = choice.logprobs.model_dump()
        assert [found[name] for name in ("tokens", "text_offset")] == [
            wanted[name] for name in ("tokens", "text_offset")
        ]
        for one, other in ((found, wanted), (wanted, found)):
            first, *rest = one["token_logprobs"]
            assert first is None
            assert rest == pytest.approx(other["token_logprobs"][1:], abs=1e-4)


@pytest.mark.parametrize("prompt", [PROMPT, OTHER, "a<|endoftext|>b", "x"])
def test_offsets_are_places_in_the_text(client: OpenAI, prompt: str):
    choice = complete(client, prompt=prompt, max_tokens=8).choices[0]
    found, text = choice.logprobs, choice.text
    assert found.text_offset[0] == 0
    for token, (place, end) in zip(found.tokens, pairwise([*found.text_offset, None]), strict=True):
        assert "\ufffd" in token or text[place:end] == token


def test_special_tokens_that_the_text_leaves_out_take_no_place(client: OpenAI, offline: LLM):
    end = offline.tokenizer.eos_token_id
    first, last = offline.encode("def"), offline.encode(" f():")
    answer = complete(client, prompt=[end, *first, end, *last], max_tokens=0)
    [choice] = answer.choices
    assert choice.text == "def f():"
    offsets = choice.logprobs.text_offset
    assert offsets[: len(first) + 2] == [0, 0, *[3] * len(first)]
    assert offsets == sorted(offsets)


def test_an_echo_is_of_the_tokens_that_are_kept(client: OpenAI, offline: LLM):
    kept = offline.encode(PROMPT)[-3:]
    [choice] = complete(client, extra_body={"truncate_prompt_tokens": 3}, max_tokens=2).choices
    before = offline.tokenizer.decode(kept)
    assert choice.text.startswith(before)
    ends = [at for at, _ in zip(choice.logprobs.text_offset, kept, strict=False)]
    pieces = [choice.text[a:b] for a, b in pairwise([*ends, len(before)])]
    assert pieces == [offline.tokenizer.decode([token]) for token in kept]


class TestNothingGenerated:
    @pytest.mark.parametrize("logprobs", [None, 0, 3])
    def test_an_echo_is_the_prompt_alone(self, client: OpenAI, offline: LLM, logprobs: int | None):
        answer = complete(client, max_tokens=0, logprobs=logprobs)
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason) == (PROMPT, "length")
        length = len(offline.encode(PROMPT))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, 0)
        if logprobs is None:
            assert choice.logprobs is None
        else:
            assert len(choice.logprobs.token_logprobs) == length
            assert {len(top) for top in choice.logprobs.top_logprobs[1:]} == {logprobs}

    def test_without_a_question_about_the_prompt_it_is_no_length(self, client: OpenAI):
        plain = complete(client, echo=False, max_tokens=None)
        assert complete(client, echo=False, max_tokens=0).choices[0].text == plain.choices[0].text


def assert_vllms(found: list[Any], tokens: Sequence[int], peer: Any, offline: LLM) -> None:
    """With two likely tokens in each place."""
    rows = tiny.peer_logits(peer, tokens).log_softmax(dim=-1)
    assert (len(found), found[0]) == (len(tokens), None)
    for entry, row, token in zip(found[1:], rows, tokens[1:], strict=False):
        likely = row.topk(2).indices.tolist()
        assert [*entry] == [str(one) for one in dict.fromkeys([token, *likely])]
        for rank, one in enumerate(likely, start=1):
            assert entry[str(one)]["rank"] == rank
        for name, one in entry.items():
            assert set(one) == {"logprob", "rank", "decoded_token"}
            assert one["logprob"] == pytest.approx(row[int(name)].item(), abs=1e-4)
            assert one["decoded_token"] == offline.tokenizer.decode([int(name)])
        assert entry[str(token)]["rank"] == pytest.approx(int((row >= row[token]).sum()), abs=1)


class TestPromptLogprobs:
    def test_of_completions(self, client: OpenAI, offline: LLM, peer: Any):
        """In every choice, beside the echo's, which asks for fewer."""
        prompts = [PROMPT, OTHER]
        answer = complete(client, prompt=prompts, n=2, extra_body={"prompt_logprobs": 2})
        for index, choice in enumerate(answer.choices):
            tokens = offline.encode(prompts[index // 2])
            assert_vllms(choice.model_extra["prompt_logprobs"], tokens, peer, offline)
            assert {len(top) for top in choice.logprobs.top_logprobs[1:]} == {1}

    @pytest.mark.parametrize("length", [0, 4])
    def test_of_a_chat(self, client: OpenAI, offline: LLM, peer: Any, length: int):
        """Once, since all choices have the same prompt; it may be all that is asked for."""
        messages: Any = [{"role": "user", "content": "def is_prime(n):"}]
        how = {"model": "demo", "messages": messages, "n": 2, "max_tokens": length}
        answer = client.chat.completions.create(**how, extra_body={"prompt_logprobs": 2})
        assert answer.usage.completion_tokens == 2 * length
        text = offline.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        found = answer.model_extra["prompt_logprobs"]
        assert_vllms(found, offline.tokenize(text, add_special_tokens=False), peer, offline)

    def test_none_unless_asked_for(self, client: OpenAI):
        answer = complete(client)
        assert "prompt_logprobs" not in {*answer.model_extra, *answer.choices[0].model_extra}

    def test_a_stream_has_none(self, client: OpenAI):
        for echo in (True, False):
            with pytest.raises(openai.BadRequestError, match="a stream has no prompt_logprobs"):
                complete(client, echo=echo, stream=True, extra_body={"prompt_logprobs": 0})

    def test_more_than_an_answer_holds_are_refused(self, client: OpenAI):
        prompts, extra = [[1] * 400] * 128, {"prompt_logprobs": 20}
        with pytest.raises(openai.BadRequestError, match="1075200 log-probabilities of prompts"):
            complete(client, prompt=prompts, max_tokens=1, extra_body=extra)


def test_a_prompt_is_read_from_the_prefix_cache_only_where_nobody_asks_for_its_scores(
    client: OpenAI, offline: LLM
):
    prompt = "# read from the prefix cache or not\n" * 5
    cached = [
        complete(client, prompt=prompt, **how).usage.prompt_tokens_details.cached_tokens
        for how in ({}, {"echo": False}, {"max_tokens": 0}, {"logprobs": None})
    ]
    most = len(offline.encode(prompt)) // 16 * 16
    assert cached == [0, most, 0, most]


def test_an_echo_that_fails_midway_has_only_numbers(server: Running, client: OpenAI):
    """JSON has no others."""
    embedding = server.service.llm.engine.core.target.embed.weight
    with tiny.nan_row(embedding, 777):
        answer = complete(client, prompt=[[1, 2, 3], [5, 6, 777, 8]])
    good, bad = answer.choices
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")
    assert len(good.logprobs.token_logprobs) == 3 + 16
    assert bad.logprobs.token_logprobs == [None]


def test_a_request_says_how_many_tokens_an_event_holds(client: OpenAI):
    """But for its first event."""
    counts = []
    for interval in (None, 8):
        more = {} if interval is None else {"stream_interval": interval}
        stream = client.completions.create(
            model="demo",
            prompt="x",
            max_tokens=24,
            stream=True,
            extra_body={"ignore_eos": True, "speculation": {"num_speculative_tokens": 0}, **more},
        )
        counts.append(sum(1 for _ in stream))
    assert counts == [24, 4]
