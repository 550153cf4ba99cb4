import json
import shutil

from safetensors.torch import load_file, save_file


def test_facts_go_to_stdout_and_a_sound_pair_exits_with_0(peagle, pair):
    result = peagle("check", pair.peagle, "--target", pair.target)
    assert (result.code, result.err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert lines["directory"].strip() == str(pair.peagle)
    assert lines["method"].startswith("P-EAGLE")
    assert f"fits {pair.target}" in result.out
    assert "no problem found" in peagle("check", pair.eagle3).out


def test_every_problem_is_a_line_on_stderr_and_the_code_is_2(peagle, pair, tmp_path):
    broken = shutil.copytree(pair.peagle, tmp_path / "broken")
    text = (broken / "config.json").read_text()
    text = text.replace('"ptd_token_id": 1', '"ptd_token_id": 999').replace(
        '"pard_token": 1', '"pard_token": 999'
    )
    (broken / "config.json").write_text(text)
    (broken / "model.safetensors").write_bytes(b"short")
    result = peagle("check", broken, "--target", pair.target)
    assert result.code == 2
    lines = result.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("problem: ") for line in lines)
    assert "model.safetensors is damaged" in lines[0]
    assert "mask token id 999" in lines[1]
    assert "no problem found" not in result.out


def test_k_is_compared_with_what_the_drafter_was_trained_for(peagle, pair):
    assert peagle("check", "--drafter", pair.peagle, "--k", 8).code == 0
    result = peagle("check", pair.peagle, "--k", 9)
    assert result.code == 2
    assert "problem: K = 9 is beyond the 8 tokens that it was trained for; give --k 8" in result.err


def test_a_target_that_would_not_load_is_told_as_well(peagle, pair, tmp_path):
    target = shutil.copytree(pair.target, tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, target / "model.safetensors")
    (target / "tokenizer.json").unlink()
    (target / "generation_config.json").write_text('{"eos_token_id": "0", "top_p": 0}')
    result = peagle("check", pair.peagle, "--target", target)
    assert result.code == 2
    weights, tokenizer, ends, sampling = result.err.splitlines()
    assert "missing tensors: model.norm.weight" in weights
    assert "has no usable tokenizer" in tokenizer
    assert "generation_config.json: eos_token_id 0 must be a token id" in ends
    assert "generation_config.json: top_p: " in sampling


def test_what_is_no_dflash_head_is_not_sound_as_one(peagle, pair):
    asked = json.dumps({"method": "dflash", "model": str(pair.peagle)})
    result = peagle("check", "--speculative-config", asked, "--target", pair.target)
    assert result.code == 2
    assert "its kind is P-EAGLE, not DFlash" in result.err


def test_a_lookup_is_told_and_checked(peagle, pair):
    alone = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 6}'
    result = peagle("check", "--speculative-config", alone, "--target", pair.target)
    assert (result.code, result.err) == (0, "")
    assert "at most 8 drafts after a match of 3 to 6 tokens" in result.out


def test_a_targets_own_head_is_told_and_checked(peagle, pair, own_head):
    asked = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']
    result = peagle("check", *asked, "--target", own_head)
    assert (result.code, result.err) == (0, "")
    assert "MTP: K tokens in K passes of the target's own head" in result.out
    tensors = load_file(own_head / "model.safetensors")
    own = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("mtp."))
    assert f"{own:,}" in result.out
    refused = peagle("check", *asked, "--target", pair.target)
    assert refused.code == 2
    assert "Qwen3ForCausalLM has no head of its own" in refused.err
    assert "give --target" in peagle("check", *asked).err


def test_what_is_wrong_with_a_speculative_config(peagle, pair):
    def said(config: str, *flags: object) -> str:
        result = peagle("check", "--speculative-config", config, *flags)
        assert result.code == 2
        return result.err

    ngram = '{"method": "ngram", "num_speculative_tokens": %d, "prompt_lookup_min": %d}'
    assert "give either --speculative-config or --drafter" in said('{"model": "x"}', pair.peagle)
    both = f'{{"model": "{pair.peagle}", "prompt_lookup_min": 2}}'
    assert "method ngram's; leave out prompt_lookup_min" in said(both)
    contradictory = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 5, '
    assert "raise the second" in said(contradictory + '"prompt_lookup_max": 4}')
    assert "do not fit into the target's context" in said(
        ngram % (10**6, 2), "--target", pair.target
    )
    wrong = f'{{"model": "{pair.peagle}", "parallel_drafting": false}}'
    assert "problem: its kind is P-EAGLE, not EAGLE-3" in said(wrong)
