import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny import add_mtp, save_target
from tiny_pair import VOCAB, TinyPair, save_pair, save_tokenizer

from peagle.cli.app import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def own_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a head of its own."""
    place = tmp_path_factory.mktemp("own") / "target"
    directory = save_target(place, "qwen3_5", vocab_size=VOCAB, layer_std=0.05)
    save_tokenizer(directory)
    return add_mtp(directory)


@pytest.fixture
def peagle(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Runs a command in this process, as the shell would."""
    monkeypatch.delenv("COLUMNS", raising=False)  # which a pytest that spreads tests may set
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs begin without

    def run(*arguments: object) -> Result:
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return run
