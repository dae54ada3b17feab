"""Real requests to one server, and what came back."""
