"""Tensor operations: one file an operation, each with its plain torch form."""
