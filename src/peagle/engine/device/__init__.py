"""Steps on a GPU: captured cycles over state that stays there, and prompts before them."""
