"""Request traces: files in published forms, lengths scaled to a context, and arrivals scaled to a load."""
