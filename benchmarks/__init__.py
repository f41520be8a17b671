"""Every number in the docs, by one command each: `python -m benchmarks.NAME`. Results land in `results/`."""
