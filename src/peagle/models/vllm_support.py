"""Which targets vLLM runs with a P-EAGLE or EAGLE-3 drafter."""

SUPPORTED = """
AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM Cohere2MoeForCausalLM CwmForCausalLM
DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM Ernie4_5ForCausalLM
FlexOlmoForCausalLM GPTBigCodeForCausalLM GPTNeoXForCausalLM GlmForCausalLM GlmMoeDsaForCausalLM
GraniteMoeForCausalLM GraniteMoeSharedForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
InternLM3ForCausalLM Jais2ForCausalLM LagunaForCausalLM Llama4ForCausalLM
Llama4ForConditionalGeneration LlavaForConditionalGeneration MiMoForCausalLM MiMoV2FlashForCausalLM
MiniCPM3ForCausalLM MiniCPMForCausalLM MiniMaxM2ForCausalLM NemotronHForCausalLM Olmo2ForCausalLM
Olmo3ForCausalLM OlmoForCausalLM PhiForCausalLM Plamo3ForCausalLM Qwen2_5_VLForConditionalGeneration
Qwen3NextForCausalLM Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
Starcoder2ForCausalLM VaultGemmaForCausalLM
"""
"""Read from the wheel of vLLM 0.33.0: models of its registry whose classes have `SupportsEagle3`,
without peagle's own families, and those that it gives to transformers by itself."""


def vllm_runs(architecture: str) -> str:
    """Whether vLLM 0.33 runs a target with a drafter: yes, in which other way, or no.

    Its way through transformers takes any model there whose attention it can replace and which
    keeps no other state.
    """
    import transformers

    if architecture in SUPPORTED.split():
        return "yes"
    model = getattr(transformers, architecture, None)
    if model is None or model._is_stateful or not model.is_backend_compatible():
        return "no"
    return "with --model-impl transformers"
