"""What operators look at: the dashboard's data and, in static/, its page."""
