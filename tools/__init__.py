"""Commands run as `python -m tools.NAME`: data preparation, sweeps, comparisons with libraries, figures, profiles."""
