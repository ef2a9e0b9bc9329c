"""How streams are framed on the wire."""
