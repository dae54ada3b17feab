"""Stand-in for SGLang: its process tree, environment, log lines and endpoints, and no model."""
