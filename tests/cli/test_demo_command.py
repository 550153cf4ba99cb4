import io
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
    assert load_prompts("bundled", 1)[0].text in result.out
    rows = [line.split() for line in result.out.splitlines() if line.strip().endswith("yes")]
    assert [row[0] for row in rows] == ["none", "EAGLE-3", "P-EAGLE"]
    assert rows[0][3] == "1.00x"
    assert "best of 2" in result.out


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
