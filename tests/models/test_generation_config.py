import json
from pathlib import Path

import pytest

from peagle.models.generation_config import end_tokens


@pytest.mark.parametrize(
    ("generation", "model", "ids"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5,)),
        ({"eos_token_id": [5, 6]}, {}, (5, 6)),
        ({}, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": [8]}, (8,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_where_the_end_of_text_is_read(tmp_path: Path, generation, model, ids: tuple[int, ...]):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert end_tokens(tmp_path, None) == ids
    assert end_tokens(tmp_path, 9) == (9, *ids)
    assert end_tokens(tmp_path, 5) == (5, *(token for token in ids if token != 5))
