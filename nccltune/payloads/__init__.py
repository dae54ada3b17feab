"""From a model and a launch to the all-reduces that a decode step makes."""
