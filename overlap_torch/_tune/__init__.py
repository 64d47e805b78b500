"""Plans chosen by measuring, and the files with the measured times."""
