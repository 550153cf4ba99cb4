import dataclasses
import json

from peagle.bench.environment import computed_by, environment
from peagle.bench.pair import Pair
from peagle.bench.prompts import Prompt
from peagle.bench.workload import PromptWorkload
from peagle.config import EngineConfig, SamplingParams

PARAMS = SamplingParams(max_tokens=8, top_p=0.9, ignore_eos=True)
WORKLOAD = PromptWorkload(
    Pair("target", {"peagle": "drafter"}),
    {"own": (Prompt("x"),)},
    PARAMS,
    EngineConfig(dtype="bfloat16", device="cpu"),
)


def test_all_that_a_figure_depends_on_is_recorded():
    facts = json.loads(json.dumps(environment(WORKLOAD)))
    assert (facts["dtype"], facts["device"], facts["max_tokens"]) == ("bfloat16", "cpu", 8)
    assert (facts["prompts"], facts["sampling"]) == ({"own": 1}, {"top_p": 0.9})
    assert facts["versions"].keys() == {"peagle", "torch", "transformers"}
    assert facts["cpu"]


def test_arithmetic_that_is_not_the_default_is_recorded():
    changes = {"batch_invariant": True, "quantize_activations": False}
    assert not changes.keys() & environment(WORKLOAD).keys()
    assert changes.items() <= computed_by(EngineConfig(**changes)).items()


def test_how_drafters_draft_is_recorded_where_it_is_said():
    changes = {"quantization": "fp8", "num_tree_nodes": 15}
    assert not changes.keys() & environment(WORKLOAD).keys()
    pair = Pair("target", {"peagle": "drafter"}, "fp8", num_tree_nodes=15)
    assert changes.items() <= environment(dataclasses.replace(WORKLOAD, pair=pair)).items()


def test_where_outputs_end_is_said():
    def ends(prompt, params=PARAMS):
        changed = dataclasses.replace(WORKLOAD, sets={"own": (prompt,)}, sampling=params)
        return environment(changed)["ends"]

    assert ends(Prompt("x")) == "end of text ignored"
    assert ends(Prompt("x", stop=("a",))) == "where prompts say, else end of text ignored"
    assert ends(Prompt("x"), SamplingParams()) == "at the end of text"


def test_chats_and_turns_are_counted():
    chat = Prompt("x", ({"role": "user", "content": "x"},), later=("y", "z"))
    facts = environment(dataclasses.replace(WORKLOAD, sets={"a": (chat, Prompt("x"))}))
    assert (facts["chats"], facts["turns"]) == (1, 4)
