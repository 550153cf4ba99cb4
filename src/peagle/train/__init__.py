"""The trainer: from a target and text it generated to a drafter."""
