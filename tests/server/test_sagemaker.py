from pathlib import Path

import pytest

from peagle.server.sagemaker import (
    flags_from_environment,
    model_from_environment,
    with_environment,
)

VARIABLES = {
    "SM_VLLM_MAX_MODEL_LEN": "512",
    "SM_VLLM_SPECULATIVE_CONFIG": '{"model": "d"}',
    "SM_VLLM_TRUST": "true",
    "SM_VLLM_QUIET": "False",
    "SM_VLLM_MODEL": "m",
    "PATH": "/bin",
}


def test_variables_become_flags():
    assert flags_from_environment(VARIABLES, ()) == [
        "--max-model-len=512",
        '--speculative-config={"model": "d"}',
        "--trust",
    ]


def test_the_model_comes_from_its_places_in_order(tmp_path: Path):
    hub = {"HF_MODEL_ID": "hub/model"}
    assert model_from_environment({}, tmp_path) is None
    assert model_from_environment(hub, tmp_path) == "hub/model"
    (tmp_path / "config.json").write_text("{}")
    assert model_from_environment(hub, tmp_path) == str(tmp_path)
    assert model_from_environment(hub | {"SM_VLLM_MODEL": "m"}, tmp_path) == "m"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], ["--port=8080", "m"]),
        (["--port", "1"], ["--port=8080", "m", "--port", "1"]),
        (["other"], ["--port=8080", "other"]),
        (["--target", "other"], ["--port=8080", "--target", "other"]),
        (["--model=other"], ["--port=8080", "--model=other"]),
    ],
)
def test_the_command_line_wins(arguments: list[str], wanted: list[str]):
    variables = {"SM_VLLM_PORT": "8080", "SM_VLLM_MODEL": "m"}
    assert with_environment(arguments, variables, ()) == wanted


def test_false_turns_off_what_is_on_by_itself():
    variables = {"SM_VLLM_ENABLE_PREFIX_CACHING": "False", "SM_VLLM_TRUST": "false"}
    switches = {"--enable-prefix-caching"}
    assert with_environment([], variables, switches) == ["--no-enable-prefix-caching"]


def test_other_variables_change_nothing():
    assert with_environment(["x"], {"HF_MODEL_ID": "m", "PEAGLE_PORT": "1"}, ()) == ["x"]
