from dataclasses import replace

import pytest
from transformers import LlamaConfig

from peagle.bench.pair import METHODS, Pair, choose_pair
from peagle.drafters.diagnosis import diagnose
from peagle.errors import InputError
from peagle.pair import bundled

NO_DRAFTERS = {"eagle3": None, "peagle": None}


def test_only_what_will_run_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.pair.PLACE", tmp_path)
    assert choose_pair(["none"], "own", NO_DRAFTERS) == Pair("own", {})
    mixed = choose_pair(["none", "peagle"], "own", {"eagle3": None, "peagle": "drafter"})
    assert mixed == Pair("own", {"peagle": "drafter"})


def test_a_target_of_ones_own_needs_drafters_of_its_own():
    with pytest.raises(InputError, match="give --eagle3 DIR"):
        choose_pair(METHODS, "own", {"eagle3": None, "peagle": "drafter"})


def test_drafters_are_checked_together(pair):
    good = Pair(str(pair.target), {"eagle3": str(pair.eagle3), "peagle": str(pair.peagle)})
    configs = good.examine()
    assert good.beyond_training(configs, 8) == []
    warnings = good.beyond_training(configs, 9)
    assert len(warnings) == 2
    assert "K = 9 is beyond the 8 tokens" in warnings[0]
    swapped = Pair(str(pair.target), {"eagle3": str(pair.peagle), "peagle": str(pair.eagle3)})
    with pytest.raises(InputError, match=r"takes it as --peagle; .*takes it as --eagle3"):
        swapped.examine()


def test_a_method_may_look_drafts_up():
    pair = choose_pair(["ngram", "peagle"], "own", {"eagle3": None, "peagle": "drafter"})
    assert pair == Pair("own", {"peagle": "drafter"})
    assert pair.speculation("none", 0) is None
    found, drafted = (pair.speculation(method, 5) for method in ("ngram", "peagle"))
    assert found is not None
    assert drafted is not None
    assert (found.method, found.model, found.lookup) == ("ngram", None, (3, 16))
    assert (drafted.method, drafted.model, drafted.lookup) == ("eagle3", "drafter", None)


def test_drafts_of_every_drafter_branch_and_lookups_do_not():
    drafters = ("peagle", "eagle3", "dflash", "mtp")
    pair = Pair("target", dict.fromkeys(drafters, "drafter"), num_tree_nodes=15)
    nodes = {
        method: getattr(pair.speculation(method, 7), "num_tree_nodes", None)
        for method in ("none", "ngram", *drafters)
    }
    assert {nodes.pop(method) for method in drafters} == {15}
    assert set(nodes.values()) == {None}
    chains = replace(pair, branching=("peagle",)).speculation("eagle3", 7)
    assert chains is not None
    assert chains.num_tree_nodes is None


def test_the_shipped_chat_drafter_fits_its_target(tmp_path):
    """SmolLM2-135M-Instruct's sizes."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    target = LlamaConfig(vocab_size=49152, architectures=["LlamaForCausalLM"], **sizes, **heads)
    target.save_pretrained(tmp_path)
    found = diagnose(bundled("chat"), tmp_path)
    assert found.problems == ()
    assert found.facts["method"].startswith("P-EAGLE")
