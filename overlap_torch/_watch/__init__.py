"""Records of a run: the report of a step, and the timeline of its calls."""
