"""What ran: the report of a step, and the timeline of its calls."""
