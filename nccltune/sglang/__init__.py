"""What SGLang does with a launch: its flags, its environment and the path of its all-reduces."""
