"""The methods: one file each. A method says which cached tokens a decode step reads, or which the cache keeps."""
