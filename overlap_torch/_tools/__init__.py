"""Commands of ``python -m overlap_torch``: doctor, demo, explain, bench."""
