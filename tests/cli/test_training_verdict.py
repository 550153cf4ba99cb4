"""What `peagle train` says of the drafter that it has made."""

import shlex
from pathlib import Path

import pytest

from peagle.cli.verdict import judge, judge_served
from peagle.train.recipe import Recipe


@pytest.fixture
def recipe(pair, tmp_path: Path) -> Recipe:
    """Of a finished run: its output is a drafter."""
    return Recipe(
        target=str(pair.target),
        data=("answers.jsonl",),
        output=str(pair.peagle),
        mask_token_id=1,
        num_speculative_tokens=4,
        steps=1,
    )


def words(recipe: Recipe, estimated: float, measured: float) -> list[str]:
    return shlex.split(judge(recipe, estimated, measured).command)


def test_drafts_that_are_hardly_ever_right_call_for_a_check(recipe):
    verdict = judge(recipe, 1.3, 1.29)
    assert verdict.meaning == (
        "AL 1.29 of at most 5: its drafts are hardly ever right "
        "(symptoms and remedies: docs/first-drafter.md)"
    )
    assert verdict.command == f"peagle check {recipe.output} --target {recipe.target}"


def test_an_engine_far_below_the_estimate_tells_of_other_text(recipe):
    meaning = judge(recipe, 3.0, 2.39).meaning
    assert meaning == (
        "AL 2.39 of at most 5, where 3.00 was estimated: the target writes other text than the "
        "data holds (symptoms and remedies: docs/first-drafter.md)"
    )
    assert words(recipe, 3.0, 2.39)[:2] == ["peagle", "check"]
    assert "other text" not in judge(recipe, 3.0, 2.41).meaning


def test_below_two_it_is_to_be_measured_also_at_few_drafts(recipe):
    meaning = judge(recipe, 1.9, 1.99).meaning
    assert "it helps where few requests run" in meaning
    assert "--chat" in meaning  # prompts sent without the template would be guessed less often
    command = words(recipe, 1.9, 1.99)
    assert command[:5] == ["peagle", "bench", recipe.target, "--drafter", recipe.output]
    assert command[command.index("--k") + 1] == "3,4"
    only = recipe.model_copy(update={"num_speculative_tokens": 2})
    assert words(only, 1.9, 1.99)[command.index("--k") + 1] == "2"


def test_above_two_it_is_to_be_served(recipe):
    verdict = judge(recipe, 2.2, 2.0)
    assert verdict.meaning == "AL 2.00 of at most 5: worth serving"
    drafter = ["--drafter", recipe.output]
    assert shlex.split(verdict.command) == ["peagle", "serve", recipe.target, *drafter]


@pytest.mark.parametrize(("k", "length"), [(4, 4.0), (1, 1.6)])
def test_near_the_longest_possible_k_is_the_limit(recipe, k: int, length: float):
    found = recipe.model_copy(update={"num_speculative_tokens": k})
    assert "a larger K would give more" in judge(found, length, length).meaning
    assert "a larger K" not in judge(found, length, length - 0.01).meaning


def test_names_with_spaces_are_one_word(recipe):
    spaced = recipe.model_copy(update={"output": "my drafter"})
    assert words(spaced, 1.0, 1.0)[2] == "my drafter"


def test_the_commands_are_those_of_the_program(peagle, recipe, tmp_path: Path):
    assert peagle(*words(recipe, 1.0, 1.0)[1:]).code == 0
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two\n")
    command = [str(prompts) if word == "FILE" else word for word in words(recipe, 1.9, 1.9)]
    measured = peagle(*command[1:], "--max-tokens", "4")
    assert measured.code == 0, measured.err
    assert "P-EAGLE" in measured.out


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [("Olmo2ForCausalLM", ""), ("Cohere2ForCausalLM", " --model-impl transformers")],
)
def test_what_only_vllm_runs_is_served_as_vllm_runs_it(recipe, tmp_path, architecture, flags):
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{architecture}"]}}')
    verdict = judge_served(recipe.model_copy(update={"target": str(tmp_path)}), 2.2, None)
    serve, _ = verdict.command.splitlines()
    assert serve == f"peagle serve {tmp_path} --drafter {recipe.output} --engine vllm{flags}"


def test_what_nothing_runs_is_not_to_be_served(recipe, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["FalconH1ForCausalLM"]}')
    verdict = judge_served(recipe.model_copy(update={"target": str(tmp_path)}), 2.2, None)
    assert verdict.command == f"peagle check {recipe.output} --target {tmp_path}"
