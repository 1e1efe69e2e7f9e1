"""The benchmark: ``python -m fastamp.bench``; each subcommand is one module of this package."""
