import io
from contextlib import contextmanager
from types import SimpleNamespace

from rich.console import Console
from rich.text import Text

from peagle.bench.prompts import load_prompts
from peagle.cli import demo as module
from peagle.cli.demo import DRAFTED, OWN, _coloured


def test_it_writes_an_answer_and_compares_the_three_methods(peagle, pair, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_TOKENS", 12)
    monkeypatch.setattr(module, "COMPARED_TOKENS", 8)
    monkeypatch.setattr(module, "ROUNDS", 2)
    models = ["--target", pair.target, "--eagle3", pair.eagle3, "--peagle", pair.peagle]
    result = peagle("demo", *models)
    assert result.code == 0
    assert "\x1b" not in result.out
    assert result.out.startswith("P-EAGLE writes:\n")  # no legend of colours that are not there
    assert load_prompts("bundled", 1)[0].text in result.out
    assert "acceptance length   same text" in result.out
    rows = [line.split() for line in result.out.splitlines() if line.strip().endswith("yes")]
    assert [row[0] for row in rows] == ["none", "EAGLE-3", "P-EAGLE"]
    assert rows[0][3] == "1.00x"
    assert "best of 2" in result.out


def test_a_terminal_gets_a_legend_of_the_colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(file=io.StringIO(), force_terminal=True)
    llm = SimpleNamespace(tokenizer=None, stream=lambda *_: [])
    prompt = SimpleNamespace(text="x", token_ids=lambda _: [1])
    open_llm, params = (lambda *_, **__: llm), (lambda *_: None)
    module._show_answer(console, SimpleNamespace(open=open_llm, prompts=[prompt], params=params))
    assert "accepted drafts" in console.file.getvalue()


def test_the_bar_of_every_round_ends_full(monkeypatch):
    """On a slow machine, where one round is all there is time for, too."""
    steps = []

    @contextmanager
    def bar(what, total):
        steps.append([what, total, 0])

        def advance():
            steps[-1][2] += 1

        yield advance

    def run_cases(workload, cases, advance):
        for _ in range(len(cases) * module.COMPARED_PROMPTS):
            advance()
        return cases

    monkeypatch.setattr(module, "progress_bar", bar)
    monkeypatch.setattr("peagle.bench.load.run_cases", run_cases)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    module._rounds(None)
    assert steps == [["measuring, round 1 of up to 3", 12, 12]]


def test_accepted_drafts_and_the_targets_own_token_have_colours_of_their_own():
    words = {1: "for", 2: " item", 3: " in"}
    tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: "".join(words[token] for token in ids)
    )
    chunk = SimpleNamespace(token_ids=(1, 2, 3), accepted=2, text="for item in")
    text = _coloured(SimpleNamespace(tokenizer=tokenizer), chunk)
    assert text == Text.assemble(("for item", DRAFTED), (" in", OWN))
    console = Console(file=io.StringIO(), force_terminal=True)
    console.print(text, end="")
    assert console.file.getvalue().count("\x1b[") == 4
