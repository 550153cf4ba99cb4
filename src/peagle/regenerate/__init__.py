"""The target's own answers to the prompts of a data set, for a drafter to learn from."""
