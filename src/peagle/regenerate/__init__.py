"""The target's own answers to the prompts of a data set, for a drafter to learn from.

run (conversations, turn by turn), answers (the protocol), engine and endpoint (answers by our
engine or by any OpenAI-compatible server), output (the file, which a later run continues),
questions (that the target writes itself).
"""
