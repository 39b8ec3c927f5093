"""Compose a model, a method and a task, run them, store what came out: python run.py model=... method=... task=..."""

from pathlib import Path

from fasa_bench.cli import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent / "conf")
