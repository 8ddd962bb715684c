"""Exact attention over one sequence that lives on many GPUs, and exact sampling over one vocabulary that does."""
