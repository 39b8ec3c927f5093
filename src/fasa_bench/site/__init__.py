"""The report: one static site of tables, figures, runs and findings, readable from file:// without a network."""
