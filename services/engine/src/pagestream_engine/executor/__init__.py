"""Where steps run: in this process or in one of its own."""
