"""From boots to a verdict in words. Pure but for what is handed in."""
