"""Target models: one decoder, and the families it can be.

decoder (the causal transformer, and `DecoderConfig`), fused (its layers in few launches), families
(`config.json` to `DecoderConfig`), loading (a directory to a decoder, whole or in parts), weights
(safetensors files, strictly), gpt_oss and mxfp4 (GPT-OSS's expert weights), tokenizer (with the
chat template), generation_config (sampling defaults and end-of-text ids).
"""
