"""Token ids of texts."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from peagle.config import ChatConfig
from peagle.encoder import PromptEncoder
from peagle.pair import bundled

TEXTS = ["", "def f(x):\n    return x\n", "ünï\N{ZERO WIDTH JOINER}cödé 😀" * 40, "<|endoftext|>x"]
SETTINGS = {
    "as it is": {},
    "cuts texts": {
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    },
    "pads texts": {
        "padding": {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }
    },
}


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str, splits: bool):
    """Whatever a tokenizer's file says of texts that are too long or too short."""
    for file in bundled("target").glob("token*"):
        shutil.copy(file, tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SETTINGS[name]))
    tokenizer, peer = (
        AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=splits) for _ in range(2)
    )
    encoder = PromptEncoder(tokenizer, 4096, ChatConfig())
    for special in (True, False):
        expected = [peer(text, add_special_tokens=special).input_ids for text in TEXTS]
        assert [encoder.tokenize(text, special) for text in TEXTS] == expected
    assert len(expected[2]) > 64
