"""Answers end where their family hands over to its tools, whatever the configuration lists."""

from pathlib import Path
from unittest import mock

import pytest
from families import FAMILIES, encode
from scripted import scripted_llm

from peagle.config import SamplingParams

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
TIME = [{"role": "user", "content": "What time is it?"}]


@pytest.mark.parametrize(
    ("name", "listed", "handover"),
    [("gemma4", "<turn|>", "<|tool_response>"), ("gpt-oss", "<|return|>", "<|call|>")],
)
def test_an_answer_ends_where_it_hands_over(name: str, listed: str, handover: str, tmp_path: Path):
    llm, script = scripted_llm(name, tmp_path, [listed])
    script.tokens = encode(name, FAMILIES[name].write("", "", [("now", {})]) + handover + "made up")
    with mock.patch("peagle.engine.host.batch.choose", script.choose):
        [done] = llm.chat([TIME], SamplingParams(max_tokens=60), tools=[NOW])
        [written_on] = llm.chat([TIME], SamplingParams(max_tokens=60, ignore_eos=True), tools=[NOW])
    assert done.message is not None
    assert [call.name for call in done.message.calls] == ["now"]
    assert (done.message.content or "", done.finish_reason) == ("", "stop")
    assert len(written_on.token_ids) == 60
