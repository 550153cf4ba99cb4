"""The training studies, at a size too small to learn anything."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from ablations import STUDIES, arms, table
from compare import ARMS
from held_out import acceptance_length, count, difference, interval
from mask_slots import SHARED, SLOTS, AddingPass, Additions, MaskSlot
from sweep import Arm, Sweep, shortened
from tiny_pair import MASK, VOCAB, TinyPair, save_pair

from peagle.train.cod import sample_chains
from peagle.train.context import Shared
from peagle.train.features import target_features
from peagle.train.packing import Document, pack
from peagle.train.partition import ParallelPass
from peagle.train.recipe import Recipe

TOKENS = tuple((7 * i) % tiny.MASK for i in range(40))
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = BENCHMARKS / "training"
RECIPES = BENCHMARKS.parent / "recipes" / "demo"
pytestmark = pytest.mark.usefixtures("forked")


def small(pair: TinyPair) -> list[str]:
    """Keys that make a recipe take seconds."""
    sizes = ["row_length=96", "rows_per_step=2", "rows_per_pass=2", "intermediate_size=64"]
    return [f"target={pair.target}", "taps=[1,2,3]", "validation_documents=8", *sizes]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> TinyPair:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    with path.open("w") as file:
        for _ in range(40):
            ids = [draw.randrange(MASK + 1, VOCAB) for _ in range(30)]
            print(json.dumps({"prompt_token_ids": ids[:6], "token_ids": ids[6:]}), file=file)
    return path


def run(script: str, *arguments: object) -> str:
    """What a script prints, run in a process of its own since it forks."""
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestAblations:
    def test_two_of_them_in_three_steps(self, pair, data, tmp_path: Path):
        results, plot = tmp_path / "r.jsonl", tmp_path / "r.png"
        given = [data, *small(pair)]
        run("ablations.py", "train", *given, "--steps", 3, "--variants", 2, "--out", results)
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        assert {line["arm"] for line in lines} == {"4 layers", "+ depth"}
        for line in lines:
            assert (line["steps"], line["tokens"], len(line["accuracy"])) == (3, 3 * 2 * 96, 8)
            low, high = line["interval"]
            assert 1 <= low <= line["acceptance_length"] <= high <= 6
        printed = run("ablations.py", "draw", results, "--plot", plot)
        assert "| + depth |" in printed
        assert "| frozen |" not in printed
        assert plot.read_bytes().startswith(b"\x89PNG")

    def test_arms_that_keep_pace(self, pair, data, tmp_path: Path):
        """However many steps fit the time, all arms take the same number."""
        results = tmp_path / "r.jsonl"
        given = [data, *small(pair), "--out", results, "--variants", 2]
        run("ablations.py", "train", *given, "--seconds", 2)
        steps = {json.loads(line)["steps"] for line in results.read_text().splitlines()}
        assert len(steps) == 1
        assert steps.pop() >= 20

    def test_an_arm_that_fails_lets_the_others_go_on(self, pair, data, tmp_path: Path):
        recipe = Recipe.load(RECIPES / "peagle.yaml", [f"data=[{data}]", "steps=3", *small(pair)])
        arms = [Arm("fails", {"taps": (1, 2, 9)}), Arm("goes on")]
        results = {result["arm"]: result for result in Sweep.read(recipe).run(arms)}
        assert "aux layers [1, 2, 9]" in results["fails"]["error"]
        assert results["goes on"]["steps"] == 3

    def test_every_study_has_the_paper_s_order_or_none(self):
        """Figures from research/paper.md: if a study has any, all of its choices do."""
        for choices in STUDIES.values():
            assert len({choice.paper is None for choice in choices}) == 1
        names = [arm.name for arm in arms()]
        assert len(names) == len(set(names)) == 12

    def test_the_table_tells_differences(self):
        counts = {"1 layer": [(20, 10), (30, 10)], "2 layers": [(30, 10), (40, 10)]}
        found = {
            name: {
                "held_out": held,
                "acceptance_length": acceptance_length(held),
                "interval": interval(held),
            }
            for name, held in counts.items()
        }
        lines = table(found).splitlines()
        assert lines[-2:] == [
            "| 1 | 2.500 [2.000, 3.000] |  | 2.69, 2.41 |",
            "| 2 | 3.500 [3.000, 4.000] | +1.000 [+1.000, +1.000] | 3.58, 2.76 |",
        ]


class TestCompare:
    def test_trained_and_measured(self, pair, data, tmp_path: Path):
        drafters, result = tmp_path / "drafters", tmp_path / "result.json"
        given = [data, *small(pair)]
        run("compare.py", "train", *given, "--steps", 3, "--out", drafters)
        how = ["--limit", 2, "--max-tokens", 8, "--target", pair.target]
        run("compare.py", "measure", drafters, *how, "--out", result)
        found = json.loads(result.read_text())
        assert (found["count"], found["k"]) == (2, 5)
        assert found["drafters"].keys() == {"eagle3", "peagle"}
        assert found["drafters"]["eagle3"]["difference_interval"] == [0.0, 0.0]
        assert 1 <= found["drafters"]["peagle"]["acceptance_length"] <= 6

    def test_both_sides_are_the_demo_s_recipes(self):
        """The same data, steps and everything else that does not belong to the method."""
        peagle, eagle3 = (Recipe.load(RECIPES / f"{name}.yaml") for name in ("peagle", "eagle3"))
        changed = {**peagle.model_dump(), **ARMS["eagle3"].changes, "output": eagle3.output}
        assert Recipe(**changed) == eagle3


class TestHeldOut:
    def test_each_conversation_is_walked_through_on_its_own(self):
        batch = pack([Document.answered(TOKENS[:4], 0)] * 2, 4).batch(torch.arange(2))
        agreement = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0], [-1, -1, -1]] * 2)
        assert count([(batch, agreement, agreement)], 2) == [(3, 1), (3, 1)]
        assert count([(batch, agreement, agreement)], 1) == [(3, 2), (3, 2)]

    def test_intervals(self):
        same = [(30, 10)] * 50
        assert interval(same) == (3.0, 3.0)
        draw = random.Random(0)
        counts = [(draw.randint(15, 45), 10) for _ in range(200)]
        low, high = interval(counts)
        assert low < acceptance_length(counts) < high
        assert interval(counts) == (low, high)
        assert difference(counts, counts) == (0.0, 0.0, 0.0)


class TestMaskSlots:
    @pytest.fixture
    def parts(self, target):
        model = tiny.random_drafter(tiny.drafter_config(parallel=True))
        batch = pack([Document.answered(TOKENS, 2)], 40).batch(torch.arange(1))
        features = target_features(target.decoder, batch, model.config.taps)
        return model, batch, features, sample_chains(batch, [1.0] * 4, torch.Generator()), 50

    def test_what_adds_nothing_changes_nothing(self, parts):
        model = parts[0]
        model.additions = Additions(MaskSlot(), model.config.feature_size, 4)
        for ours, theirs in zip(
            AddingPass(*parts).passes(), ParallelPass(*parts).passes(), strict=True
        ):
            torch.testing.assert_close(ours.hidden, theirs.hidden)

    @pytest.mark.parametrize("name", [name for name, slot in SLOTS.items() if slot != SHARED])
    def test_every_addition_is_learnt(self, parts, name: str):
        model = parts[0]
        model.additions = Additions(SLOTS[name], model.config.feature_size, 4)
        AddingPass(*parts).backward(lambda part: part.hidden.square().sum())
        for parameter in (*model.additions.parameters(), model.mask_hidden):
            assert parameter.grad.abs().sum() > 0

    def test_a_slot_is_told_its_anchor_alone(self, parts):
        model, chains = parts[0], parts[3]
        model.additions = Additions(SLOTS["+ NTP hidden"], model.config.feature_size, 4)
        run, elements = AddingPass(*parts), chains.deeper()
        mask_token = model.embed.weight[None, model.config.mask_token_id]
        _, slots = run.mask_slots(elements, Shared([], [], mask_token, model.mask_feature()))
        first, second = (slots[elements.anchors == anchor] for anchor in (4, 5))
        torch.testing.assert_close(first, first[:1].expand_as(first))
        assert not torch.allclose(first, second)


def test_shortened_conversations_end_early():
    whole = pack([Document(TOKENS[:10], ((2, 4), (6, 10))), Document.answered(TOKENS, 8)], 60)
    [documents] = shortened(whole, 8).documents
    assert documents == (Document(TOKENS[:8], ((2, 4), (6, 8))),)
