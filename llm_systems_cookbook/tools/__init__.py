"""What does a maintainer run? Notebooks, their lint and sync, benchmarks."""
