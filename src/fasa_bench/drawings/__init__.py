"""Figures of the paper from stored runs: one module a kind, one style, and a record of what each point is made of."""
