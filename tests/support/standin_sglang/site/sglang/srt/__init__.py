"""What a server of the stand-in is made of."""
