"""The commands of ``python -m overlap_torch`` that show what is there: doctor, demo, bench."""
