"""Checks that need a cluster: `make test-slurm` and `make test-ray` set up a small one on this machine.

Not collected by `make test`: their files are not called test_*.py.
"""
