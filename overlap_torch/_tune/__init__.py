"""Plans by measuring, and the files that keep what was measured."""
