"""The tasks: one benchmark a file. A task makes examples, scores predictions and sums rows up to metrics."""
