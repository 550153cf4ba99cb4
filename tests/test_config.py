import json

import pytest

from peagle import EngineConfig, InputError, SamplingParams, SpeculativeConfig

BAD_SAMPLING = [
    ({"temperature": -0.1}, "temperature: "),
    ({"temperature": float("nan")}, "temperature: "),
    ({"temperature": 1.0, "top_p": 0.0}, "top_p: "),
    ({"temperature": 1.0, "top_p": 1.1}, "top_p: "),
    ({"temperature": 1.0, "top_k": -2}, "top_k: "),
    ({"temperature": 1.0, "top_k": 2**70}, "top_k: "),
    ({"temperature": 1.0, "min_p": 2.0}, "min_p: "),
    ({"repetition_penalty": 0.0}, "repetition_penalty: "),
    ({"repetition_penalty": 1e-40}, "repetition_penalty: "),
    ({"repetition_penalty": float("inf")}, "repetition_penalty: "),
    ({"presence_penalty": 2.5}, "presence_penalty: "),
    ({"frequency_penalty": -3}, "frequency_penalty: "),
    ({"logit_bias": {3: 101.0}}, "logit_bias.3: "),
    ({"max_tokens": 0}, "max_tokens: 0 generates nothing; give at least 1"),
    ({"min_tokens": -1}, "min_tokens: "),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens 5 is above max_tokens 4"),
    ({"logprobs": 21}, "logprobs: "),
    ({"prompt_logprobs": 21}, "prompt_logprobs: "),
    ({"stop": ("",)}, "stop.0: "),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens: "),
    ({"allowed_token_ids": []}, "allowed_token_ids: "),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: "),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: 0 leaves nothing"),
    ({"colour": "red"}, "colour: no such key"),
    ({"max_tokens": 0, "top_k": -9}, "top_k: .*max_tokens: "),
]


@pytest.mark.parametrize(("values", "message"), BAD_SAMPLING)
def test_impossible_sampling_parameters_are_named(values, message: str):
    with pytest.raises(InputError, match=f"^SamplingParams: {message}") as caught:
        SamplingParams(**values)
    assert "\n" not in str(caught.value)


def test_values_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


def test_vllms_json_is_read():
    text = (
        '{"method": "eagle3", "model": "d", "num_speculative_tokens": 5, "parallel_drafting": true}'
    )
    config = SpeculativeConfig.from_json(text)
    assert (config.model, config.num_speculative_tokens, config.parallel_drafting) == ("d", 5, True)
    assert SpeculativeConfig.from_json('{"model": "d"}').parallel_drafting is None


@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        ({"model": "d"}, None),
        ({"method": "ngram", "num_speculative_tokens": 4}, (3, 16)),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}, (2, 2)),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 20}, (20, 20)),
    ],
)
def test_lookups_are_asked_for_by_vllms_keys(values, lengths: tuple[int, int] | None):
    assert SpeculativeConfig(**values).lookup == lengths


@pytest.mark.parametrize("name", ["mtp", "qwen3_5_mtp"])
def test_the_targets_own_head_is_asked_for_by_vllms_names(name: str):
    found = SpeculativeConfig.from_json(json.dumps({"method": name, "num_speculative_tokens": 2}))
    assert found == SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    assert found.has_network


def _synthetic(rates: list[float], k: int) -> str:
    how = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return json.dumps({"model": "d", "num_speculative_tokens": k, **how})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "speculative config is not JSON"),
        ("[" * 100_000, 'speculative config is not JSON: .*; give \'{"model": "DRAFTER"}\''),
        ("9" * 5_000, "speculative config is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "model is missing: give the drafter's directory"),
        (json.dumps({"model": "d", "num_speculative_tokens": 0}), "num_speculative_tokens: "),
        (json.dumps({"model": "d", "method": "medusa"}), "method: "),
        (json.dumps({"model": "d", "method": "ngram"}), "ngram has no drafter; leave out model"),
        (json.dumps({"method": "ngram"}), "ngram needs num_speculative_tokens"),
        (
            json.dumps({"revision": "r", "method": "mtp"}),
            "mtp is the target's own; leave out revision",
        ),
        (
            json.dumps({"method": "mtp", "parallel_drafting": True, "quantization": "fp8"}),
            "mtp is the target's own; leave out parallel_drafting, quantization",
        ),
        (
            json.dumps({"model": "d", "prompt_lookup_min": 5, "prompt_lookup_max": 4}),
            "eagle3 drafts without lookups, which are method ngram's; leave out prompt_lookup_max, "
            "prompt_lookup_min",
        ),
        (json.dumps({"method": "mtp", "prompt_lookup_min": 5}), "leave out prompt_lookup_min"),
        (json.dumps({"method": "ngram", "prompt_lookup_min": 0}), "prompt_lookup_min: "),
        (json.dumps({"model": "d", "tokens": 3}), "tokens: no such key"),
        (
            json.dumps({"model": "d", "rejection_sample_method": "synthetic"}),
            "synthetic_acceptance_rates and rejection_sample_method synthetic go together",
        ),
        (_synthetic([0.5, 0.25], k=3), "has 2 entries; give one for each of num_speculative"),
        (_synthetic([0.5, 0.75], k=2), "no rate may be above the one before"),
        (_synthetic([1.5], k=1), "synthetic_acceptance_rates.0: "),
    ],
)
def test_other_json_is_refused(text: str, message: str):
    with pytest.raises(InputError, match=message):
        SpeculativeConfig.from_json(text)


@pytest.mark.parametrize(
    "values",
    [
        {"dtype": "float16"},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"kv_cache_memory": -1},
        {"max_model_len": 0},
    ],
)
def test_impossible_sizes_are_named(values):
    (name,) = values
    with pytest.raises(InputError, match=f"^EngineConfig: {name}: "):
        EngineConfig(**values)
