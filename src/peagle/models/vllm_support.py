"""Which targets vLLM runs with a P-EAGLE or EAGLE-3 drafter."""

SUPPORTED = """
AfmoeForCausalLM Alpamayo2Super ApertusForCausalLM ArceeForCausalLM BeamForCausalLM
Cohere2MoeForCausalLM CohereCompassForConditionalGeneration Cosmos3ForConditionalGeneration
CwmForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
DeepseekV3ForCausalLM DeepseekV41ForCausalLM DeepseekV4ForCausalLM
DeepseekV4ForConditionalGeneration Emu3ForConditionalGeneration Ernie4_5ForCausalLM
Exaone4_5_ForConditionalGeneration FlexOlmoForCausalLM GPTBigCodeForCausalLM GPTNeoXForCausalLM
Glm5NextForCausalLM Glm5NextForConditionalGeneration GlmForCausalLM GlmMoeDsaForCausalLM
GraniteMoeForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM
HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration
IQuestCoderForCausalLM InternLM3ForCausalLM InternS1ProForConditionalGeneration
InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration Jais2ForCausalLM
K2HorizonForCausalLM KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration
KimiLinearForCausalLM Kolibri1ForCausalLM LLaMAForCausalLM LagunaForCausalLM
LightOnOCRForConditionalGeneration Llama4ForCausalLM Llama4ForConditionalGeneration
LlavaForConditionalGeneration MellumForCausalLM MiMoForCausalLM MiMoV2FlashForCausalLM
MiMoV2ForCausalLM MiMoV2OmniForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM
MiniCPMOcrForConditionalGeneration MiniCPMV4_6ForConditionalGeneration
MiniCPMV4_7ForConditionalGeneration MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM
MiniMaxM3SparseForConditionalGeneration MistralLarge3ForCausalLM MuseGlimmerForCausalLM
MuseSparkForConditionalGeneration NanbeigeForCausalLM NemotronHForCausalLM
NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 Olmo2ForCausalLM Olmo3ForCausalLM
OlmoForCausalLM OpenCUAForConditionalGeneration PhiForCausalLM PixtralForConditionalGeneration
Plamo3ForCausalLM Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration
Qwen3ASRRealtimeGeneration Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration
Qwen3VLMoeForConditionalGeneration Qwen4ExpForConditionalGeneration RadioMBartPrefixForCausalLM
SarvamMLAForCausalLM Starcoder2ForCausalLM Step1ForCausalLM TeleChat2ForCausalLM
TeleChat3ForCausalLM TeleFLMForCausalLM VaultGemmaForCausalLM VibeVoiceAsrForConditionalGeneration
"""
"""Targets in the registry of vLLM 0.33.0 whose classes have `SupportsEagle3`, with those that it
gives to transformers by itself, but without peagle's own families."""


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
