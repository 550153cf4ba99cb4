"""Target models: one decoder, and the families it can be.

spec (what a decoder is: a list of layer specs), decoder (the causal transformer), fused (its layers
in few launches), families (a module each: what `config.json` means, what tensors are called),
loading (a directory to a decoder, whole or in parts), weights (safetensors files, strictly), mxfp4
(the numbers of GPT-OSS's experts), tokenizer (with the chat template), generation_config (sampling
defaults and end-of-text ids).
"""
