"""fasa-bench: benchmarks and reproduces frequency-aware sparse attention (FASA) and its peers at decode time."""

from importlib.metadata import version

__version__ = version("fasa-bench")
