"""Target models: one decoder, and the families it can be.

- What a decoder is: `spec` (a list of layer specs), `decoder` (the causal transformer), `fused`
  (its layers in few launches).
- A directory to one: `families` (a module each: what `config.json` means, what tensors are called),
  `loading` (whole or in parts), `weights` (safetensors files, strictly), `quantization` (the format
  of the weights), `formats` (what files hold of each), `adapter` (LoRA, merged into them),
  `kv_scales` (units of a cache in FP8).
- Others' families, for training alone: `foreign` (as transformers runs them), `ends` (embeddings
  and head of any target), `vllm_support` (which of them vLLM runs).
- Beside it: `tokenizer`, `chat_template`, `generation_config` (sampling defaults and end-of-text
  ids).
"""
