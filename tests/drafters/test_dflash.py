"""DFlash heads: drafts are z-lab's own, and no text depends on them."""

import json
import re
from pathlib import Path
from typing import Any

import dflash_heads as heads
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from peagle.bench.pair import choose_pair, method_of
from peagle.config import SamplingParams
from peagle.drafters.dflash_checkpoint import is_dflash, read_block_config
from peagle.drafters.diagnosis import diagnose
from peagle.drafters.methods import drafter_for, load_network, proposer_for
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.models.loading import load_decoder
from peagle.speculative_config import SpeculativeConfig

K = heads.BLOCK - 1
ORACLE = json.loads(heads.ORACLE.read_text())
LAYOUTS = list(heads.LAYOUTS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = heads.save_target(tmp_path_factory.mktemp("target"))
    return load_decoder(directory, torch.float32, tiny.CPU)


def engine_of(
    target: Decoder, head: Path | None, resident: bool, k: int = K, **changes: Any
) -> Engine:
    config = tiny.engine_config(max_model_len=96, **changes)
    if head is None:
        return tiny.engine(target, None, 0, resident, config)
    return tiny.engine(target, drafter_for(tiny.load_dflash(head, target)), k, resident, config)


def drafts_of(engine: Engine, prompt: list[int]) -> list[list[int]]:
    """The drafts of each cycle after a prompt."""
    found, proposer = [], engine.proposer
    assert proposer is not None
    real = type(proposer).propose

    def recorded(rows: Any) -> Any:
        draft = real(proposer, rows)
        found.append(draft.tokens[0].tolist())
        return draft

    proposer.propose = recorded  # type: ignore[method-assign]
    tiny.run(engine, [prompt], SamplingParams(max_tokens=heads.NEW))
    return found


@pytest.mark.parametrize("resident", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_its_writer(
    target: Decoder, tmp_path: Path, name: str, resident: bool
) -> None:
    head = heads.save_head(tmp_path, name)
    for prompt, expected in zip(heads.PROMPTS, ORACLE[name], strict=True):
        found = drafts_of(engine_of(target, head, resident, draft_length="fixed"), prompt)
        cycles = min(len(found), len(expected)) - 2  # the last ones have less room there
        assert cycles > 10
        assert found[:cycles] == expected[:cycles]


@pytest.mark.parametrize("resident", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", ["mixed", "second"])
def test_no_text_depends_on_it(target: Decoder, tmp_path: Path, name: str, resident: bool) -> None:
    head, params = heads.save_head(tmp_path, name), SamplingParams(max_tokens=12)
    drawn = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    for each in (params, drawn):
        expected = tiny.outputs(tiny.run(engine_of(target, None, False), heads.PROMPTS, each))
        engine = engine_of(target, head, resident, max_num_batched_tokens=16, block_size=4)
        for _ in range(2):  # the second finds the first in the prefix cache
            assert tiny.outputs(tiny.run(engine, heads.PROMPTS, each)) == expected


def test_drafts_depend_on_the_text_alone(target: Decoder, tmp_path: Path) -> None:
    """However it came to be known: as a prompt, in chunks, or token by token."""
    head, prompt = heads.save_head(tmp_path, "both ways"), heads.PROMPTS[1]
    drafts = drafts_of(engine_of(target, head, False), prompt)
    [request] = tiny.run(engine_of(target, head, False), [prompt], SamplingParams(max_tokens=9))
    for count in (4, 8):
        longer = [*prompt, *request.output[:count]]
        chunked = engine_of(target, head, False, max_num_batched_tokens=7)
        assert drafts_of(chunked, longer)[0] == drafts[count]


def test_trees(target: Decoder, tmp_path: Path) -> None:
    head, params = heads.save_head(tmp_path, "second"), SamplingParams(max_tokens=12)
    expected = tiny.outputs(tiny.run(engine_of(target, None, False), heads.PROMPTS, params))
    drafter = drafter_for(tiny.load_dflash(head, target))
    config = tiny.engine_config(max_model_len=96, max_num_seqs=1)
    engine = Engine(target, drafter, K, config, num_tree_nodes=10)
    assert tiny.outputs(tiny.run(engine, heads.PROMPTS, params)) == expected


def test_a_reduced_vocabulary_of_speculators(target: Decoder, tmp_path: Path) -> None:
    """Drafts are the likeliest of the ids that are kept."""
    kept = list(range(0, heads.VOCAB, 3))
    head = heads.save_speculators_head(tmp_path / "few", kept)
    drafts = drafts_of(engine_of(target, head, False), heads.PROMPTS[0])
    assert {token for each in drafts for token in each} <= set(kept)
    every = heads.save_speculators_head(tmp_path / "all", list(range(heads.VOCAB)))
    whole = drafts_of(engine_of(target, every, False), heads.PROMPTS[0])
    assert whole[0] == ORACLE["full"][0][0] or whole[0] != drafts[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True, False]),  # sliding layers are causal, full ones are not
        ({"dflash_config": {"causal": True}}, [True, True]),
        ({"is_causal": False}, [False, False]),
        ({"use_sliding_window": False}, [False, False]),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 9}}, [False, False]),
    ],
)
def test_who_is_causal(target: Decoder, tmp_path: Path, changes: dict, expected: list) -> None:
    head = heads.save_head(tmp_path, "mixed", **changes.get("dflash_config", {}))
    file = head / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    values["dflash_config"] = json.loads(file.read_text())["dflash_config"]
    file.write_text(json.dumps(values))
    config = read_block_config(head, target.spec)
    assert [each.causal for each in config.transformer.attention.values()] == expected


@pytest.mark.parametrize("non_causal", [True, False])
def test_who_is_causal_in_speculators_layout(
    target: Decoder, tmp_path: Path, non_causal: bool
) -> None:
    head = heads.save_speculators_head(
        tmp_path,
        list(range(heads.VOCAB)),
        {"layer_types": [heads.SLIDING, heads.FULL], "sliding_window": 9},
        sliding_window_non_causal=non_causal,
    )
    config = read_block_config(head, target.spec)
    layers = config.transformer.attention.values()
    assert [each.causal for each in layers] == [not non_causal, False]
    assert config.taps == heads.TAPS


def test_taps_by_default(target: Decoder, tmp_path: Path) -> None:
    head = heads.save_head(tmp_path, "full", target_layer_ids=None)
    assert read_block_config(head, target.spec).taps == (2, 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
        ({"attention_value_scale": 0.5}, "attention_value_scale"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"target_layer_ids": [1, 9, 17]}, "aux layers"),
        ({"target_layer_ids": [2, 0, 1]}, "not ascending"),
        ({"gate_of_next_year": 3}, "gate_of_next_year"),
        ({"target_layer_ids": [0, 1]}, "fc.weight"),
        ({"mask_token_id": 4000}, "mask token id 4000"),
    ],
)
def test_what_does_not_run_is_refused(
    target: Decoder, tmp_path: Path, changes: dict, told: str
) -> None:
    head = heads.save_head(tmp_path, "full", **changes)
    with pytest.raises(InputError, match=told) as refusal:
        tiny.load_dflash(head, target)
    assert "\n" not in str(refusal.value)


def test_a_configuration_names_it_or_its_files_do(target: Decoder, tmp_path: Path) -> None:
    head = heads.save_head(tmp_path / "head", "full")
    assert is_dflash(head)
    for method in ("dflash", "eagle3"):
        config = SpeculativeConfig(method=method, model=str(head))

        def load(given: SpeculativeConfig) -> Any:
            return load_network(given, tmp_path, target)

        proposer, k = proposer_for(config, load, tiny.CPU, heads.VOCAB)
        assert (type(proposer).__name__, k) == ("DFlash", K)
    longer = SpeculativeConfig(method="dflash", model=str(head), num_speculative_tokens=K + 1)
    with pytest.raises(InputError, match=f"above the {K} of its blocks"):
        proposer_for(longer, load, tiny.CPU, heads.VOCAB)


def test_a_key_that_does_not_go_with_what_the_files_show_is_refused(
    target: Decoder, tmp_path: Path
) -> None:
    head = heads.save_head(tmp_path / "head", "full")
    given = SpeculativeConfig(model=str(head), parallel_drafting=False)
    with pytest.raises(InputError, match="dflash has one pass; leave out parallel_drafting"):
        load_network(given, tmp_path, target)


def test_another_drafter_is_none(target: Decoder, tmp_path: Path) -> None:
    other = tiny.save_random_drafter(tmp_path, tiny.drafter_config(True))
    assert not is_dflash(other)
    with pytest.raises(InputError, match="no DFlash head"):
        tiny.load_dflash(other, target)


def test_it_may_be_rounded_to_fp8(target: Decoder, tmp_path: Path) -> None:
    head = heads.save_head(tmp_path, "full")
    drafter = drafter_for(tiny.load_dflash(head, target, "fp8"))
    params = SamplingParams(max_tokens=8)
    engine = tiny.engine(target, drafter, K, False, tiny.engine_config(max_model_len=96))
    expected = tiny.run(engine_of(target, None, False), heads.PROMPTS, params)
    assert tiny.outputs(tiny.run(engine, heads.PROMPTS, params)) == tiny.outputs(expected)


def test_check_says_what_it_is_and_whether_it_fits(tmp_path: Path) -> None:
    target = heads.save_target(tmp_path / "target")
    found = diagnose(heads.save_head(tmp_path / "head", "second"), target)
    assert found.problems == ()
    assert found.facts["method"] == "DFlash: K tokens in one pass over a block, version 2"
    assert found.facts["layers"] == "2, 1 of them with a window of 9, blocks seen both ways"
    assert found.facts["block"] == f"{heads.BLOCK} rows, so K is at most {K}"
    assert diagnose(tmp_path / "head").problems == ()
    other = tiny.save_target(tmp_path / "other")
    assert diagnose(tmp_path / "head", other).problems


def test_a_mask_of_its_own_is_refused(target: Decoder, tmp_path: Path) -> None:
    head = heads.save_head(tmp_path, "full")
    (head / "mask_embedding.pt").touch()
    with pytest.raises(InputError, match=r"mask_embedding\.pt: not supported"):
        tiny.load_dflash(head, target)


def test_it_is_measured_by_its_own_method(target: Decoder, tmp_path: Path) -> None:
    place = heads.save_target(tmp_path / "target")
    head = str(heads.save_head(tmp_path / "head", "full"))
    assert method_of(head) == "dflash"
    pair = choose_pair(["none", "dflash"], str(place), {"dflash": head})
    assert pair.examine()["dflash"].default_k == K
    assert pair.speculation("dflash", 3) == SpeculativeConfig(
        method="dflash", model=head, num_speculative_tokens=3
    )
    with pytest.raises(InputError, match="needs a drafter: give --drafter DIR"):
        choose_pair(["dflash"], None, {})


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, "d2t, which is missing"),
        (torch.arange(32) * 3, "does not map every draft id"),
        (-torch.arange(32), "maps 31 draft ids to tokens that others have"),
    ],
)
def test_check_says_what_is_wrong_with_a_reduced_vocabulary(
    tmp_path: Path, d2t: torch.Tensor | None, message: str
) -> None:
    head = heads.save_speculators_head(tmp_path / "head", list(range(0, heads.VOCAB, 3)))
    target = heads.save_target(tmp_path / "target")
    assert diagnose(head, target).problems == ()
    tensors = load_file(head / "model.safetensors") | {"d2t": d2t}
    save_file({k: v for k, v in tensors.items() if v is not None}, head / "model.safetensors")
    [problem] = diagnose(head, target).problems
    assert re.search(message, problem)
