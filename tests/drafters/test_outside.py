"""Proposers of other packages: the one of the documentation, and such as do wrong."""

import json
import logging
import re
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import tiny

from peagle.cli.app import main
from peagle.config import SamplingParams
from peagle.drafters.outside import Outside, TextProposer, load_outside
from peagle.engine.engine import Engine
from peagle.errors import ConfigError, InputError
from peagle.speculative_config import SpeculativeConfig

PAGE = Path(__file__).parents[2] / "docs" / "proposers.md"
PROMPTS = [[5, 6, 7], list(range(1, 20)), [9] * 12]
HOW = SamplingParams(max_tokens=16)


def block(language: str) -> str:
    """The page's first block of a language."""
    return re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's package, as pip would have installed it."""
    (tmp_path / "repeat_last.py").write_text(block("python"))
    [line] = re.findall(r"^repeat_last = \"(.*)\"$", block("toml"), re.MULTILINE)
    about = tmp_path / "repeat_last-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: repeat-last\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[peagle.proposers]\nrepeat_last = {line}\n")
    monkeypatch.syspath_prepend(tmp_path)


def outputs(target, proposer: Outside | None, k: int, how=HOW) -> list[list[int]]:
    engine = Engine(target.decoder, proposer, k, tiny.engine_config())
    return tiny.outputs(tiny.run(engine, PROMPTS, how))


@pytest.mark.usefixtures("installed")
def test_the_page_s_proposer_drafts_and_changes_no_token(target):
    proposer = load_outside("repeat_last", tiny.VOCAB)
    engine = Engine(target.decoder, proposer, 4, tiny.engine_config())
    done = tiny.run(engine, PROMPTS, HOW)
    assert tiny.outputs(done) == outputs(target, None, 0)
    assert sum(request.speculation.drafted for request in done) > 0


@pytest.mark.usefixtures("installed")
def test_beside_requests_that_want_none_or_fewer(target):
    ways = [HOW, *(HOW.model_copy(update={"num_speculative_tokens": k}) for k in (0, 1))]
    engine = Engine(
        target.decoder, load_outside("repeat_last", tiny.VOCAB), 4, tiny.engine_config()
    )
    done = tiny.run(engine, PROMPTS, ways)
    assert tiny.outputs(done) == outputs(target, None, 0)
    assert [bool(request.speculation.drafted) for request in done] == [True, False, True]


@pytest.mark.usefixtures("installed")
def test_its_drafts_are_chosen_by_load(target):
    """Cycles of every length are timed first, those without drafts included."""
    proposer = load_outside("repeat_last", tiny.VOCAB)
    engine = Engine(target.decoder, proposer, 4, tiny.engine_config(draft_length="auto"))
    engine.add("r", PROMPTS[0], HOW)
    drafted = set()
    while engine.busy:
        drafted |= {output.drafted for output in engine.step() if output.cycle}
    assert drafted >= {0, 1, 4}


@pytest.mark.usefixtures("installed")
def test_a_command_serves_with_it(capsys: pytest.CaptureFixture[str]):
    words = ["generate", "--prompt", "def f(", "--max-tokens", "12"]
    texts = []
    for method in ("repeat_last", "ngram"):
        said = f'{{"method": "{method}", "num_speculative_tokens": 3}}'
        assert main([*words, "--speculative-config", said]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


@pytest.mark.usefixtures("installed")
def test_check_names_it(capsys: pytest.CaptureFixture[str]):
    said = '{"method": "repeat_last", "num_speculative_tokens": 3}'
    assert main(["check", "--speculative-config", said]) == 0
    assert re.search(r"proposer +repeat_last, at most 3 drafts", capsys.readouterr().out)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "asked",
    [
        ["--methods", "none,repeat_last", "--k", "2"],
        ["--speculative-config", '{"method": "repeat_last", "num_speculative_tokens": 2}'],
    ],
    ids=lambda asked: asked[0],
)
def test_bench_measures_it_beside_none(tmp_path: Path, asked: list[str]):
    few = ["--limit", "1", "--rounds", "1", "--max-tokens", "4"]
    assert main(["bench", *asked, *few, "--json", str(tmp_path / "result.json")]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert [run["method"] for run in result["runs"]] == ["none", "repeat_last"]


@pytest.mark.usefixtures("installed")
def test_random_text_is_not_for_it(capsys: pytest.CaptureFixture[str]):
    words = ["bench", "--shape", "qwen3-8b", "--random-weights", "--methods", "repeat_last"]
    assert main(words) != 0
    assert "random text repeats nothing; leave repeat_last out" in capsys.readouterr().err


class Wrong:
    """Fails for texts that contain a token; drafts well for others."""

    def __init__(self, fault: object) -> None:
        self._fault = fault

    def propose(self, text: Sequence[int], most: int) -> Sequence[int]:
        if 9 not in text[:3]:
            return [text[-1]]
        if isinstance(self._fault, Exception):
            raise self._fault
        return self._fault  # type: ignore[return-value]


FAULTS = [
    (RuntimeError("lost"), "RuntimeError: lost"),
    ([1, 2, 3, 4, 5], "it gives 5 drafts, and 4 were asked for"),
    ([tiny.VOCAB], f"{tiny.VOCAB} is no token of the {tiny.VOCAB} that there are"),
    ([-1], "-1 is no token"),
    (["a"], "'a' is no token"),
    (None, "TypeError"),
]


@pytest.mark.parametrize(("fault", "told"), FAULTS, ids=str)
def test_what_it_does_wrong_costs_that_request_its_drafts(
    target, caplog: pytest.LogCaptureFixture, fault: object, told: str
):
    proposer: TextProposer = Wrong(fault)
    engine = Engine(target.decoder, Outside("wrong", proposer, tiny.VOCAB), 4, tiny.engine_config())
    with caplog.at_level(logging.WARNING, logger="peagle.drafters"):
        done = tiny.run(engine, PROMPTS, HOW)
    assert tiny.outputs(done) == outputs(target, None, 0)
    assert [bool(request.speculation.drafted) for request in done] == [True, True, False]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("proposer wrong: ")
    assert told in line


def test_a_name_that_nobody_has_is_refused():
    with pytest.raises(ConfigError, match="nobody is none of eagle3, dflash, mtp, ngram"):
        SpeculativeConfig(method="nobody", num_speculative_tokens=2)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("key", [{"model": "d"}, {"prompt_lookup_min": 2}, {"num_tree_nodes": 9}])
def test_what_goes_with_others_is_refused(key: dict[str, object]):
    with pytest.raises(ConfigError, match=r"repeat_last \w+ .*; leave out"):
        SpeculativeConfig(method="repeat_last", num_speculative_tokens=2, **key)


def test_one_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch):
    broken = EntryPoint("broken", "peagle.nowhere:Class", "peagle.proposers")
    monkeypatch.setattr("peagle.drafters.outside.entry_points", lambda **_: [broken])
    with pytest.raises(InputError, match=r"proposer broken \(peagle.nowhere:Class\): No module"):
        load_outside("broken", tiny.VOCAB)
