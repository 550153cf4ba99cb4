"""Target models: one decoder, and the families it can be."""
