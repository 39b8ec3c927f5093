"""The methods: one file each. A method says which cached tokens a decode step reads, or which the cache keeps."""

from fasa_bench.methods import fused_cpu as fused_cpu  # registers its dense attention, for who compares speed
