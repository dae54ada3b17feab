"""The one decision on a launch, and how it reaches the launch's environment."""
