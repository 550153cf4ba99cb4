"""The trainer: from a target and text that it generated to a drafter.

A run: recipe (its keys), prepare (everything before the first step), plan and work (what a run
would take, for --dry-run), trainer (the loop), schedule (which rows and chains each step takes),
snapshot (state to resume from), parallel and sharding (several GPUs).

Data: sources (JSONL files and datasets), samples (what a line says), template (conversations to
tokens), own_answers (answers whose tokens are known), conversations (samples to documents), packing
(documents to rows), digest.

Target features: teacher (what a target is, and ways to load it), features (by our decoder, in every
step), transformers_features (by transformers' model), written_features (by vLLM or speculators),
feature_cache and feature_format (kept on disk).

P-EAGLE's pass: cod (which depths each anchor keeps), mask (which keys each query sees), partition
(depth 0 once, deeper elements in segments), segment, context (what segments share), attention.
DFlash's pass: blocks, by the same partition. EAGLE-3's and MTP's: unroll.

Learning: initial (the drafter before step 0), loss (and how much each element counts in
it), estimate (acceptance length without an engine), optimizer, product and lookup (weights
and tables that sum their own gradients).
"""
